"""How the controller learns of work: a gateway that is asked and a stream that is read report the same."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from controller.demand import Demand, DemandAway, Work, demand_of
from controller.fleet_file import DemandTable
from controller.gateway_client import GatewayClient
from engines.profiles import load_profile
from engines.simulated.settings import SimulatedEngineSettings
from gateway.server import Listening
from scheduling.estimate import Remaining
from store import DEMAND, StoreSettings
from store.redis_stream import RedisStream
from tests.support.engine import recorded_engine
from tests.support.gateway import ADMIN_KEY, eventually, running_gateway
from tests.support.redis_server import PATIENT, RedisServer, redis_server

__all__ = ["redis_server"]

ENGINE = SimulatedEngineSettings(profile=replace(load_profile("toy-cpu-tp1"), slots=8))
EVERY_S = 0.02


@dataclass(frozen=True)
class Source:
    """One way to learn of work: the gateway's store, and the fleet file's table for it."""

    store: str
    table: DemandTable

    def gateway(self, *engines: str, **settings: Any) -> Any:
        return running_gateway(*engines, store=self.store, demand_interval_s=EVERY_S, **settings)

    @asynccontextmanager
    async def demand(self, url: str) -> AsyncIterator[Demand]:
        client = GatewayClient(url, ADMIN_KEY)
        async with aclosing(demand_of(self.table, client)) as made:
            yield made
        client.close()


@pytest.fixture(params=["asked", "read"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    if request.param == "asked":
        return Source(f"sqlite:{tmp_path}/store.sqlite3", DemandTable())
    return read_from(request.getfixturevalue("redis_server"))


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    """The shared one, empty."""
    redis_server.restart(empty=True)
    return redis_server


def read_from(server: RedisServer, max_age_s: float = 30.0) -> Source:
    server.restart(empty=True)
    return Source(server.url(), DemandTable.model_validate({"redis": server.url(), "max_age_s": max_age_s}))


async def reported(demand: Demand, holds: Callable[[Work], bool], since: float = 0.0) -> Work:
    """The work reported once `holds` is true of it; until then, a refusal is fine."""
    found: list[Work] = []

    async def is_reported() -> bool:
        try:
            found.append(await demand.work(since))
        except DemandAway:
            return False
        return holds(found[-1])

    await eventually(is_reported)
    return found[-1]


async def refusal(demand: Demand) -> str:
    """Why nothing is reported, once that is so."""
    why: list[str] = []

    async def is_refused() -> bool:
        try:
            await demand.work()
        except DemandAway as fault:
            why.append(str(fault))
        return bool(why)

    await eventually(is_refused)
    return why[-1]


async def declare(url: str, name: str, output_tokens: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        declared = {"id": name, "expected_output_tokens": output_tokens}
        (await client.post("/v1/trajectories", json=declared)).raise_for_status()


async def play(gateway: Listening, rollout: str, max_tokens: int) -> None:
    """Two trajectories of one turn. A rollout ends when none of its trajectories is active, so both finish at the
    end."""
    names = [f"{rollout}-{number}" for number in range(2)]
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60.0) as client:
        for name in names:
            body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": max_tokens, "ignore_eos": True}
            labels = {"X-Rollout-Id": rollout}
            request = {"model": "simulated", **body}
            answer = await client.post(f"/t/{name}/v1/chat/completions", json=request, headers=labels)
            answer.raise_for_status()
        for name in names:
            (await client.post(f"/v1/trajectories/{name}/finish")).raise_for_status()


async def test_remaining_work_is_reported(source: Source) -> None:
    """The report has what each active trajectory still needs, and shows new trajectories soon after they are
    declared."""
    async with source.gateway() as gateway, source.demand(gateway.url) as demand:
        assert (await reported(demand, lambda work: True)).remaining == ()
        await declare(gateway.url, "a", 1_000)
        await declare(gateway.url, "b", 2_000)
        work = await reported(demand, lambda work: len(work.remaining) == 2)
        assert sorted(one.output_tokens for one in work.remaining) == [1_000, 2_000]
        assert (work.correlation, work.last_rollout) == (None, None)


async def test_an_ended_rollout_is_reported_until_it_is_known(source: Source) -> None:
    """A gateway that was restarted since reports it, too, until another rollout has ended."""
    async with recorded_engine(ENGINE) as engine:
        async with source.gateway(engine.url) as gateway, source.demand(gateway.url) as demand:
            await play(gateway, "first", max_tokens=5)
            first = (await reported(demand, lambda work: work.last_rollout is not None)).last_rollout
            assert first is not None and [one.output_tokens for one in first.trajectories] == [5, 5]
            assert all(one.uncached_tokens == one.context_tokens > 0 for one in first.trajectories)
            assert (await demand.work(first.ended_at)).last_rollout is None
        async with source.gateway(engine.url) as gateway, source.demand(gateway.url) as demand:
            again = await reported(demand, lambda work: work.last_rollout is not None)
            assert again.last_rollout == first
            await play(gateway, "second", max_tokens=7)
            found = await reported(demand, lambda work: work.last_rollout is not None, since=first.ended_at)
            assert found.last_rollout is not None
            assert [one.output_tokens for one in found.last_rollout.trajectories] == [7, 7]


@pytest.mark.parametrize(("max_turns_kept", "is_known"), [(1_000, True), (2, True), (1, False)])
async def test_the_first_prompt_is_that_of_the_first_turn_that_finished(
    max_turns_kept: int, is_known: bool, source: Source
) -> None:
    """A turn before it failed and had no prompt: the whole context counted as added by tools. A history without that
    turn has no first prompt: that of a late turn counted as the first."""
    body = {"model": "simulated", "max_tokens": 5, "ignore_eos": True}
    messages = [{"role": "user", "content": "go"}]
    kept = {"max_turns_kept": max_turns_kept}
    async with recorded_engine(ENGINE) as engine, source.gateway(engine.url, **kept) as gateway:
        async with httpx.AsyncClient(base_url=f"{gateway.url}/t/one", timeout=60.0) as client:
            refused = await client.post("/v1/chat/completions", json={**body, "messages": messages, "top_p": 7})
            assert refused.status_code == 400
            prompts = []
            for _ in range(2):
                answer = (await client.post("/v1/chat/completions", json={**body, "messages": messages})).json()
                prompts.append(answer["usage"]["prompt_tokens"])
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "go on"}]
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60.0) as client:
            (await client.post("/v1/trajectories/one/finish")).raise_for_status()
            turns = (await client.get("/v1/trajectories/one")).json()["turns"]
        outcomes = [turn["outcome"] for turn in turns]
        assert outcomes == ["refused", "finished", "finished"][-max_turns_kept:]
        async with source.demand(gateway.url) as demand:
            last = (await reported(demand, lambda work: work.last_rollout is not None)).last_rollout
    assert last is not None
    first = prompts[0] if is_known else 0
    assert last.trajectories == (Remaining(10, first, prompts[1] - 5 - first, first),)


async def test_a_rollout_that_outlasts_its_first_trajectories_is_reported_whole(source: Source) -> None:
    """They have ended and were forgotten (`max_token_age_s`, four hours) when the last ones end. Plans for the next
    rollout counted only the last ones, which are long."""
    labels = {"X-Rollout-Id": "r"}
    async with (
        recorded_engine(ENGINE) as engine,
        source.gateway(engine.url, retention_s=2.0, max_token_age_s=2.0) as gateway,
        source.demand(gateway.url) as demand,
        httpx.AsyncClient(base_url=gateway.url, timeout=60.0, headers=labels) as client,
    ):

        async def take_turn(name: str) -> None:
            messages = [{"role": "user", "content": "go"}]
            body = {"model": "simulated", "messages": messages, "max_tokens": 5, "ignore_eos": True}
            (await client.post(f"/t/{name}/v1/chat/completions", json=body)).raise_for_status()

        async def is_forgotten() -> bool:
            return (await client.get("/v1/trajectories/short")).status_code == 404

        await take_turn("long")
        await take_turn("short")
        (await client.post("/v1/trajectories/short/finish")).raise_for_status()
        await reported(demand, lambda work: len(work.remaining) == 1)
        await eventually(is_forgotten)
        await take_turn("long")
        (await client.post("/v1/trajectories/long/finish")).raise_for_status()
        last = (await reported(demand, lambda work: work.last_rollout is not None)).last_rollout
    assert last is not None and sorted(one.output_tokens for one in last.trajectories) == [5, 10]


async def test_a_rollout_after_the_clock_was_set_back_is_reported(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it ended an hour later, by a clock that was fast until the gateway was restarted."""
    right = time.time
    async with recorded_engine(ENGINE) as engine:
        with monkeypatch.context() as fast:
            fast.setattr(time, "time", lambda: right() + 3_600)
            async with source.gateway(engine.url) as gateway, source.demand(gateway.url) as demand:
                await play(gateway, "first", max_tokens=5)
                first = (await reported(demand, lambda work: work.last_rollout is not None)).last_rollout
                assert first is not None
        async with source.gateway(engine.url) as gateway, source.demand(gateway.url) as demand:
            assert (await reported(demand, lambda work: True, first.ended_at)).last_rollout is None
            await play(gateway, "second", max_tokens=7)
            second = (await reported(demand, lambda work: work.last_rollout is not None, first.ended_at)).last_rollout
            assert second is not None and second.ended_at < first.ended_at
            assert [one.output_tokens for one in second.trajectories] == [7, 7]
            assert (await demand.work(second.ended_at)).last_rollout is None


