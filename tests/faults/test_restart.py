"""Gateways that die and stores that go away: no trajectory is lost, and none notices anything except a wait."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from loadtest.replayer import ReplaySettings, replay
from loadtest.results import RolloutResult, TurnResult
from scheduling.types import TrajectoryRecord, TrajectoryState
from simulator.replay import replay as replay_log
from store import StoreSettings, open_store
from tests.faults.asking import ask, body_of, nothing_is_pending
from tests.faults.gateway_process import GatewayProcess, gateway_process
from tests.support.gateway import eventually, running_gateway
from tests.support.redis_proxy import proxy_to
from tests.support.redis_server import RedisServer
from workloads.trajectories import Trajectory, Turn, Workload

NUM_TRAJECTORIES, NUM_TURNS = 12, 5
WORKLOAD = Workload(
    "restart",
    tuple(
        Trajectory(f"t{n}", f"g{n // 4}", 40, tuple(Turn(20 if k else 0, 20 + n, 0.03) for k in range(NUM_TURNS)))
        for n in range(NUM_TRAJECTORIES)
    ),
)
ENGINE = SimulatedEngineSettings(speed_up=3)
MAX_RETRIES = 40  # these bridge four minutes; on a busy machine a start may take two
RESTORE_LIMIT_S = 2.0
MAX_STOLEN = 0.05
PAUSE_MS = 300
"""Longer than answers wait by default, and much shorter than the store's timeouts."""


class Milestone:
    """Set when this many turns of a rollout have ended."""

    def __init__(self, num_turns: int) -> None:
        self.reached = asyncio.Event()
        self.num_ended = 0
        self._num_turns = num_turns

    def __call__(self, turn: TurnResult) -> None:
        self.num_ended += 1
        if self.num_ended >= self._num_turns:
            self.reached.set()


async def check_histories(client: httpx.AsyncClient, url: str, result: RolloutResult) -> None:
    """Every trajectory finished, each turn is there once and in order, and the home is where the last turn ran."""
    assert [turn.error for one in result.trajectories for turn in one.turns if turn.error] == []
    listed = (await client.get(f"{url}/v1/trajectories?rollout=r&limit=1000")).json()["data"]
    assert len(listed) == NUM_TRAJECTORIES
    for item in listed:
        trajectory = (await client.get(f"{url}/v1/trajectories/{item['id']}")).json()
        assert trajectory["state"] == "finished"
        finished = [turn for turn in trajectory["turns"] if turn["outcome"] == "finished"]
        assert trajectory["num_turns"] == len(finished) == NUM_TURNS, trajectory
        prompts = [turn["prompt_tokens"] for turn in finished]
        assert prompts == sorted(set(prompts)), "each turn once, in order"
        assert trajectory["home"] == finished[-1]["engine"]
        assert trajectory["output_tokens"] == sum(turn["output_tokens"] for turn in finished)


async def engine_ids(client: httpx.AsyncClient, url: str) -> list[str]:
    return [engine["id"] for engine in (await client.get(url + "/v1/engines")).json()["data"]]


async def test_a_rollout_survives_killed_gateways(client: httpx.AsyncClient, store_url: str, tmp_path: Path) -> None:
    """Killed twice in mid-rollout: every trajectory finishes with its history and home, and engines keep their ids.

    Replaying the event log of all three processes gives the same decisions.
    """
    event_log = tmp_path / "events.jsonl"
    async with serve_engine(ENGINE) as first, serve_engine(ENGINE) as second:
        options = ("--store", store_url, "--engine", first, "--engine", second)
        async with gateway_process(*options, HEDDLE_EVENT_LOG=str(event_log)) as gateway:
            ids = await engine_ids(client, gateway.url)
            milestones = [Milestone(12), Milestone(30)]

            def on_turn(turn: TurnResult) -> None:
                for milestone in milestones:
                    milestone(turn)

            settings = ReplaySettings(
                f"{gateway.url}/v1", stream_share=0.5, rollout_id="r", calibrate=False, max_retries=MAX_RETRIES
            )
            playing = asyncio.create_task(replay(WORKLOAD, settings, on_turn=on_turn))
            for milestone in milestones:
                await milestone.reached.wait()
                await gateway.kill()
                await gateway.start()
                assert await engine_ids(client, gateway.url) == ids
            result = await playing
            assert sum(turn.num_retries for one in result.trajectories for turn in one.turns) > 0, (
                "no client noticed the kills"
            )
            await check_histories(client, gateway.url, result)
        replayed = replay_log(event_log)
        assert replayed.difference is None and replayed.num_actions > 2 * NUM_TRAJECTORIES * NUM_TURNS


