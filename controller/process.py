"""The controller process: acts until it is told to stop, and answers over HTTP meanwhile."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from controller.api import build_api
from controller.assembly import controller, launcher_of
from controller.fleet_file import FleetFile, FleetFileError
from controller.launcher import Launcher
from controller.loop import Controller
from engines.listener import bound
from engines.quiet_server import QuietServer

LOGGER = logging.getLogger("heddle.controller")


async def run(fleet: FleetFile) -> None:
    """Act until SIGTERM or SIGINT. Engines stay as they are.

    Raises:
        FleetFileError, ValueError: see assembly.py.
    """
    launcher = launcher_of(fleet)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    acting = asyncio.create_task(_act(fleet, launcher))
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait((acting, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    acting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await acting


async def _act(fleet: FleetFile, launcher: Launcher) -> None:
    async with controller(fleet, launcher) as made, _serving(fleet, made):
        LOGGER.info("acting", extra={"fields": {"fleet": fleet.fleet, "listen": fleet.listen}})
        await made.run()


@asynccontextmanager
async def _serving(fleet: FleetFile, made: Controller) -> AsyncIterator[None]:
    host, _, port = fleet.listen.rpartition(":")
    try:
        listener = bound(host.strip("[]"), int(port))
    except OSError as error:
        raise FleetFileError(f"cannot listen on {fleet.listen}: {error.strerror}") from None
    app = build_api(made, fleet.admin_key)
    server = QuietServer(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, ws="none"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await task
