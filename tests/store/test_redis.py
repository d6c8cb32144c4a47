"""The Redis store when its server is away, restarts without data, loses answers or gets a second writer."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from engines.children import free_port
from store import Store, StoreAway, StoreCorrupt, StoreError, StoreSettings, open_store
from store.redis import APPLY, FIRST_BATCH
from tests.support.redis_server import RedisServer

QUICK: dict[str, Any] = {
    "backoff_min_s": 0.005,
    "backoff_max_s": 0.02,
    "check_every_s": 0.02,
    "connect_timeout_s": 5.0,
    "op_timeout_s": 5.0,
}


@pytest.fixture
def server(redis_server: RedisServer) -> Iterator[RedisServer]:
    """The shared server, empty, and running again afterwards."""
    redis_server.restart(empty=True)
    yield redis_server
    redis_server.restart(empty=True)


def _new(url: str, **limits: Any) -> Store:
    return open_store(url, StoreSettings(**{**QUICK, **limits}))


async def _until(condition: Callable[[], bool], what: str) -> None:
    """Let the loop run until something that the store does by itself has happened."""
    ends_at = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < ends_at, f"never happened: {what}"
        await asyncio.sleep(0.002)


async def _until_ok(store: Store) -> None:
    await _until(lambda: store.health().ok, "the store is well")


async def _all(store: Store) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    return {each.trajectory_id: (each.record, each.turns) for each in await store.load()}


async def _reopened(store: Store, url: str) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """What a process that starts after this one finds."""
    await store.close()
    after = _new(url)
    await after.open()
    found = await _all(after)
    await after.close()
    return found


async def test_puts_continue_while_redis_is_away_and_are_sent_afterwards(server: RedisServer) -> None:
    """While the server is down, puts return, settle returns False at once and health states why. Afterwards nothing is
    missing."""
    store = _new(server.url())
    await store.open()
    store.append_turn("t", {"number": 0})
    assert await store.settle(5.0)
    server.kill()
    put_at = []
    for number in range(1, 100):
        store.put_trajectory("t", {"number": number})
        put_at.append(time.monotonic())
        store.append_turn("t", {"number": number})
        if number % 10 == 0:
            await asyncio.sleep(0)
    assert not await store.settle(60.0)
    asked_at = time.monotonic()
    assert not await store.settle(60.0)
    assert time.monotonic() - asked_at < 1.0
    age_s, health = time.monotonic() - put_at[0], store.health()
    assert not health.ok
    assert "is away" in health.detail
    assert health.num_pending > 0
    assert age_s <= health.lag_s < age_s + 60.0, "it counts from the oldest put"
    with pytest.raises(StoreAway):
        await store.load()
    server.restart()
    await _until_ok(store)
    assert await store.settle(5.0)
    assert (store.health().num_losses, store.health().num_pending, store.health().lag_s) == (0, 0, 0.0)
    assert await _reopened(store, server.url()) == {"t": ({"number": 99}, [{"number": n} for n in range(100)])}


async def test_a_store_that_closes_while_redis_is_away_waits_for_it(server: RedisServer) -> None:
    """A gateway is shut down while its Redis restarts: what it told clients last is in the record."""
    store = _new(server.url(), close_timeout_s=60.0)
    await store.open()
    store.append_turn("t", {"number": 0})
    assert await store.settle(5.0)
    server.kill()
    store.append_turn("t", {"number": 1})
    assert not await store.settle(60.0) and not store.health().ok
    reopened = asyncio.create_task(_reopened(store, server.url()))
    await asyncio.sleep(0)  # it closes, and Redis is away
    server.restart()
    assert (await reopened)["t"][1] == [{"number": 0}, {"number": 1}]


async def test_a_store_opens_while_redis_is_away_and_connects_later(server: RedisServer) -> None:
    """Opening does not fail, loading raises StoreAway, and what was put meanwhile arrives."""
    server.kill()
    store = _new(server.url())
    await store.open()
    assert not store.health().ok
    with pytest.raises(StoreAway):
        await store.load()
    store.put_trajectory("t", {"early": True})
    server.restart()
    await _until_ok(store)
    assert await store.settle(5.0)
    assert await _reopened(store, server.url()) == {"t": ({"early": True}, [])}


@pytest.mark.parametrize("busy", [True, False])
async def test_a_redis_restarted_without_its_data_is_rewritten(server: RedisServer, busy: bool) -> None:
    """The loss is noticed at the next put, or soon without one, and everything live is in the record again."""
    store = _new(server.url())
    await store.open()

    def rewrite() -> None:
        store.put_trajectory("live", {"home": "engine-1"})
        store.append_turn("live", {"number": 1})
        store.put_state("predictor", b"weights")

    store.on_loss(rewrite)
    store.put_trajectory("ended", {})
    rewrite()
    assert await store.settle(5.0)
    server.restart(empty=True)
    if busy:
        store.put_trajectory("ended", {"again": True})
    await _until(lambda: store.health().num_losses > 0, "the loss is noticed")
    assert await store.settle(5.0)
    assert store.health().num_losses == 1
    assert await store.get_state("predictor") == b"weights"
    assert await _reopened(store, server.url()) == {"live": ({"home": "engine-1"}, [{"number": 1}])}


async def test_a_full_queue_drops_and_counts_the_oldest_and_has_all_rewritten(server: RedisServer) -> None:
    """Memory is bounded while Redis is away. The owner's rewrite, which is not bounded, restores what was dropped."""
    store = _new(server.url(), max_pending_trajectories=10)
    await store.open()
    live = {f"t{number}": {"number": number} for number in range(50)}

    def rewrite() -> None:
        for trajectory_id, record in live.items():
            store.put_trajectory(trajectory_id, record)

    store.on_loss(rewrite)
    server.kill()
    store.put_state("wake", b"")
    assert not await store.settle(5.0)
    rewrite()
    health = store.health()
    assert 10 <= health.num_pending <= 11
    assert health.num_dropped == 40
    server.restart()
    await _until_ok(store)
    assert await store.settle(5.0)
    assert store.health().num_dropped == 40
    assert await _reopened(store, server.url()) == {key: (record, []) for key, record in live.items()}


