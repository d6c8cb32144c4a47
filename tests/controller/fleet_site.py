"""A fleet of simulated engines in processes of their own, with a gateway and a controller."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from controller.assembly import controller
from controller.fleet_file import FleetFile
from controller.launcher import Server, ServerState
from controller.local_launcher import LocalLauncher
from controller.loop import Controller
from controller.steps import is_reached
from tests.support.gateway import ADMIN_KEY

TIMEOUT_S = 90.0

# Fast toy engines; planning needs their profiles.
ENGINE = {"kind": "sim", "profiles": {1: "toy-cpu-tp1", 2: "toy-cpu-tp2"}}


def fleet_file(state_dir: Path, gateway_url: str, **changes: Any) -> FleetFile:
    """A fleet of two CPU slots, which can be two engines of TP 1 or one of TP 2."""
    fields: dict[str, Any] = {
        "fleet": "test",
        "model": "simulated",
        "gateway": gateway_url,
        "state_dir": state_dir,
        "cpu_slots": 2,
        "tp_sizes": (1, 2),
        "engine": ENGINE,
        "limits": {"observe_interval_s": 0.05, "stop_grace_s": 5.0, "back_off_s": 0.1},
        "planning": {"interval_s": 0.2},
        "admin_key": ADMIN_KEY,
    }
    return FleetFile(**fields | changes)


def launcher_for(fleet: FleetFile) -> LocalLauncher:
    return LocalLauncher(fleet.state_dir / "servers", fleet.local_devices, None)


async def alive(fleet: FleetFile) -> dict[str, Server]:
    """The servers that have not ended, by their ids."""
    found = await launcher_for(fleet).find(fleet.fleet)
    return {one.spec.server_id: one for one in found if one.state is not ServerState.EXITED}


@asynccontextmanager
async def acting(fleet: FleetFile) -> AsyncIterator[Controller]:
    """A controller that runs in this process."""
    async with controller(fleet, launcher_for(fleet)) as made:
        task = asyncio.create_task(made.run())
        try:
            yield made
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def acting_without_its_journal(fleet: FleetFile, *tps: int) -> AsyncIterator[Controller]:
    """A controller that lost the journal of a fleet of these sizes, and adopted the same servers."""
    async with acting(fleet) as made:
        await until_reached(made, *tps)
        before = {one.server_id for one in made.journal.state.wanted}
    (fleet.state_dir / "journal.jsonl").unlink()
    async with acting(fleet) as made:
        await until_reached(made, *tps)
        assert {one.server_id for one in made.journal.state.wanted} == before
        yield made


@asynccontextmanager
async def stopped_at_the_end(fleet: FleetFile) -> AsyncIterator[None]:
    """Servers outlive controllers, but not a test."""
    try:
        yield
    finally:
        launcher = launcher_for(fleet)
        servers = await launcher.find(fleet.fleet)
        await asyncio.gather(*(launcher.stop(server.spec.server_id, 0.0) for server in servers))


async def until(holds: Callable[[], bool], what: Callable[[], Any] = lambda: "", timeout_s: float = TIMEOUT_S) -> None:
    """Wait until `holds` is true; `what` describes what was seen instead."""
    try:
        async with asyncio.timeout(timeout_s):
            while not holds():  # noqa: ASYNC110 (other processes raise no event here)
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"never happened: {what()}") from None


async def until_reached(made: Controller, *tps: int, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until the fleet has these sizes and serves."""

    def holds() -> bool:
        state = made.journal.state
        return sorted(one.tp for one in state.wanted) == sorted(tps) and is_reached(state.wanted, made.seen)

    await until(holds, lambda: (made.journal.state, made.seen, made.alarms), timeout_s)


async def engines(gateway_url: str) -> list[dict[str, Any]]:
    """The engines that the gateway has."""
    async with httpx.AsyncClient() as client:
        found: list[dict[str, Any]] = (await client.get(f"{gateway_url}/v1/engines")).json()["data"]
        return found


async def cached_at_new_homes(gateway_url: str, number: int) -> list[float]:
    """For each turn that ran in one leg on another engine than the turn before: the cached share of the context so
    far."""
    async with httpx.AsyncClient(timeout=60.0) as client:
        rows = (await client.get(f"{gateway_url}/v1/trajectories/agent-{number}")).json()["turns"]
    return [
        now["cached_tokens"] / (before["prompt_tokens"] + before["output_tokens"])
        for before, now in pairwise(rows)
        if before["engine"] != now["engine"] and now["legs"] == 1
    ]


