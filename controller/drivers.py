"""Carries out single steps: with the launcher, the gateway and the new server. Each one is safe to repeat.

Slow phases are measured, and recorded for the relaunch cost of the next plan: `drain` (until no turn runs), `move` (of
KV), `stop`, `start` (launch until warm), `sleep`, `wake` and `register` (until the gateway gives it turns).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, assert_never

import orjson

from controller.commands import served_name, server_spec
from controller.fleet_file import FleetFile, engine_kind
from controller.gateway_client import GatewayClient
from controller.journal import Journal
from controller.launcher import Launcher, Server
from controller.records import step_record
from controller.steps import (
    Drain,
    Launch,
    MakeReady,
    MoveKv,
    ObservedServer,
    Register,
    Remove,
    Reopen,
    Sleep,
    SleepState,
    Step,
    Stop,
    Wake,
)
from engines.dialect import Asleep, ObservationError
from engines.http import FAULTS, HttpClient
from engines.kv_connectors import tier_name
from engines.sleep import SLEEP, SleepFault
from engines.vllm import Vllm

_POLL_S = 0.2
_PROBE_TIMEOUT_S = 5.0


class StartFailed(Exception):
    """A server did not become ready; the message is the cause."""


class LaunchHindered(Exception):
    """The launcher cannot start a server now; the message is its own. It may be launched again."""


class StopFailed(Exception):
    """A server is not known to have ended; the message is the launcher's. It may be stopped again."""