async def test_pending_bytes_are_bounded_too(server: RedisServer) -> None:
    """A few huge histories cannot fill the memory either. Coalesced records count once."""
    server.kill()
    store = _new(server.url(), max_pending_bytes=100_000)
    await store.open()
    for _ in range(100):
        store.put_trajectory("same", {"pad": "x" * 10_000})
    assert store.health().num_dropped == 0
    for number in range(20):
        store.append_turn(f"t{number}", {"pad": "x" * 10_000})
    assert store.health().num_dropped == 12
    assert store.health().num_pending == 9
    server.restart()
    await store.close()


async def test_a_turn_is_not_stored_twice_when_the_answer_is_lost(server: RedisServer) -> None:
    """Connections break after the server has applied a batch and before its answer arrives: the history has each turn
    once."""
    async with _breaking_proxy(server.port) as (port, num_broken):
        store = _new(f"redis://127.0.0.1:{port}/0")
        await store.open()
        for number in range(200):
            store.append_turn("t", {"number": number})
            store.put_trajectory("t", {"number": number})
            await asyncio.sleep(0)
            if number % 10 == 0:
                await _until(lambda: store.health().num_pending == 0, "the batch is confirmed")
        await _until(lambda: store.health().num_pending == 0, "everything is confirmed")
        assert num_broken() >= 5
        assert store.health().num_losses == 0
        await store.close()
    assert await _reopened(store, server.url()) == {"t": ({"number": 199}, [{"number": n} for n in range(200)])}


async def test_a_later_process_takes_over_and_the_earlier_one_is_fenced_off(server: RedisServer) -> None:
    """Two gateways that were given one namespace do not mix their records; the earlier one's health reports the
    takeover."""
    first, second = _new(server.url()), _new(server.url())
    await first.open()
    first.put_trajectory("t", {"by": "first"})
    assert await first.settle(5.0)
    await second.open()
    second.put_trajectory("t", {"by": "second"})
    assert await second.settle(5.0)
    first.put_trajectory("t", {"by": "first again"})
    assert not await first.settle(5.0)
    assert "another process has taken over" in first.health().detail
    assert await _all(second) == {"t": ({"by": "second"}, [])}
    await first.close()
    await second.close()


async def test_a_takeover_by_an_older_version_fences_off_too(server: RedisServer) -> None:
    """An older version names itself as the writer and leaves the previous claim's time as it is."""
    store = _new(server.url())
    await store.open()
    await _ask(server, b"HSET heddle:owner writer older batch 1\r\n", b":0\r\n")
    await _until(lambda: "another process has taken over" in store.health().detail, "it is told")
    await store.close()