async def kv_moves(gateway_url: str) -> dict[str, int]:
    """How many times KV was moved to a new home, by outcome."""
    async with httpx.AsyncClient(timeout=60.0) as client:
        page = (await client.get(f"{gateway_url}/metrics")).text
    found = re.findall(r'^heddle_kv_moves_total\{outcome="(\w+)"\} (\d+)', page, re.MULTILINE)
    return {outcome: int(count) for outcome, count in found}


class Rollout:
    """Agents that take greedy turns until they are told to stop.

    Args:
        num_agents: trajectories at once.
        tool_s: pause between their turns.
        num_turns: of each agent, which then tells the gateway that it has ended; None: until they are told to stop.
        task: what each first prompt says after its number.
    """

    def __init__(
        self,
        gateway_url: str,
        model: str,
        num_agents: int,
        max_tokens: int = 24,
        tool_s: float = 0.05,
        num_turns: int | None = None,
        task: str = "",
    ) -> None:
        self.answers: list[list[str]] = [[] for _ in range(num_agents)]
        self.failures: list[str] = []
        self._url = gateway_url
        self._model = model
        self._max_tokens = max_tokens
        self._tool_s = tool_s
        self._num_turns = num_turns
        self._task = task
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_turns(self) -> int:
        return sum(map(len, self.answers))

    def begin(self, name: str = "agent") -> None:
        """Send the first turns."""
        self._tasks = [asyncio.create_task(self._agent(name, number)) for number in range(len(self.answers))]

    async def end(self, stop: bool = True) -> None:
        """Let the turns in flight end; without `stop`, all turns."""
        self._stopping = stop
        await asyncio.gather(*self._tasks)

    async def check_undisturbed(self) -> None:
        """Every answer is the one that the same agents get when nothing changes under them."""
        num_turns = max(map(len, self.answers))
        again = Rollout(self._url, self._model, len(self.answers), self._max_tokens, 0.0, num_turns, self._task)
        again.begin("again")
        await again.end(stop=False)
        assert again.failures == []
        for answers, expected in zip(self.answers, again.answers, strict=True):
            assert answers == expected[: len(answers)]

    async def _agent(self, name: str, number: int) -> None:
        messages = [{"role": "user", "content": f"task {number}{self._task}"}]
        url = f"{self._url}/t/{name}-{number}/v1/chat/completions"
        async with httpx.AsyncClient(timeout=600.0) as client:
            while not self._stopping and len(self.answers[number]) != self._num_turns:
                body = {
                    "model": self._model,
                    "messages": messages,
                    "max_tokens": self._max_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                response = await client.post(url, json=body)
                if response.status_code != 200:
                    self.failures.append(f"{number}: {response.status_code} {response.text[:300]}")
                    return
                content = response.json()["choices"][0]["message"]["content"]
                self.answers[number].append(content)
                messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
                await asyncio.sleep(self._tool_s)
            if self._num_turns is not None:
                (await client.post(f"{self._url}/v1/trajectories/{name}-{number}/finish")).raise_for_status()


async def play_through_changes(made: Controller, rollout: Rollout, timeout_s: float = TIMEOUT_S) -> None:
    """Play the rollout while the fleet becomes one engine of TP 2, then two of TP 1 again; no turn fails.

    Args:
        timeout_s: for each change, and for the turns between two changes.
    """
    rollout.begin()
    for tps in ([2], [1, 1]):
        await _until_two_more_answers(rollout, timeout_s)
        made.ask(made.desired.scaled(tps, made.observed()))
        await until_reached(made, *tps, timeout_s=timeout_s)
    await _until_two_more_answers(rollout, timeout_s)
    await rollout.end()
    assert rollout.failures == []


async def _until_two_more_answers(rollout: Rollout, timeout_s: float) -> None:
    """Wait until each agent has had two more answers."""
    before = [len(answers) for answers in rollout.answers]
    await until(
        lambda: (
            bool(rollout.failures)
            or all(len(now) >= then + 2 for now, then in zip(rollout.answers, before, strict=True))
        ),
        lambda: rollout.failures,
        timeout_s,
    )
    assert rollout.failures == []
