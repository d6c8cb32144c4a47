"""What every launcher promises, whatever it launches with. Each promise is a function of a `Site`; see PROMISES.

A site gives access to one kind of launcher; its servers are the small Python programs below.
"""

import asyncio
import itertools
import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from controller.launcher import Launcher, LaunchFailed, Server, ServerSpec, ServerState

TIMEOUT_S = 60.0
GRACE_S = 10.0

# Answers with its process id, arguments and environment; prints a line when it is ready.
SERVE = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        about = {"pid": os.getpid(), "arguments": sys.argv[1:], "environment": dict(os.environ)}
        self.wfile.write(json.dumps(about).encode())
    def log_message(self, *_):
        pass
server = HTTPServer(("{host}", int("{port}")), Handler)
print("it listens", flush=True)
server.serve_forever()
"""

# Ends like a server that does not find its model.
FAIL = "import sys; print('loading'); print('no such model'); sys.exit(3)"

# Its last lines are long, as those of progress bars and of settings are.
WORDY = "import sys; print(*('x' * 1_000 for _ in range(40)), sep='\\n'); print('no such model'); sys.exit(3)"

# Ignores SIGTERM, and so does its worker.
STUBBORN = (
    """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while os.fork() == 0:
    time.sleep(86400)
"""
    + SERVE
)


@dataclass
class Site:
    """One kind of launcher, with at least two devices that nobody holds.

    Args:
        connect: a launcher on the same place; called again, it is the launcher of another controller.
        python: runs Python there.
        pinned: the devices that a server with this environment may use; None if nothing is pinned.
    """

    connect: Callable[[], Launcher]
    python: str
    pinned: Callable[[Mapping[str, str]], tuple[str, ...]] | None = None
    fleet_id: str = field(default_factory=lambda: f"fleet-{uuid.uuid4().hex[:8]}")
    numbers: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.launcher = self.connect()

    def spec(self, program: str = SERVE, *devices: str, **fields: Any) -> ServerSpec:
        """A server of this site's fleet with a new id; on the first device if none is given."""
        held = devices or self.launcher.inventory()[:1]
        server_id = f"{self.fleet_id}-{next(self.numbers)}"
        return ServerSpec(
            **{
                "server_id": server_id,
                "fleet_id": self.fleet_id,
                "tp": len(held),
                "devices": held,
                "command": (self.python, "-c", program, "--port", "{port}"),
            }
            | fields
        )

    async def server(self, server_id: str) -> Server | None:
        """The server as it is found now."""
        found = await self.launcher.find(self.fleet_id)
        return next((server for server in found if server.spec.server_id == server_id), None)

    async def until(self, server_id: str, holds: Callable[[Server], bool]) -> Server:
        """The server, once `holds` is true of it."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                server = await self.server(server_id)
                if server is not None and holds(server):
                    return server
                await asyncio.sleep(0.05)

    async def answer(self, server_id: str) -> dict[str, Any]:
        """What a serving program answers about itself, once it does."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                server = await self.until(server_id, lambda server: server.url is not None)
                assert server.state is not ServerState.EXITED, server
                if (about := await asyncio.to_thread(_get, server.url)) is not None:
                    return about
                await asyncio.sleep(0.05)

    async def is_gone(self, server_id: str) -> bool:
        """A stopped server is found as ended, or not at all."""
        server = await self.server(server_id)
        return server is None or server.state is ServerState.EXITED

    async def stop_all(self) -> None:
        """Stop every server, at the end of a test."""
        for server in await self.launcher.find(self.fleet_id):
            await self.launcher.stop(server.spec.server_id, 0.0)


Promise = Callable[[Site], Awaitable[None]]


async def the_inventory_names_each_device_once(site: Site) -> None:
    """No server of a new fleet is there."""
    devices = site.launcher.inventory()
    assert len(devices) >= 2 and len(set(devices)) == len(devices)
    assert await site.launcher.find(site.fleet_id) == []


async def a_launched_server_answers_at_its_url(site: Site) -> None:
    """It is found running, with everything that was asked for and what it wrote."""
    spec = site.spec(environment={"COLOUR": "blue", "KV_HOST": "{host}", "KV_PORT": "{kv_port}"})
    launched = await site.launcher.launch(spec)
    assert launched.spec.server_id == spec.server_id and launched.state is not ServerState.EXITED
    about = await site.answer(spec.server_id)
    found = await site.until(spec.server_id, lambda server: "it listens" in server.last_lines)
    assert found.state is ServerState.RUNNING and found.exit_cause == ""
    assert (found.spec.devices, found.spec.tp, found.spec.fleet_id) == (spec.devices, spec.tp, spec.fleet_id)
    assert about["environment"]["COLOUR"] == "blue"
    assert found.url and about["environment"]["KV_HOST"] in found.url
    assert about["environment"]["KV_PORT"].isdecimal() and about["environment"]["KV_PORT"] not in found.url
    assert about["arguments"] == ["--port", found.url.rpartition(":")[2]] if found.url else False


async def a_server_sees_its_devices_only(site: Site) -> None:
    """Two servers, two devices."""
    first, second = site.launcher.inventory()[:2]
    specs = [site.spec(SERVE, first), site.spec(SERVE, second)]
    for spec in specs:
        await site.launcher.launch(spec)
    for spec in specs:
        about = await site.answer(spec.server_id)
        if site.pinned is not None:
            assert site.pinned(about["environment"]) == spec.devices