@pytest.mark.parametrize("is_claimed", [False, True])
async def test_after_a_loss_the_later_of_two_processes_still_owns_the_record(
    server: RedisServer, is_claimed: bool
) -> None:
    """A server that lost everything belongs to the later process, whichever of the two it hears from first."""
    first, second = _new(server.url(), check_every_s=60.0), _new(server.url(), check_every_s=60.0)
    second.on_loss(lambda: second.put_trajectory("t", {"by": "second"}))
    await first.open()
    assert await first.settle(5.0)
    if is_claimed:
        await second.open()
    server.restart(empty=True)
    if is_claimed:
        second.put_trajectory("t", {"by": "second"})
        await _until(lambda: second.health().num_losses > 0, "the loss is noticed")
    else:
        await second.open()
    first.put_trajectory("t", {"by": "first"})
    await _until(lambda: "another process has taken over" in first.health().detail, "the first one is told")
    second.put_trajectory("t", {"by": "second"})
    assert await second.settle(5.0)
    assert await _all(second) == {"t": ({"by": "second"}, [])}
    for store in (first, second):
        await store.close()


async def test_a_takeover_holds_when_the_servers_clock_is_behind(server: RedisServer) -> None:
    """After a failover to a server whose clock is behind, the process that took over stays the owner."""
    ahead = str(int((time.time() + 3600.0) * 1e6)).encode()
    async with redis.Redis.from_url(server.url()) as client:
        earlier = {"format": b"1", "writer": b"earlier", "claimed_at": ahead, "batch": FIRST_BATCH, "lost": b"0"}
        await client.hset("heddle:owner", mapping=earlier)
        store = _new(server.url())
        await store.open()
        store.put_trajectory("t", {"by": "later"})
        assert await store.settle(5.0)
        put = [b"record", b"t", b'{"by":"earlier"}', b""]
        assert await client.eval(APPLY, 0, "heddle:", b"earlier", ahead, FIRST_BATCH + 1, 100, *put) == b"fenced"
    assert await _all(store) == {"t": ({"by": "later"}, [])}
    await store.close()


async def test_namespaces_on_one_server_are_separate(server: RedisServer) -> None:
    """Several fleets on one Redis see only their own records."""
    one, two = _new(server.url(), namespace="one:"), _new(server.url(), namespace="two:")
    for store in (one, two):
        await store.open()
    one.append_turn("t", {"number": 1})
    two.put_trajectory("t", {"number": 2})
    assert await _all(one) == {"t": ({}, [{"number": 1}])}
    assert await _all(two) == {"t": ({"number": 2}, [])}
    for store in (one, two):
        await store.close()


async def test_forgotten_trajectories_leave_no_key_behind(server: RedisServer) -> None:
    """A server shared for months does not fill with histories of ended trajectories."""
    store = _new(server.url(), namespace="n:")
    await store.open()
    for number in range(100):
        store.append_turn(f"t{number}", {})
    assert await store.settle(5.0)
    for number in range(100):
        store.forget_trajectory(f"t{number}")
    assert await store.settle(5.0)
    await store.close()
    assert await _keys(server) == [b"n:owner"]


async def test_a_flush_larger_than_a_batch_arrives_whole(server: RedisServer) -> None:
    """One settle covers many batches, and turns stay in order across them."""
    store = _new(server.url(), batch_bytes=1000)
    await store.open()
    for number in range(300):
        store.append_turn(f"t{number % 3}", {"number": number, "pad": "x" * 100})
    assert await store.settle(5.0)
    found = await _all(store)
    assert sorted(turn["number"] for _, turns in found.values() for turn in turns) == list(range(300))
    assert all(turns == sorted(turns, key=lambda turn: turn["number"]) for _, turns in found.values())
    await store.close()


async def test_concurrent_settles_share_a_flush(server: RedisServer) -> None:
    """A thousand waiters cost the server a few commands beyond their puts, not a thousand."""
    store = _new(server.url(), check_every_s=60.0)
    await store.open()
    before = await _num_commands(server)

    async def put_and_settle(number: int) -> bool:
        store.put_trajectory(f"t{number}", {})
        return await store.settle(5.0)

    assert all(await asyncio.gather(*(put_and_settle(number) for number in range(1000))))
    assert await _num_commands(server) - before < 1000 + 50  # one HSET each, inside a few scripts
    await store.close()


