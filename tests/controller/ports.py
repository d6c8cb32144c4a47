"""A launcher and a gateway in memory, with points at which a controller can be killed.

They outlive controllers, as real ones do, and assert that no controller does harm. A point is the moment before or
after a record, before or after each call that changes something, and in the middle of a launch and of a stop, because
neither is atomic with a real launcher.
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
    """SIGKILL, as far as a process can simulate it on itself: nothing catches it, and nothing works after it."""


class Points(Protocol):
    """Called at every point, and at every look, which changes nothing; what it raises happens there."""

    def pass_point(self) -> None: ...

    def look(self) -> None: ...


@dataclass
class Fuse:
    """Kills the process that passes point number `at`, and everything of it afterwards. None: never."""

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
class LostMessage:
    """Loses one request or its answer at point number `at`: an odd point is before the call, an even one after it.

    Args:
        fault: what the caller sees.
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


@dataclass
class Watched:
    """Points of which whoever waits for a change is told, too.

    Args:
        changed: is set at every point and every look. Whatever changes there has done so when others run again.
    """

    points: Points
    changed: asyncio.Event

    def pass_point(self) -> None:
        self.changed.set()
        self.points.pass_point()

    def look(self) -> None:
        self.changed.set()
        self.points.look()


class FusedJournal(Journal):
    """A journal with a point before and after each record."""

    def __init__(self, path: Path, points: Points) -> None:
        super().__init__(path)
        self._points = points

    def write(self, **record: Any) -> State:
        self._points.pass_point()
        state = super().write(**record)
        self._points.pass_point()
        return state


@dataclass
class Cluster:
    """What exists, whatever a controller believes: servers, and what the gateway knows of them.

    Args:
        turns: running on each server, by URL; they end one look after it gets no new ones.
        asleep: addresses of servers that sleep; see `answering_engines`.
        changed: set whenever something here may have changed.
        num_looks_lost: as many of the next looks at the gateway find nobody.
        num_finds_lost, num_inventories_lost: as many of the next looks at the launcher's servers, or devices, fail.
    """

    devices: tuple[str, ...]
    port: int
    asleep: set[str] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    servers: dict[str, Server] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)
    num_looks_lost: int = 0
    num_finds_lost: int = 0
    num_inventories_lost: int = 0
    num_launched: int = 0

    def alive(self) -> list[Server]:
        return [one for one in self.servers.values() if one.state is not ServerState.EXITED]

    def awake(self) -> list[Server]:
        """Servers that are alive and hold their devices."""
        return [one for one in self.alive() if urlsplit(one.url or "").hostname not in self.asleep]


class MemoryLauncher:
    """One controller's connection to the servers."""

    def __init__(self, cluster: Cluster, points: Points) -> None:
        self._cluster = cluster
        self._points = points

    def inventory(self) -> tuple[str, ...]:
        if self._cluster.num_inventories_lost:
            self._cluster.num_inventories_lost -= 1
            raise OSError("no connection to the launcher")
        return self._cluster.devices

    async def launch(self, spec: ServerSpec) -> Server:
        self._points.pass_point()
        servers = self._cluster.servers
        there = servers.get(spec.server_id)
        if there is None:
            if unknown := set(spec.devices) - set(self._cluster.devices):
                raise LaunchFailed(f"no such device: {unknown}")
            for other in self._cluster.alive():
                if set(other.spec.devices) & set(spec.devices) and other.spec.server_id not in spec.beside:
                    raise LaunchFailed(f"{other.spec.server_id} holds a device of {spec.server_id}")
            self._cluster.num_launched += 1
            url = f"http://127.0.1.{self._cluster.num_launched}:{self._cluster.port}"  # one address each, one listener
            servers[spec.server_id] = Server(spec, ServerState.STARTING, url)
        self._points.pass_point()
        if servers[spec.server_id].state is ServerState.STARTING:
            servers[spec.server_id] = replace(servers[spec.server_id], state=ServerState.RUNNING)
        self._points.pass_point()
        return servers[spec.server_id]

    async def find(self, fleet_id: str) -> list[Server]:
        self._points.look()
        if self._cluster.num_finds_lost:
            self._cluster.num_finds_lost -= 1
            raise OSError("no connection to the launcher")
        return [one for one in self._cluster.servers.values() if one.spec.fleet_id == fleet_id]

    async def stop(self, server_id: str, grace_s: float) -> None:
        self._points.pass_point()
        server = self._cluster.servers.get(server_id)
        if server is None:
            return
        if server.state is not ServerState.EXITED:
            member = self._cluster.members.get(server.url or "")
            assert not self._cluster.turns.get(server.url or ""), "a server is stopped while turns run on it"
            assert member is None or member.is_cordoned, "a server is stopped that the gateway may give turns"
            assert member is None or member.engine_id in self._cluster.moved, "its KV was not offered to others"
        await asyncio.sleep(0)
        self._points.pass_point()
        self._cluster.servers[server_id] = replace(server, state=ServerState.EXITED, exit_cause="stopped")
        self._points.pass_point()