async def launching_it_twice_gives_the_same_server(site: Site) -> None:
    """This also holds for another controller at the same time."""
    spec = site.spec()
    await asyncio.gather(site.launcher.launch(spec), site.connect().launch(spec))
    about = await site.answer(spec.server_id)
    again = await site.connect().launch(spec)
    assert again.spec.server_id == spec.server_id
    assert (await site.answer(spec.server_id))["pid"] == about["pid"]
    assert len(await site.launcher.find(site.fleet_id)) == 1


async def an_unknown_device_is_refused(site: Site) -> None:
    """Nothing is launched."""
    with pytest.raises(LaunchFailed, match="no-such-device"):
        await site.launcher.launch(site.spec(SERVE, "no-such-device"))
    assert await site.launcher.find(site.fleet_id) == []


async def a_held_device_is_refused(site: Site) -> None:
    """No device is held twice, whatever a controller believes."""
    first, second = site.launcher.inventory()[:2]
    holder = site.spec(SERVE, first)
    await site.launcher.launch(holder)
    with pytest.raises(LaunchFailed, match=holder.server_id):
        await site.connect().launch(site.spec(SERVE, first, second))
    assert [server.spec.server_id for server in await site.launcher.find(site.fleet_id)] == [holder.server_id]


async def a_server_that_fails_reports_why(site: Site) -> None:
    """Its exit status and last lines are kept until it is stopped."""
    spec = site.spec(FAIL)
    await site.launcher.launch(spec)
    ended = await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
    assert "3" in ended.exit_cause
    assert ended.last_lines[-1] == "no such model"


async def the_end_of_long_output_is_kept(site: Site) -> None:
    """It says why the server ended."""
    spec = site.spec(WORDY)
    await site.launcher.launch(spec)
    ended = await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
    assert ended.last_lines[-1] == "no such model" and len(ended.last_lines) > 10


async def a_server_that_has_ended_holds_no_device(site: Site) -> None:
    """Its device can be taken before anybody stops it."""
    failed = site.spec(FAIL)
    await site.launcher.launch(failed)
    await site.until(failed.server_id, lambda server: server.state is ServerState.EXITED)
    spec = site.spec()
    await site.launcher.launch(spec)
    await site.answer(spec.server_id)


async def another_controller_finds_and_stops_it(site: Site) -> None:
    """Servers do not belong to the launcher that started them."""
    spec = site.spec()
    await site.launcher.launch(spec)
    await site.answer(spec.server_id)
    other = site.connect()
    assert [server.spec.server_id for server in await other.find(site.fleet_id)] == [spec.server_id]
    await other.stop(spec.server_id, GRACE_S)
    assert await site.is_gone(spec.server_id)


async def stopping_frees_the_devices(site: Site) -> None:
    """On return, the next server may have them. Stopping again, or stopping a server that never was, does nothing."""
    spec = site.spec()
    url = (await site.launcher.launch(spec)).url
    await site.answer(spec.server_id)
    url = (await site.until(spec.server_id, lambda server: server.url is not None)).url
    await site.launcher.stop(spec.server_id, GRACE_S)
    assert await site.is_gone(spec.server_id) and _get(url) is None
    await site.launcher.stop(spec.server_id, GRACE_S)
    await site.launcher.stop("never-launched", GRACE_S)
    successor = site.spec()
    await site.launcher.launch(successor)
    await site.answer(successor.server_id)


async def a_server_that_ignores_sigterm_is_killed(site: Site) -> None:
    """Its workers are killed, too: nothing answers, and its devices are free."""
    spec = site.spec(STUBBORN)
    await site.launcher.launch(spec)
    await site.answer(spec.server_id)
    url = (await site.until(spec.server_id, lambda server: server.url is not None)).url
    await site.launcher.stop(spec.server_id, 0.2)
    assert await site.is_gone(spec.server_id) and _get(url) is None
    await site.launcher.launch(site.spec())


async def a_server_can_be_stopped_while_it_starts(site: Site) -> None:
    """It is stopped right after its launch and does not come up later."""
    spec = site.spec()
    await asyncio.gather(site.launcher.launch(spec), site.launcher.stop("never-launched", 0.0))
    await site.connect().stop(spec.server_id, 0.0)
    assert await site.is_gone(spec.server_id)
    successor = site.spec()
    await site.launcher.launch(successor)
    await site.answer(successor.server_id)
    assert await site.is_gone(spec.server_id)


async def fleets_do_not_see_each_other(site: Site) -> None:
    """This holds although they share devices."""
    spec = site.spec()
    await site.launcher.launch(spec)
    assert await site.launcher.find(f"{site.fleet_id}-other") == []


PROMISES: tuple[Promise, ...] = (
    the_inventory_names_each_device_once,
    a_launched_server_answers_at_its_url,
    a_server_sees_its_devices_only,
    launching_it_twice_gives_the_same_server,
    an_unknown_device_is_refused,
    a_held_device_is_refused,
    a_server_that_fails_reports_why,
    the_end_of_long_output_is_kept,
    a_server_that_has_ended_holds_no_device,
    another_controller_finds_and_stops_it,
    stopping_frees_the_devices,
    a_server_that_ignores_sigterm_is_killed,
    a_server_can_be_stopped_while_it_starts,
    fleets_do_not_see_each_other,
)


def _get(url: str | None) -> dict[str, Any] | None:
    assert url is not None
    try:
        with urllib.request.urlopen(url, timeout=5.0) as response:
            about: dict[str, Any] = json.loads(response.read())
            return about
    except (OSError, urllib.error.URLError):
        return None
