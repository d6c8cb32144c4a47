"""A launcher and a gateway in memory, before and behind which a controller can be killed at every point.

They outlive controllers, as processes and the gateway do, and assert that no controller does harm. A point is the
moment before or after a record, before or after each call that changes something, and in the middle of a launch and of
a stop, which are not one act with any real launcher.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from controller.demand import DemandAway, Work
from controller.gateway_client import GatewayAway, Member
from controller.journal import Journal, State
from controller.launcher import LaunchFailed, Server, ServerSpec, ServerState


class Killed(BaseException):
    """SIGKILL, as far as a process can show it to itself: nothing catches it, and nothing works after it."""


class Points(Protocol):
    """Told of every point that is passed, and of every look, which changes nothing; what it raises happens there."""

    def pass_point(self) -> None: ...

    def look(self) -> None: ...


@dataclass
class Fuse:
    """Kills whoever passes point number `at`, and everything of that process after it. None: never."""

    at: int | None = None
    num_passed: int = 0
    is_blown: bool = False

    def pass_point(self) -> None:
        if self.is_blown:
            raise Killed
        self.num_passed += 1
        if self.num_passed == self.at:
            self.is_blown = True
            raise Killed

    def look(self) -> None:
        if self.is_blown:
            raise Killed


@dataclass
class BadLine:
    """Loses one request or its answer: at point number `at`, an odd one before it is done, an even one behind that.

    Args:
        fault: what whoever asked sees of it.
        then: called at that moment.
    """

    at: int
    fault: Exception
    then: Callable[[], None]
    num_passed: int = 0

    def pass_point(self) -> None:
        self.num_passed += 1
        if self.num_passed == self.at:
            self.then()
            raise self.fault

    def look(self) -> None:
        pass


class FusedJournal(Journal):
    """A journal with a point before and after each record."""

    def __init__(self, path: Path, fuse: Fuse) -> None:
        super().__init__(path)
        self._fuse = fuse

    def write(self, **record: Any) -> State:
        self._fuse.pass_point()
        state = super().write(**record)
        self._fuse.pass_point()
        return state


@dataclass
class Floor:
    """What is there whatever a controller believes: servers, and what the gateway has of them.

    Args:
        turns: running on each server, by URL; they end one look after nothing new comes.
        asleep: addresses of servers that sleep; see `answering_engines`.
        looks_lost: so many looks at the gateway still find nobody.
        finds_lost: so many looks at the launcher still fail.
    """

    devices: tuple[str, ...]
    port: int
    asleep: set[str] = field(default_factory=set)
    servers: dict[str, Server] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)
    looks_lost: int = 0
    finds_lost: int = 0

    def alive(self) -> list[Server]:
        return [one for one in self.servers.values() if one.state is not ServerState.EXITED]

    def awake(self) -> list[Server]:
        """Of those alive, who holds its devices."""
        return [one for one in self.alive() if urlsplit(one.url or "").hostname not in self.asleep]


class MemoryLauncher:
    """One controller's way to the servers."""

    def __init__(self, floor: Floor, points: Points) -> None:
        self._floor = floor
        self._points = points

    def inventory(self) -> tuple[str, ...]:
        return self._floor.devices

    async def launch(self, spec: ServerSpec) -> Server:
        self._points.pass_point()
        servers = self._floor.servers
        there = servers.get(spec.server_id)
        if there is None:
            for other in self._floor.alive():
                if set(other.spec.devices) & set(spec.devices) and other.spec.server_id not in spec.beside:
                    raise LaunchFailed(f"{other.spec.server_id} holds a device of {spec.server_id}")
            url = f"http://127.0.1.{len(servers) + 1}:{self._floor.port}"  # another address for each, one listener
            servers[spec.server_id] = Server(spec, ServerState.STARTING, url)
        self._points.pass_point()
        if servers[spec.server_id].state is ServerState.STARTING:
            servers[spec.server_id] = replace(servers[spec.server_id], state=ServerState.RUNNING)
        self._points.pass_point()
        return servers[spec.server_id]

    async def find(self, fleet_id: str) -> list[Server]:
        self._points.look()
        if self._floor.finds_lost:
            self._floor.finds_lost -= 1
            raise OSError("no connection to the launcher")
        return [one for one in self._floor.servers.values() if one.spec.fleet_id == fleet_id]

    async def stop(self, server_id: str, grace_s: float) -> None:
        self._points.pass_point()
        server = self._floor.servers.get(server_id)
        if server is None:
            return
        if server.state is not ServerState.EXITED:
            member = self._floor.members.get(server.url or "")
            assert not self._floor.turns.get(server.url or ""), "a server is stopped while turns run on it"
            assert member is None or member.is_cordoned, "a server is stopped that the gateway may give turns"
            assert member is None or member.engine_id in self._floor.moved, "its KV was not offered to others"
        await asyncio.sleep(0)
        self._points.pass_point()
        self._floor.servers[server_id] = replace(server, state=ServerState.EXITED, exit_cause="stopped")
        self._points.pass_point()