class MemoryGateway:
    """One controller's connection to the gateway, in place of `GatewayClient`."""

    def __init__(self, cluster: Cluster, points: Points) -> None:
        self._cluster = cluster
        self._points = points

    async def engines(self) -> list[Member]:
        self._points.look()
        if self._cluster.num_looks_lost:
            self._cluster.num_looks_lost -= 1
            raise GatewayAway("no connection to the gateway")
        members = []
        for url, member in self._cluster.members.items():
            members.append(replace(member, num_turns=self._cluster.turns.get(url, 0)))
            if member.is_cordoned:
                self._cluster.turns[url] = 0
        return members

    async def add(self, engine: dict[str, Any]) -> None:
        self._points.pass_point()
        self._check_there()
        url = engine["url"]
        server = next(one for one in self._cluster.servers.values() if one.url == url)
        assert server.state is ServerState.RUNNING, "the gateway is told of a server that is not there"
        if url not in self._cluster.members:
            self._cluster.members[url] = Member(f"at {url}", url, is_ready=True, is_cordoned=False, num_turns=0)
            self._cluster.turns[url] = 1
        self._points.pass_point()

    async def drain(self, engine_id: str) -> None:
        await self._change(engine_id, is_cordoned=True)

    async def uncordon(self, engine_id: str) -> None:
        await self._change(engine_id, is_cordoned=False)

    async def remove(self, engine_id: str) -> None:
        self._points.pass_point()
        self._check_there()
        url = engine_id.removeprefix("at ")
        awake = {one.url for one in self._cluster.awake()}
        assert url not in awake, "the gateway is told to forget a server that works"
        self._cluster.members.pop(url, None)
        self._points.pass_point()

    async def evacuate(self, engine_id: str, timeout_s: float) -> None:
        self._points.pass_point()
        assert not self._cluster.turns.get(engine_id.removeprefix("at ")), "KV is moved under a turn"
        self._cluster.moved.add(engine_id)
        self._points.pass_point()

    def close(self) -> None:
        pass

    async def _change(self, engine_id: str, is_cordoned: bool) -> None:
        self._points.pass_point()
        self._check_there()
        url = engine_id.removeprefix("at ")
        self._cluster.members[url] = replace(self._cluster.members[url], is_cordoned=is_cordoned)
        self._cluster.turns[url] = int(not is_cordoned or self._cluster.turns.get(url, 0))
        self._points.pass_point()

    def _check_there(self) -> None:
        if self._cluster.num_looks_lost:
            raise GatewayAway("no connection to the gateway")


class MemoryDemand:
    """No work, as the gateway reports while it is there."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def work(self, since: float = 0.0) -> Work:
        if self._cluster.num_looks_lost:
            raise DemandAway("no connection to the gateway")
        return Work((), None)

    async def aclose(self) -> None:
        pass


@asynccontextmanager
async def answering_engines(asleep: set[str] | None = None, changed: asyncio.Event | None = None) -> AsyncIterator[int]:
    """One listener at every loopback address: each is an engine that answers every request with 200. Gives its port.

    Args:
        asleep: addresses that were told to fall asleep, and not to wake since. They refuse to generate tokens.
        changed: is set whenever one falls asleep or wakes.
    """
    sleeping = set() if asleep is None else asleep

    def status_of(address: str, target: str) -> int:
        if target.startswith("/sleep"):
            sleeping.add(address)
        if target.startswith("/wake_up"):
            sleeping.discard(address)
        if changed is not None and target.startswith(("/sleep", "/wake_up")):
            changed.set()
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