async def test_a_gateway_that_is_gone_reports_no_demand(source: Source) -> None:
    """Its last report no longer counts."""
    source = replace(source, table=source.table.model_copy(update={"max_age_s": 2.0}))
    async with source.gateway() as gateway, source.demand(gateway.url) as demand:
        await declare(gateway.url, "a", 1_000)
        await reported(demand, lambda work: len(work.remaining) == 1)
    async with source.demand(gateway.url) as demand:
        assert await refusal(demand)


async def test_demand_fails_while_redis_is_away_and_is_current_afterwards(server: RedisServer) -> None:
    """This holds with Redis' data or without: work from before the outage is never reported."""
    source = read_from(server)
    async with source.gateway() as gateway, source.demand(gateway.url) as demand:
        await declare(gateway.url, "a", 1_000)
        await reported(demand, lambda work: len(work.remaining) == 1)
        for number, is_empty in enumerate((False, True)):
            await asyncio.to_thread(server.kill)
            assert "is away" in await refusal(demand)
            await declare(gateway.url, f"away-{number}", 2_000)
            await asyncio.to_thread(server.restart, empty=is_empty)
            await reported(demand, lambda work, now=2 + number: len(work.remaining) == now)  # type: ignore[misc]


async def test_stale_and_unreadable_reports_are_refused(server: RedisServer) -> None:
    """A stream without reports is refused, too; each reason has its own message."""
    demand = demand_of(read_from(server, max_age_s=0.2).table, GatewayClient("http://127.0.0.1:9", None))
    stream = RedisStream(server.url(), DEMAND, StoreSettings(**PATIENT))
    async with aclosing(demand), aclosing(stream):
        assert "no gateway has reported its work there" in await refusal(demand)
        for entry in (b"nonsense", b"[]", b"{}", b'{"trajectories": [{}]}'):
            await stream.add(entry)
            why = await refusal(demand)
            assert "cannot be read" in why or "was silent" in why
        await asyncio.sleep(0.3)  # longer than the greatest age
        assert "the gateway was silent for" in await refusal(demand)


