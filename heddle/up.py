"""`heddle up`: gateway and controller of one fleet on this machine, from one command.

They remain two processes: neither can block the other, and each can be killed alone. This one starts them, ends them
together, and takes no part in their work. Engines outlive all three; the next `heddle up` adopts them.
"""

import argparse
import asyncio
import ctypes
import os
import signal
import sys
from urllib.parse import urlsplit

from controller.admin_key import ADMIN_KEY_VARIABLE
from controller.fleet_file import FleetFile, FleetFileError, load_fleet_file
from engines.listener import bound

_PR_SET_PDEATHSIG = 1
# Where a keeper or systemd keeps descriptors of this process. Those of its gateway would never come back to a gateway,
# and the kept listening socket would be in the way of the next one.
_KEEPERS_VARIABLES = ("NOTIFY_SOCKET", "FDSTORE")
_EPILOG = """examples:
  HEDDLE_ADMIN_KEY=... heddle up --fleet fleet.toml
  HEDDLE_ADMIN_KEY=... heddle up --fleet fleet.toml --config heddle.toml

a fleet.toml of simulated engines, for a first look (all keys: docs/controller.md):
  fleet = "first"
  model = "simulated"
  cpu_slots = 2
  tp_sizes = [1, 2]
  engine = { kind = "sim", profiles = { 1 = "toy-cpu-tp1", 2 = "toy-cpu-tp2" } }

The gateway listens at the `gateway` URL of the fleet file. Agents use that URL followed by /v1.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the two files."""
    parser.epilog = _EPILOG
    parser.add_argument("--fleet", required=True, metavar="FILE", help="the fleet file")
    parser.add_argument("--config", metavar="FILE", help="the gateway's settings file")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")


async def run(parsed: argparse.Namespace) -> int:
    """Run both until one ends or this process is told to stop. Returns 0 if told; else the status of the one that
    ended, or 1 if that was 0.
    """
    try:
        fleet = load_fleet_file(parsed.fleet)
        if fleet.admin_key is None:
            raise FleetFileError(f"gateway and controller need a shared secret: set {ADMIN_KEY_VARIABLE}")
        at = urlsplit(fleet.gateway)
        if at.scheme != "http" or at.path:
            raise FleetFileError(
                f"{parsed.fleet}: gateway: it is started here and speaks plain HTTP, so its URL must be such as "
                f"http://127.0.0.1:8080, not {fleet.gateway!r}"
            )
        host, port = at.hostname or "127.0.0.1", at.port or 80
        _check_free(host, port)
    except FleetFileError as error:
        print(f"heddle up: {error}", file=sys.stderr)
        return 2
    print(_told(fleet), file=sys.stderr)
    address = ("--host", host, "--port", str(port), "--log-level", parsed.log_level)
    config = ("--config", parsed.config) if parsed.config else ()
    children = {
        "gateway": await _started("serve", *config, *address),
        "controller": await _started("controller", "--fleet", parsed.fleet, "--log-level", parsed.log_level),
    }
    ending = [asyncio.create_task(process.wait(), name=name) for name, process in children.items()]
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    told = asyncio.create_task(stopping.wait())
    await asyncio.wait((*ending, told), return_when=asyncio.FIRST_COMPLETED)
    ended = next((task for task in ending if task.done()), None)
    for process in children.values():
        if process.returncode is None:
            process.terminate()
    await asyncio.gather(*ending)  # the gateway limits its own shutdown: shutdown_timeout_s
    told.cancel()
    if stopping.is_set() or ended is None:
        return 0
    print(f"heddle up: the {ended.get_name()} ended with status {ended.result()}, so both stop", file=sys.stderr)
    return ended.result() if ended.result() > 0 else 1


def _told(fleet: FleetFile) -> str:
    """What the user should know before logs fill the screen."""
    commands = f"--controller http://{fleet.listen}"
    return (
        f"heddle up: agents use {fleet.gateway}/v1; `heddle fleet show {commands}` shows the engines.\n"
        f"Ctrl-C stops both but not the engines; to stop those first: `heddle fleet scale 0xTP1 --empty {commands}`."
    )


def _check_free(host: str, port: int) -> None:
    """Raises FleetFileError if the gateway could not listen there: the controller would take another one that does for
    this fleet's, and give it engines.
    """
    try:
        bound(host, port).close()
    except OSError as error:
        raise FleetFileError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


async def _started(*arguments: str) -> asyncio.subprocess.Process:
    """A Heddle verb, which is asked to end when this process ends for any reason."""
    parent = os.getpid()

    def end_with_parent() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it had already gone
            os.kill(os.getpid(), signal.SIGTERM)

    command = (sys.executable, "-m", "heddle", *arguments)
    environment = {name: value for name, value in os.environ.items() if name not in _KEEPERS_VARIABLES}
    return await asyncio.create_subprocess_exec(*command, env=environment, preexec_fn=end_with_parent)
