"""The Redis store against a server that comes back with less than it had confirmed, and one that fails over."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from store import Store, StoreSettings, Stream, open_store, open_stream
from tests.support.redis_proxy import proxy_to
from tests.support.redis_server import RedisServer

QUICK: dict[str, Any] = {
    "backoff_min_s": 0.005,
    "backoff_max_s": 0.02,
    "check_every_s": 0.01,
    "connect_timeout_s": 5.0,
    "op_timeout_s": 5.0,
}
IDS = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["record", "turn", "forget"]), IDS),
        st.tuples(st.just("settle"), st.just("")),
        st.tuples(st.just("set back"), st.integers(0, 5)),
        st.tuples(st.just("lose an answer"), st.just("")),
    ),
    max_size=15,
)

Model = dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
@example(steps=[("record", "a"), ("settle", ""), ("set back", 1)])  # back by one batch: the next check hid it
@example(steps=[("record", "a"), ("set back", 1)])  # back to before its claim: it took its predecessor for a successor
async def test_a_server_set_back_to_any_earlier_state_is_healed(
    redis_server: RedisServer, steps: list[tuple[str, Any]]
) -> None:
    """Whatever it lost, and whether or not anything is put after it, the server soon has exactly what its owner has."""
    async with _client(redis_server) as redis, proxy_to(redis_server.port) as proxy:
        await redis.flushdb()
        model: Model = {"of an earlier process": ({"number": -1}, [])}
        before = open_store(redis_server.url(), StoreSettings(**QUICK))
        await before.open()
        before.put_trajectory("of an earlier process", {"number": -1})
        await before.close()
        states = [await _state(redis)]
        store = open_store(f"redis://127.0.0.1:{proxy.port}/0", StoreSettings(**QUICK))

        def rewrite() -> None:
            for trajectory_id, (record, turns) in model.items():
                store.put_trajectory(trajectory_id, record)
                for turn in turns:
                    store.append_turn(trajectory_id, turn)

        store.on_loss(rewrite)
        await store.open()
        states.append(await _state(redis))
        for number, (step, about) in enumerate(steps):
            match step:
                case "record":
                    model[about] = ({"number": number}, model.get(about, ({}, []))[1])
                    store.put_trajectory(about, {"number": number})
                case "turn":
                    record, turns = model.get(about, ({}, []))
                    model[about] = (record, [*turns, {"number": number}])
                    store.append_turn(about, {"number": number})
                case "forget":
                    model.pop(about, None)
                    store.forget_trajectory(about)
                case "settle":
                    await _until(lambda: store.health().num_pending == 0)
                    states.append(await _state(redis))
                case "set back":
                    await _set_back(redis, states[-1 - about % len(states)])
                case _:
                    proxy.num_answers_to_lose += 1
        await _until(lambda: _has(redis, model))
        await store.close()


async def test_pieces_of_a_forgotten_trajectory_do_not_come_back(redis_server: RedisServer) -> None:
    """A server that is set back has them again, and its owner knows nothing of them. Other trajectories keep their
    pieces."""
    async with _client(redis_server) as redis:
        await redis.flushdb()
        store = open_store(redis_server.url(), StoreSettings(**QUICK))
        store.on_loss(lambda: store.put_trajectory("stays", {"number": 2}))
        await store.open()
        for name in ("stays", "goes"):
            store.put_trajectory(name, {"number": 1})
            store.put_piece(name, "tokens/1", b"123")
        assert await store.settle(5.0)
        before = await _state(redis)
        store.forget_trajectory("goes")
        assert await store.settle(5.0)
        await _set_back(redis, before)
        await _until(lambda: store.health().num_losses == 1 and store.health().num_pending == 0)
        assert await store.piece_sizes() == {"stays": 3}
        assert await store.get_pieces("goes") == {} and await store.get_pieces("stays") == {"tokens/1": b"123"}
        await store.close()


async def test_puts_reach_a_replica_promoted_behind_the_same_address(redis_server: RedisServer, tmp_path: Path) -> None:
    """The old server lives on as a replica, and connections to it stay open: they must not be used forever."""
    replica = RedisServer(redis_server.binary, tmp_path)
    replica.start()
    try:
        async with (
            _client(redis_server) as old,
            _client(replica) as new,
            proxy_to(redis_server.port) as proxy,
        ):
            await old.flushdb()
            store = open_store(f"redis://127.0.0.1:{proxy.port}/0", StoreSettings(**QUICK))
            await store.open()
            store.put_trajectory("t", {"number": 1})
            assert await store.settle(5.0)
            proxy.target_port = replica.port
            await old.execute_command("REPLICAOF", "127.0.0.1", replica.port)
            store.on_loss(lambda: store.put_trajectory("t", {"number": 2}))
            store.put_trajectory("t", {"number": 2})
            await _until(lambda: _has(new, {"t": ({"number": 2}, [])}))
            assert await store.settle(5.0)
            await store.close()
            await old.execute_command("REPLICAOF", "NO", "ONE")
    finally:
        replica.kill()


async def test_a_full_server_gets_room_when_trajectories_are_forgotten(redis_server: RedisServer) -> None:
    """What is forgotten does not wait behind the puts for which there is no room; everything else is as it was put."""
    async with _client(redis_server) as redis:
        await redis.flushdb()
        store = open_store(redis_server.url(), StoreSettings(**QUICK | {"batch_bytes": 50_000}))
        await store.open()
        pad = "x" * 10_000
        for number in range(200):
            store.put_trajectory(f"old-{number}", {"pad": pad})
        assert await store.settle(5.0)
        full = int((await redis.info("memory"))["used_memory"])
        await redis.config_set("maxmemory", full)
        try:
            store.put_state("old-0", b"of that name")
            store.put_trajectory("old-0", {"pad": pad})
            store.forget_trajectory("old-1")
            for number in range(20):
                store.put_trajectory(f"new-{number}", {"pad": pad})
            store.forget_trajectory("old-2")
            await _until(lambda: "maxmemory" in store.health().detail)
            for number in range(200):
                store.forget_trajectory(f"old-{number}")
            store.put_trajectory("old-3", {"again": True})
            assert await _settles(store)
        finally:
            await redis.config_set("maxmemory", 0)
        assert store.health().num_losses == 0
        expected = {f"new-{number}": {"pad": pad} for number in range(20)} | {"old-3": {"again": True}}
        assert {each.trajectory_id: each.record for each in await store.load()} == expected
        assert await store.get_state("old-0") == b"of that name"
        await store.close()


async def test_a_stream_task_ends_when_cancelled_at_any_step(redis_server: RedisServer) -> None:
    """Of 150 stores that closed while connections broke, two never finished; nor did a controller that read a
    stream."""

    async def add_and_read(stream: Stream) -> None:
        while True:
            await stream.add(b"said")
            await stream.newest()

    for num_steps in range(60):
        stream = open_stream(redis_server.url(), "steps", StoreSettings(**QUICK))
        await stream.newest()
        task = asyncio.create_task(add_and_read(stream))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,), timeout=5.0)
        assert task.cancelled(), num_steps
        await stream.aclose()


@asynccontextmanager
async def _client(server: RedisServer) -> AsyncIterator[Redis]:
    """A client beside the store's own."""
    redis = Redis(port=server.port)
    try:
        yield redis
    finally:
        await redis.aclose()