class Drivers:
    """Carries out steps.

    Args:
        servers: returns the launcher's servers as they were last observed: a step does not look by itself.
    """

    def __init__(
        self,
        fleet: FleetFile,
        launcher: Launcher,
        gateway: GatewayClient,
        journal: Journal,
        servers: Callable[[], Sequence[Server]],
    ) -> None:
        self.ready: set[str] = set()
        self.launched: set[str] = set()
        self._fleet = fleet
        self._launcher = launcher
        self._gateway = gateway
        self._journal = journal
        self._servers = servers
        self._sleep = SLEEP[engine_kind(fleet.engine.kind)]
        self._began: dict[tuple[str, str], float] = {}

    async def perform(self, step: Step) -> None:
        """Carry out a step, with a record before it and one after it.

        Raises:
            StartFailed: a server did not become ready, or did not wake.
            LaunchFailed: it could not even be launched.
            LaunchHindered: it cannot be launched now.
            StopFailed: its node or its cluster does not answer, or this machine's disk is full.
            SleepFault, CannotSleep: it did not fall asleep.
            GatewayAway, GatewayRefused: see there.
        """
        more: dict[str, Any] = {}
        if isinstance(step, Register):
            more = {"url": self._url(step.server_id)}
        if isinstance(step, Sleep):
            more = {"level": self._fleet.sleep.level}
        self._journal.write(**step_record("begun", step, time.time(), **more))
        await self._do(step)
        self._journal.write(**step_record("done", step, time.time(), **more))

    def note(self, one: ObservedServer) -> None:
        """Note what ends by itself: a server that was registered now serves."""
        if one.is_serving:
            self._ended("register", one.server_id, one.tp)

    async def sleeps(self, url: str | None) -> bool:
        """Whether the server at this URL reports that it sleeps; only vLLM does."""
        if url is None or not self._fleet.sleep.tp_sizes or self._fleet.engine.kind == "sglang":
            return False
        http = HttpClient(url)
        try:
            await Vllm().observe(http, _PROBE_TIMEOUT_S)
        except Asleep:
            return True
        except (ObservationError, *FAULTS):
            return False
        finally:
            http.close()
        return False

    async def _do(self, step: Step) -> None:
        server_id = step.server_id
        match step:
            case Launch():
                self._begins("start", server_id)
                asleep = (one for one, rest in self._journal.state.rest.items() if rest == SleepState.ASLEEP)
                try:
                    await self._launcher.launch(server_spec(self._fleet, step.wanted, asleep))
                except OSError as fault:
                    raise LaunchHindered(str(fault)) from fault
                self.launched.add(server_id)
            case Sleep():
                self._begins("sleep", server_id)
                self.ready.discard(server_id)
                await self._at_server(server_id, self._sleep.fall_asleep)
                self._ended("sleep", server_id, self._tp(server_id))
            case Wake():
                self._begins("wake", server_id)
                try:
                    await self._at_server(server_id, self._sleep.wake)
                except SleepFault as fault:
                    raise StartFailed(f"it did not wake: {fault}") from None
                self._ended("wake", server_id, self._tp(server_id))
            case MakeReady():
                await self._make_ready(server_id)
                self.ready.add(server_id)
                self._ended("start", server_id, self._tp(server_id))
            case Register():
                self._begins("register", server_id)
                await self._register(server_id)
            case Drain():
                self._begins("drain", server_id)
                await self._at_gateway(server_id, self._gateway.drain)
            case Reopen():
                self._began.pop(("drain", server_id), None)
                await self._at_gateway(server_id, self._gateway.uncordon)
            case MoveKv():
                self._ended("drain", server_id, self._tp(server_id))
                self._begins("move", server_id)
                evacuate = partial(self._gateway.evacuate, timeout_s=self._fleet.limits.move_timeout_s)
                await self._at_gateway(server_id, evacuate)
                self._ended("move", server_id, self._tp(server_id))
            case Stop():
                self._begins("stop", server_id)
                tp = self._tp(server_id)
                try:
                    await self._launcher.stop(server_id, self._fleet.limits.stop_grace_s)
                except OSError as fault:
                    raise StopFailed(str(fault)) from fault
                self._ended("stop", server_id, tp)
            case Remove():
                await self._at_gateway(server_id, self._gateway.remove)
            case _:
                assert_never(step)

    async def _make_ready(self, server_id: str) -> None:
        lack = "it has no address"
        try:
            async with asyncio.timeout(self._fleet.limits.start_timeout_s):
                while (url := self._url(server_id)) is None:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
                http, lack = HttpClient(url), "it has not answered"
                try:
                    while found := await _lack(http):
                        lack = found
                        await asyncio.sleep(_POLL_S)
                    lack = "the warm-up request was not answered"
                    await self._warm_up(http)
                finally:
                    http.close()
        except TimeoutError:
            server = self._server(server_id)
            lack = (server is not None and server.waits_for) or lack
            raise StartFailed(f"not ready in {self._fleet.limits.start_timeout_s:g} s: {lack}") from None

    async def _warm_up(self, http: HttpClient) -> None:
        warm_up = self._fleet.warm_up
        if not warm_up.max_tokens:
            if self._fleet.engine.kind != "sglang":  # it takes any name, and its own changes with its weights
                await _check_model(http, served_name(self._fleet))
            return
        request = {
            "model": served_name(self._fleet),
            "prompt": warm_up.prompt,
            "max_tokens": warm_up.max_tokens,
            "temperature": 0,
        }
        try:
            status, said = await http.post("/v1/completions", orjson.dumps(request), warm_up.timeout_s)
        except FAULTS as fault:
            raise StartFailed(f"the warm-up request was not answered: {fault or type(fault).__name__}") from None
        if status != 200:
            raise StartFailed(f"the warm-up request was answered with {status}: {said[:300].decode(errors='replace')}")

    async def _register(self, server_id: str) -> None:
        url, tp = self._url(server_id), self._tp(server_id)
        for other, taken in self._journal.state.urls.items():
            if taken == url and other != server_id:  # an earlier server had this address
                await self._at_gateway(other, self._gateway.remove)
                self._journal.write(**step_record("done", Remove(other), time.time()))
        engine = self._fleet.engine
        said = {
            "url": url,
            "tp": tp,
            "kind": None if engine.kind == "sim" else engine.kind,
            "profile": engine.profiles.get(tp),
            "slots": engine.slots,
            "kv_transfer": engine.kv_transfer,
            "kv_tier": tier_name(engine.kind, engine.kv_tier, tp) if engine.kv_tier is not None else None,
        }
        await self._gateway.add({name: value for name, value in said.items() if value is not None})

    async def _at_server(self, server_id: str, act: Callable[[HttpClient, int, float], Awaitable[None]]) -> None:
        """Act on the server itself. Raises SleepFault."""
        url = self._url(server_id)
        if url is None:
            raise SleepFault("it has no address")
        http = HttpClient(url)
        try:
            level = self._journal.state.levels.get(server_id, self._fleet.sleep.level)
            await act(http, level, self._fleet.limits.sleep_timeout_s)
        finally:
            http.close()

    async def _at_gateway(self, server_id: str, act: Callable[[str], Awaitable[None]]) -> None:
        """Act on the engine that the gateway has at the server's address, if it has one."""
        url = self._journal.state.urls.get(server_id)
        for member in await self._gateway.engines():
            if member.url == url:
                await act(member.engine_id)

    def _server(self, server_id: str) -> Server | None:
        return next((one for one in self._servers() if one.spec.server_id == server_id), None)

    def _url(self, server_id: str) -> str | None:
        server = self._server(server_id)
        return None if server is None else server.url

    def _tp(self, server_id: str) -> int:
        server = self._server(server_id)
        return 0 if server is None else server.spec.tp

    def _begins(self, phase: str, server_id: str) -> None:
        self._began[phase, server_id] = time.monotonic()

    def _ended(self, phase: str, server_id: str, tp: int) -> None:
        """Record a phase; one that began under another controller is not measured."""
        began_at = self._began.pop((phase, server_id), None)
        if began_at is not None and tp:
            seconds = round(time.monotonic() - began_at, 3)
            more = {"phase": phase, "tp": tp, "server_id": server_id, "engine_kind": self._fleet.engine.kind}
            self._journal.write(kind="phase", at=time.time(), seconds=seconds, **more)


async def _check_model(http: HttpClient, model: str) -> None:
    """Raises StartFailed if a server that answers does not serve this model."""
    try:
        _, said = await http.get("/v1/models", _PROBE_TIMEOUT_S)
        models = [str(one["id"]) for one in orjson.loads(said)["data"]]
    except FAULTS as fault:
        raise StartFailed(f"/v1/models was not answered: {fault or type(fault).__name__}") from None
    except (KeyError, TypeError, ValueError):
        raise StartFailed("/v1/models: not the answer of an engine") from None
    if model not in models:
        raise StartFailed(f"it serves {', '.join(models)}, not {model}")


async def _lack(http: HttpClient) -> str:
    """What keeps a server from serving; "" if nothing does. SGLang answers `/health` before it can generate, vLLM
    `/v1/models` only when it can.
    """
    for target in ("/health", "/v1/models"):
        try:
            status, _ = await http.get(target, _PROBE_TIMEOUT_S)
        except FAULTS as fault:
            return f"{target}: {fault or type(fault).__name__}"
        if status != 200:
            return f"{target} answered {status}"
    return ""