@pytest.mark.alone
@pytest.mark.timeout(600)
async def test_ten_thousand_trajectories_are_restored_within_two_seconds(
    client: httpx.AsyncClient, store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ten turns each: from the start until it answers, less the time an empty gateway takes; best of three.

    Checked are the processor time of the gateway and Redis, and the clock. The clock does not count if other tenants
    took processor time of this machine meanwhile, because then it says nothing about the gateway.
    """
    await fill(store_url, num_trajectories=10_000, num_turns=10)
    async with gateway_process("--store", "memory:") as bare:
        bare_cpu_s, bare_s = await least_start(bare, "memory:")
    async with gateway_process("--store", store_url) as gateway:
        before = processor_ticks()
        cpu_s, all_s = await least_start(gateway, store_url)
        stolen, total = (now - then for now, then in zip(processor_ticks(), before, strict=True))
        page = (await client.get(gateway.url + "/metrics")).text
        assert "heddle_trajectories 10000.0" in page
        trajectory = (await client.get(gateway.url + "/v1/trajectories/t-007")).json()
        assert len(trajectory["turns"]) == 10 and trajectory["home"] == "engine-1:8000"
    with capsys.disabled():
        print(f"\n{store_url.partition(':')[0]}: 10,000 trajectories restored in {cpu_s - bare_cpu_s:.2f} s", end=" ")
        print(f"of processor time, {all_s - bare_s:.2f} s by the clock (an empty start: {bare_s:.2f} s)")
    assert cpu_s - bare_cpu_s < RESTORE_LIMIT_S
    assert all_s - bare_s < RESTORE_LIMIT_S or stolen > MAX_STOLEN * total


async def least_start(gateway: GatewayProcess, store_url: str) -> tuple[float, float]:
    """Seconds of processor time, including Redis's, and of the clock; the minimum of each over three starts."""
    cpu, clock = [], []
    for _ in range(3):
        await gateway.kill()
        before_s = redis_cpu_s(store_url)
        await gateway.start()
        cpu.append(gateway.start_cpu_s + redis_cpu_s(store_url) - before_s)
        clock.append(gateway.start_s)
    return min(cpu), min(clock)


def processor_ticks() -> tuple[int, int]:
    """Ticks that other tenants took from this machine's cores so far, and all ticks (proc(5))."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[7], sum(ticks)


def redis_cpu_s(store_url: str) -> float:
    """The server's processor time so far; 0 if the store is not Redis."""
    if not store_url.startswith("redis:"):
        return 0.0
    with Redis.from_url(store_url) as server:
        used: Any = server.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


async def fill(store_url: str, num_trajectories: int, num_turns: int) -> None:
    """Write trajectories with turns as a gateway does."""
    store = open_store(store_url, StoreSettings(max_turns_kept=1000))
    await store.open()
    now = time.time()
    for number in range(num_trajectories):
        trajectory_id = f"t-{number:03d}"
        record = TrajectoryRecord(
            trajectory_id,
            group_id=f"g-{number // 8}",
            rollout_id="r",
            state=TrajectoryState.ACTIVE,
            home=f"engine-{number % 2}:8000",
            context_tokens=8000,
            output_tokens=3000,
            num_turns=num_turns,
            predicted_tokens=2850.0,
            created_at=now,
            last_at=now,
        )
        store.put_trajectory(trajectory_id, {**asdict(record), "declared": {}, "conversation": []})
        for turn in range(num_turns):
            store.append_turn(trajectory_id, TURN_ROW | {"turn_id": f"{number:027d}{turn:05d}"})
        if number % 500 == 0:
            assert await store.settle(30)
    assert await store.settle(30)
    await store.close()


TURN_ROW: dict[str, Any] = {
    "api": "chat",
    "outcome": "finished",
    "engine": "engine-1:8000",
    "why": "home",
    "priority": 0,
    "predicted_tokens": 2850,
    "legs": 1,
    "arrived_at": 1700000000.123456,
    "dispatched_at": 1700000000.223456,
    "first_byte_at": 1700000000.523456,
    "ended_at": 1700000004.123456,
    "queued_s": 0.1,
    "prompt_tokens": 7000,
    "cached_tokens": 6528,
    "output_tokens": 300,
    "finish_reason": "tool_calls",
    "error": None,
}


@pytest.mark.parametrize("empty", [False, True], ids=["with its data", "empty"])
async def test_serving_continues_while_redis_is_away_and_the_record_catches_up(
    client: httpx.AsyncClient, redis_server: RedisServer, empty: bool
) -> None:
    """Health and metrics report it. Once Redis is back, with its data or without, the record is complete."""
    settings: dict[str, Any] = {"store": redis_server.url(14 if empty else 15)}
    async with serve_engine(ENGINE) as engine:
        async with running_gateway(engine, **settings) as gateway:
            before, after = Milestone(12), Milestone(30)

            def on_turn(turn: TurnResult) -> None:
                before(turn)
                after(turn)

            replaying = ReplaySettings(f"{gateway.url}/v1", stream_share=0.5, rollout_id="r", calibrate=False)
            playing = asyncio.create_task(replay(WORKLOAD, replaying, on_turn=on_turn))
            await before.reached.wait()
            redis_server.kill()
            try:
                await eventually(lambda: store_is(client, gateway.url, "degraded", 0.0), timeout_s=20)
                await after.reached.wait()
            finally:
                redis_server.restart(empty=empty)
            result = await playing
            await eventually(lambda: store_is(client, gateway.url, "ok", 1.0), timeout_s=20)
            await eventually(lambda: nothing_is_pending(client, gateway.url), timeout_s=20)
            await check_histories(client, gateway.url, result)
        async with running_gateway(engine, **settings) as gateway:
            await check_histories(client, gateway.url, result)


@pytest.mark.parametrize(
    ("method", "path", "state"),
    [
        ("POST", "/mine/finish", "finished"),
        ("DELETE", "/mine", "aborted"),
        ("POST", "", "active"),
        ("POST", "/mine/reward", "active"),
    ],
)
async def test_what_was_answered_about_a_trajectory_survives_a_kill(
    client: httpx.AsyncClient, redis_server: RedisServer, method: str, path: str, state: str
) -> None:
    """The answer waits for a store that writes slowly. A finish and a reward came before they were written, and were
    lost."""
    with Redis(port=redis_server.port, db=11) as redis:
        redis.flushdb()
    async with gateway_process("--store", redis_server.url(11)) as gateway:
        trajectories = gateway.url + "/v1/trajectories"
        if path:
            assert (await client.post(trajectories, json={"id": "mine"})).status_code == 201
        redis.client_pause(PAUSE_MS, all=False)  # type: ignore[no-untyped-call]
        body = {"": {"id": "mine", "metadata": {"task": 7}}, "/mine/reward": {"reward": 0.5}}.get(path)
        answer = await client.request(method, trajectories + path, json=body)
        assert answer.is_success and answer.json()["state"] == state
        await gateway.kill()
        await gateway.start()
        shown = (await client.get(trajectories + "/mine")).json()
        told = answer.json()
        assert [shown[name] for name in ("state", "reward", "declared")] == [state, told["reward"], told["declared"]]


async def test_a_store_outage_is_logged_once(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """With the reason, and once more when it is back."""
    async with running_gateway(store=redis_server.url(13)):
        redis_server.kill()
        try:
            await eventually(lambda: "store is away" in caplog.messages)
        finally:
            redis_server.restart()
        await eventually(lambda: "store is back" in caplog.messages)
    logged = [record for record in caplog.records if record.message.startswith("store is")]
    assert [record.message for record in logged] == ["store is away", "store is back"]
    assert "is away: ConnectionError" in vars(logged[0])["fields"]["detail"]


async def test_a_store_that_lost_its_data_is_reported(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The record is filled again, but tokens that only the store had are gone, and nothing else tells."""
    async with (
        running_gateway(store=redis_server.url(12)) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as client,
    ):
        with Redis(port=redis_server.port, db=12) as redis:
            redis.flushdb()
        await eventually(lambda: "store lacked data" in caplog.messages)
        assert (await client.get("/healthz")).json()["store"]["num_losses"] == 1
        assert "heddle_store_losses 1.0" in (await client.get("/metrics")).text
    assert caplog.messages.count("store lacked data") == 1


@pytest.mark.parametrize("num_lost", [0, 1], ids=["", "asked for what is left, the store is away once more"])
async def test_tokens_that_a_store_lost_do_not_count_as_kept(redis_server: RedisServer, num_lost: int) -> None:
    """Health went on to show them as stored. Those of the trajectory used last are in memory, and are put again."""
    database = 10 if num_lost else 12
    settings = {"token_legs": "auto", "max_token_memory_bytes": 0}
    async with (
        proxy_to(redis_server.port) as proxy,
        serve_engine(SimulatedEngineSettings(speed_up=100)) as engine,
        running_gateway(engine, store=f"redis://127.0.0.1:{proxy.port}/{database}", **settings) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as client,
    ):

        async def tokens() -> dict[str, int]:
            return dict((await client.get("/healthz")).json()["tokens"])

        async def is_recounted() -> bool:
            return (await tokens())["num_trajectories"] == 1

        for name in ("a", "b"):
            body = {"model": "simulated", "messages": [{"role": "user", "content": name * 400}], "max_tokens": 50}
            assert (await client.post(f"/t/{name}/v1/chat/completions", json=body)).status_code == 200
        before = await tokens()
        assert before["num_trajectories"] == 2
        proxy.num_questions_to_lose, proxy.lost_words = num_lost, b"HGETALL"
        with Redis(port=redis_server.port, db=database) as redis:
            redis.flushdb()
        await eventually(is_recounted)
        assert 0 < (await tokens())["stored_bytes"] < before["stored_bytes"]
        missing = (await client.get("/v1/trajectories/a/tokens")).json()["missing"]
        assert [one["why"] for one in missing] == ["dropped"]


async def test_records_lost_at_a_shutdown_are_logged(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The store was away until the end. The gateway ended without a word, as if all had been written."""
    try:
        async with running_gateway(store=redis_server.url(13)) as gateway, httpx.AsyncClient() as client:
            redis_server.kill()
            assert (await client.post(f"{gateway.url}/v1/trajectories", json={"id": "a"})).status_code == 201
    finally:
        redis_server.restart()
    lost = [vars(record)["fields"] for record in caplog.records if record.message == "records are lost"]
    assert len(lost) == 1 and lost[0]["num_pending"] > 0 and "is away" in lost[0]["detail"]


async def store_is(client: httpx.AsyncClient, url: str, status: str, gauge: float) -> bool:
    health = (await client.get(url + "/healthz")).json()
    page = (await client.get(url + "/metrics")).text
    return health["status"] == status and f"heddle_store_ok {gauge}" in page


@pytest.mark.parametrize(("predictor", "within"), [("siblings", 0.0), ("tabular", 0.05)])
async def test_what_the_predictor_learned_survives_a_restart(
    client: httpx.AsyncClient, store_url: str, predictor: str, within: float
) -> None:
    """A sibling that arrives after the restart is predicted from the siblings before it: exactly by a simple predictor,
    approximately by one that updates its tables from time to time."""
    async with serve_engine(SimulatedEngineSettings(speed_up=100)) as engine:
        options = ("--store", store_url, "--engine", engine)
        async with gateway_process(*options, HEDDLE_PREDICTOR=predictor) as gateway:
            for number in range(8):
                headers = {"x-trajectory-id": f"t{number}", "x-group-id": "g"}
                body = body_of("chat", tokens=777, text=f"hello {number}")
                assert (await ask(client, gateway.url, "chat", body, headers)).is_finished("chat")
                await client.post(f"{gateway.url}/v1/trajectories/t{number}/finish")
            before = await predicted(client, gateway.url, "before", "g")
            stranger = await predicted(client, gateway.url, "stranger", "another")
            assert await gateway.terminate() == 0
            await gateway.start()
            after = await predicted(client, gateway.url, "after", "g")
            assert after == pytest.approx(before, rel=within, abs=0.0) and before < 0.7 * stranger


async def predicted(client: httpx.AsyncClient, url: str, trajectory_id: str, group_id: str) -> float:
    headers = {"x-trajectory-id": trajectory_id, "x-group-id": group_id}
    assert (await ask(client, url, "chat", body_of("chat"), headers)).is_finished("chat")
    turns = (await client.get(f"{url}/v1/trajectories/{trajectory_id}")).json()["turns"]
    return float(turns[0]["predicted_tokens"])


async def test_a_conversation_without_an_id_is_recognised_after_a_restart(
    client: httpx.AsyncClient, store_url: str
) -> None:
    """Its client sends nothing but its messages, before the kill and after it."""
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=100)) as engine,
        gateway_process("--store", store_url, "--engine", engine) as gateway,
    ):
        first = await ask(client, gateway.url, "chat", body_of("chat", text="a long story"))
        await gateway.kill()
        await gateway.start()
        messages = [
            {"role": "user", "content": "a long story"},
            first.json["choices"][0]["message"],
            {"role": "user", "content": "go on"},
        ]
        second = await ask(client, gateway.url, "chat", body_of("chat") | {"messages": messages})
        assert second.headers["x-trajectory-id"] == first.headers["x-trajectory-id"]


async def test_an_engine_relaunched_while_the_gateway_was_down_is_a_new_one(
    client: httpx.AsyncClient, store_url: str
) -> None:
    """Its KV is gone, so homes there are void, but their turns are still served."""
    settings = SimulatedEngineSettings(speed_up=100)
    mine = {"x-trajectory-id": "mine"}
    async with AsyncExitStack() as first:
        engine = await first.enter_async_context(serve_engine(settings))
        async with gateway_process("--store", store_url, "--engine", engine) as gateway:
            [engine_id] = await engine_ids(client, gateway.url)
            assert (await ask(client, gateway.url, "chat", body_of("chat"), mine)).is_finished("chat")
            await gateway.kill()
            await first.aclose()
            async with serve_engine(settings, port=int(engine.rpartition(":")[2])):
                await gateway.start()
                assert await engine_ids(client, gateway.url) == [f"{engine_id}~2"]
                assert (await ask(client, gateway.url, "chat", body_of("chat", text="on"), mine)).is_finished("chat")
                record = (await client.get(gateway.url + "/v1/trajectories/mine")).json()
                assert record["home"] == f"{engine_id}~2" and record["num_turns"] == 2