class MemoryGateway:
    """One controller's way to the gateway; in place of `GatewayClient`."""

    def __init__(self, floor: Floor, points: Points) -> None:
        self._floor = floor
        self._points = points

    async def engines(self) -> list[Member]:
        self._points.look()
        if self._floor.looks_lost:
            self._floor.looks_lost -= 1
            raise GatewayAway("no connection to the gateway")
        told = []
        for url, member in self._floor.members.items():
            told.append(replace(member, num_turns=self._floor.turns.get(url, 0)))
            if member.is_cordoned:
                self._floor.turns[url] = 0
        return told

    async def add(self, engine: dict[str, Any]) -> None:
        self._points.pass_point()
        self._check_there()
        url = engine["url"]
        server = next(one for one in self._floor.servers.values() if one.url == url)
        assert server.state is ServerState.RUNNING, "the gateway is told of a server that is not there"
        if url not in self._floor.members:
            self._floor.members[url] = Member(f"at {url}", url, is_ready=True, is_cordoned=False, num_turns=0)
            self._floor.turns[url] = 1
        self._points.pass_point()

    async def drain(self, engine_id: str) -> None:
        await self._change(engine_id, is_cordoned=True)

    async def uncordon(self, engine_id: str) -> None:
        await self._change(engine_id, is_cordoned=False)

    async def remove(self, engine_id: str) -> None:
        self._points.pass_point()
        self._check_there()
        url = engine_id.removeprefix("at ")
        awake = {one.url for one in self._floor.awake()}
        assert url not in awake, "the gateway is told to forget a server that works"
        self._floor.members.pop(url, None)
        self._points.pass_point()

    async def move(self, engine_id: str) -> None:
        """The mover."""
        self._points.pass_point()
        assert not self._floor.turns.get(engine_id.removeprefix("at ")), "KV is moved under a turn"
        self._floor.moved.add(engine_id)
        self._points.pass_point()

    def close(self) -> None:
        pass

    async def _change(self, engine_id: str, is_cordoned: bool) -> None:
        self._points.pass_point()
        self._check_there()
        url = engine_id.removeprefix("at ")
        self._floor.members[url] = replace(self._floor.members[url], is_cordoned=is_cordoned)
        self._floor.turns[url] = int(not is_cordoned or self._floor.turns.get(url, 0))
        self._points.pass_point()

    def _check_there(self) -> None:
        if self._floor.looks_lost:
            raise GatewayAway("no connection to the gateway")


class MemoryDemand:
    """Nothing to do, as the gateway says while it is there."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor

    async def work(self, since: float = 0.0) -> Work:
        if self._floor.looks_lost:
            raise DemandAway("no connection to the gateway")
        return Work((), 0, None)

    async def aclose(self) -> None:
        pass


@asynccontextmanager
async def answering_engines(asleep: set[str] | None = None) -> AsyncIterator[int]:
    """One listener at every loopback address, each an engine that answers every request with 200; gives its port.

    Args:
        asleep: addresses that were told to fall asleep, and not to wake since. They refuse to make tokens.
    """
    sleeping = set() if asleep is None else asleep

    def status_of(address: str, target: str) -> int:
        if target.startswith("/sleep"):
            sleeping.add(address)
        if target.startswith("/wake_up"):
            sleeping.discard(address)
        return 503 if target == "/v1/completions" and address in sleeping else 200

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("sockname")[0]
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.lower().split(b"\r\n")
                length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), 0)
                await reader.readexactly(length)
                status = status_of(address, lines[0].split(b" ")[1].decode())
                writer.write(b"HTTP/1.1 %d OK\r\ncontent-length: 2\r\n\r\n{}" % status)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "0.0.0.0", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