async def _state(redis: Redis) -> dict[bytes, bytes]:
    """Everything that the server has, as it dumps it."""
    async with redis.pipeline() as pipe:
        keys: list[bytes] = await redis.keys("*")
        for key in keys:
            pipe.dump(key)
        return {key: dump for key, dump in zip(keys, await pipe.execute(), strict=True) if dump is not None}


async def _set_back(redis: Redis, state: dict[bytes, bytes]) -> None:
    async with redis.pipeline(transaction=True) as pipe:
        pipe.flushdb()
        for key, dump in state.items():
            pipe.restore(key, 0, dump)
        await pipe.execute()


async def _has(redis: Redis, model: Model) -> bool:
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hgetall("heddle:records")
        for trajectory_id in model:
            pipe.lrange(f"heddle:turns:{trajectory_id}", 0, -1)
        records, *histories = await pipe.execute()
    found = {
        trajectory_id: (
            orjson.loads(records.get(trajectory_id.encode(), b"null")),
            [orjson.loads(turn) for turn in turns],
        )
        for trajectory_id, turns in zip(model, histories, strict=True)
    }
    return found == model and len(records) == len(model)


async def _settles(store: Store) -> bool:
    """Whether everything gets into the record; a store that is away for the moment is asked again."""
    await _until(lambda: store.health().ok)
    return await store.settle(5.0)


async def _until(condition: Callable[[], Any]) -> None:
    ends_at = time.monotonic() + 10.0
    while True:
        held = condition()
        if held is True or (held is not False and await held):
            return
        assert time.monotonic() < ends_at, "never happened"
        await asyncio.sleep(0.005)