async def test_the_stream_is_bounded(server: RedisServer) -> None:
    """However long a gateway runs, the stream has a few entries, the newest last."""
    async with aclosing(RedisStream(server.url(), DEMAND, StoreSettings(**PATIENT))) as stream:
        for number in range(20):
            await stream.add(b"%d" % number)
        newest = await stream.newest()
    assert newest is not None and newest.value == b"19" and newest.age_s < 60.0
    with Redis.from_url(server.url()) as redis:
        assert redis.xlen(f"heddle:{DEMAND}") == 4


async def test_a_gateway_that_lost_its_store_reports_nothing(server: RedisServer) -> None:
    """Two gateways in one namespace are a mistake. The second has the trajectories, and only its reports count."""
    source = read_from(server)
    async with source.gateway() as first, source.gateway() as second, source.demand(second.url) as demand:
        async with httpx.AsyncClient(base_url=first.url, timeout=60.0) as client:
            await client.post("/v1/trajectories", json={"id": "of-the-first", "expected_output_tokens": 1_000})

            async def is_fenced() -> bool:
                return "another process" in (await client.get("/healthz")).text

            await eventually(is_fenced)
        await declare(second.url, "of-the-second", 2_000)
        await reported(demand, lambda work: [one.output_tokens for one in work.remaining] == [2_000])
        for _ in range(50):
            assert [one.output_tokens for one in (await demand.work()).remaining] == [2_000]
            await asyncio.sleep(EVERY_S / 2)