async def test_a_wrong_password_stops_the_start_and_is_not_shown(server: RedisServer) -> None:
    """A mistake in the configuration is not taken for a server that is away."""
    store = _new(f"redis://nobody:secret@127.0.0.1:{server.port}/0")
    with pytest.raises(StoreError, match="refuses the login") as caught:
        await store.open()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("rights", "what"), [("~* +@all -eval", "'eval' command"), ("~other:* +@all", "access one of the keys")]
)
async def test_a_user_without_rights_stops_the_start(server: RedisServer, rights: str, what: str) -> None:
    """At once: the gateway waited 10 s for a server that is "away"."""
    await _ask(server, f"ACL SETUSER weak on >word {rights}\r\n".encode(), b"+OK\r\n")
    with pytest.raises(StoreError, match=f"refuses a command: .*{what}") as caught:
        await _new(f"redis://weak:word@127.0.0.1:{server.port}/0").open()
    assert not isinstance(caught.value, StoreAway)


async def test_a_user_without_the_right_to_read_stops_the_start(server: RedisServer) -> None:
    """Here it may claim the record."""
    await _ask(server, b"ACL SETUSER weak on >word ~* +@all -hkeys\r\n", b"+OK\r\n")
    store = _new(f"redis://weak:word@127.0.0.1:{server.port}/0")
    await store.open()
    with pytest.raises(StoreError, match="'hkeys' command") as caught:
        await store.load()
    assert not isinstance(caught.value, StoreAway)
    await store.close()


async def test_a_database_that_does_not_exist_stops_the_start(server: RedisServer) -> None:
    """A server has sixteen, unless it is told otherwise."""
    with pytest.raises(StoreError, match="refuses the database: DB index is out of range"):
        await _new(server.url(16)).open()


async def test_a_cluster_stops_the_start(server: RedisServer, tmp_path: Path) -> None:
    """The record's keys would be on several servers, and a batch reaches one."""
    bus_port = str(free_port())  # the default is the port + 10000, which any connection may have
    cluster = RedisServer(server.binary, tmp_path, "--cluster-enabled", "yes", "--cluster-port", bus_port)
    cluster.start()
    try:
        with pytest.raises(StoreError, match="is a cluster; the store must be a single server"):
            await _new(cluster.url()).open()
    finally:
        cluster.kill()


async def test_a_record_of_another_format_is_refused(server: RedisServer) -> None:
    """A newer program's record is not overwritten."""
    await _ask(server, b"HSET heddle:owner format 2\r\n", b":1\r\n")
    with pytest.raises(StoreCorrupt, match="heddle:owner has format"):
        await _new(server.url()).open()
    await _ask(server, b"HGETALL heddle:owner\r\n", b"*2\r\n$6\r\nformat\r\n$1\r\n2\r\n")


async def _keys(server: RedisServer) -> list[bytes]:
    answer = await _ask(server, b"KEYS *\r\n", b"*1\r\n")
    return answer.split(b"\r\n")[2:3]


async def _num_commands(server: RedisServer) -> int:
    answer = await _ask(server, b"INFO stats\r\n", b"total_commands_processed")
    return int(answer.partition(b"total_commands_processed:")[2].partition(b"\r\n")[0])


async def _ask(server: RedisServer, question: bytes, expected: bytes) -> bytes:
    """Send the server a command in its plain protocol, beside the store."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(question + b"QUIT\r\n")
    answer = await reader.read()
    writer.close()
    assert expected in answer, answer
    return answer


@asynccontextmanager
async def _breaking_proxy(redis_port: int) -> AsyncIterator[tuple[int, Callable[[], int]]]:
    """A proxy to Redis that applies batches and loses their answers: every second connection loses the first answer,
    the others the fourth."""
    num_connections = num_broken = 0

    async def serve(client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections, num_broken
        num_connections += 1
        breaks = num_connections % 2 == 0
        reader, writer = await asyncio.open_connection("127.0.0.1", redis_port)
        try:
            num_batches = 0
            while question := await client_reader.read(2**20):
                num_batches += b"turn" in question
                writer.write(question)
                answer = await reader.read(2**20)
                if num_batches > 3 or (breaks and num_batches):
                    num_broken += 1
                    return
                client_writer.write(answer)
        finally:
            writer.close()
            client_writer.close()

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield proxy.sockets[0].getsockname()[1], lambda: num_broken
    finally:
        proxy.close()
