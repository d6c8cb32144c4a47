"""What every store promises: the double in memory, the embedded store and a real Redis."""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from store import Store, StoredTrajectory

NewStore = Callable[..., Store]


async def _all(store: Store) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    assert await store.settle(5.0)
    found = await store.load()
    assert len({each.trajectory_id for each in found}) == len(found)
    return {each.trajectory_id: (each.record, each.turns) for each in found}


async def test_a_new_store_is_empty(new_store: NewStore) -> None:
    """Nothing is found that was not put."""
    store = new_store()
    await store.open()
    assert await store.load() == []
    assert await store.get_state("predictor") is None
    assert store.health().ok
    assert store.health().num_pending == 0
    await store.close()


async def test_load_returns_the_last_record_and_the_turns_in_order(new_store: NewStore) -> None:
    """Strings may hold anything but lone surrogates: NUL, line breaks and any script."""
    store = new_store()
    await store.open()
    store.put_trajectory("a/ü 1", {"home": "engine-1"})
    store.append_turn("a/ü 1", {"number": 1, "text": "œ\n\x00"})
    store.put_trajectory("a/ü 1", {"home": "engine-2", "deep": {"list": [1, 2.5, None, True]}})
    store.append_turn("a/ü 1", {"number": 2})
    assert await store.settle(5.0)
    assert await store.load() == [
        StoredTrajectory(
            "a/ü 1",
            {"home": "engine-2", "deep": {"list": [1, 2.5, None, True]}},
            [{"number": 1, "text": "œ\n\x00"}, {"number": 2}],
        )
    ]
    await store.close()


async def test_an_answer_is_kept_beside_its_record(new_store: NewStore) -> None:
    """An answer is any bytes, or none, and the last one wins. A record put without an answer leaves it; forgetting
    removes it."""
    store = new_store()
    await store.open()
    first, second = b"\x00\xff first", b"x" * 50_000
    for answer, kept in ((first, first), (b"", b""), (second, second), (None, second)):
        store.put_trajectory("t", {"answer": len(answer or b"")}, answer)
        store.put_trajectory("without", {})
        assert await store.settle(5.0)
        assert {each.trajectory_id: each.answer for each in await store.load()} == {"t": kept, "without": None}
    store.forget_trajectory("t")
    store.put_trajectory("t", {})
    assert await store.settle(5.0)
    assert {each.answer for each in await store.load()} == {None}
    await store.close()


async def test_a_put_copies_the_record(new_store: NewStore) -> None:
    """What the caller does to the object afterwards does not reach the record."""
    store = new_store()
    await store.open()
    record: dict[str, Any] = {"turns": [1]}
    store.put_trajectory("t", record)
    record["turns"].append(2)
    assert await _all(store) == {"t": ({"turns": [1]}, [])}
    await store.close()


async def test_a_put_of_anything_but_json_raises(new_store: NewStore) -> None:
    """Every store raises TypeError at the put, and nothing is stored."""
    store = new_store()
    await store.open()
    with pytest.raises(TypeError):
        store.put_trajectory("t", {"bad": object()})
    with pytest.raises(TypeError):
        store.append_turn("t", {"bad": object()})
    assert await _all(store) == {}
    await store.close()


async def test_only_the_newest_turns_are_kept(new_store: NewStore) -> None:
    """The history is bounded, whether it comes in one flush or in many."""
    store = new_store(max_turns_kept=3)
    await store.open()
    for number in range(5):
        store.append_turn("at once", {"number": number})
    for number in range(5):
        store.append_turn("one by one", {"number": number})
        assert await store.settle(5.0)
    newest = ({}, [{"number": 2}, {"number": 3}, {"number": 4}])
    assert await _all(store) == {"at once": newest, "one by one": newest}
    await store.close()


async def test_a_forgotten_trajectory_is_gone_and_can_be_put_again(new_store: NewStore) -> None:
    """Nothing of the old one shows up again, whether it was forgotten before or after it was settled."""
    store = new_store()
    await store.open()
    for settled_between in (False, True):
        store.put_trajectory("t", {"old": True})
        store.append_turn("t", {"old": True})
        store.put_trajectory("gone", {"old": True})
        assert not settled_between or await store.settle(5.0)
        store.forget_trajectory("t")
        store.forget_trajectory("gone")
        store.forget_trajectory("never was")
        store.append_turn("t", {"new": True})
        assert await _all(store) == {"t": ({}, [{"new": True}])}
        store.forget_trajectory("t")
        assert await _all(store) == {}
    await store.close()


async def test_pieces_are_read_by_prefix_and_put_once(new_store: NewStore) -> None:
    """A piece is any bytes under any name. Each trajectory has its own names, and the first put of a name counts."""
    store = new_store()
    await store.open()
    for name, data in (
        ("tokens/1", b"\x00\xff"),
        ("tokens/ü 2", b"x" * 3_000_000),
        ("part/1", b""),
        ("tokens/1", b"no"),
    ):
        store.put_piece("t", name, data)
    store.put_piece("tt", "tokens/1", b"other")
    for _ in range(2):  # while they wait, and when they are settled
        assert await store.get_pieces("t", "tokens/") == {"tokens/1": b"\x00\xff", "tokens/ü 2": b"x" * 3_000_000}
        assert await store.get_pieces("t") == await store.get_pieces("t", "tokens/") | {"part/1": b""}
        assert await store.get_pieces("nobody") == {}
        assert await store.piece_sizes() == {"t": 3_000_002, "tt": 5}
        store.put_piece("t", "tokens/1", b"no, again")
        assert await store.settle(60.0)
    assert await store.load() == [], "a piece makes no record"
    await store.close()


@pytest.mark.parametrize("settled", [False, True])
async def test_dropped_pieces_are_gone_and_can_be_put_again(new_store: NewStore, settled: bool) -> None:
    """Pieces are dropped by prefix, or all with their trajectory; other trajectories keep theirs."""
    store = new_store()
    await store.open()
    for trajectory_id in ("t", "u"):
        store.put_trajectory(trajectory_id, {})
        for name in ("a/1", "a/2", "ab/1"):
            store.put_piece(trajectory_id, name, b"old")
    assert not settled or await store.settle(60.0)
    store.drop_pieces("t", "a/")
    store.drop_pieces("nobody", "a/")
    store.put_piece("t", "a/2", b"new")
    assert await store.get_pieces("t") == {"a/2": b"new", "ab/1": b"old"}
    store.forget_trajectory("u")
    store.put_piece("u", "a/1", b"young")
    assert await store.get_pieces("u") == {"a/1": b"young"}
    assert await store.piece_sizes() == {"t": 6, "u": 5}
    store.drop_pieces("t", "a")
    assert await store.piece_sizes() == {"u": 5}
    for trajectory_id in ("t", "u"):
        store.forget_trajectory(trajectory_id)
    assert await store.settle(60.0)
    assert await store.piece_sizes() == {}
    await store.close()


async def test_named_blobs_keep_their_last_value(new_store: NewStore) -> None:
    """Blobs are bytes, and do not show up as trajectories."""
    store = new_store()
    await store.open()
    store.put_state("predictor", b"\x00old")
    store.put_state("predictor", b"\x00\xffnew")
    store.put_state("empty", b"")
    assert await store.get_state("predictor") == b"\x00\xffnew"
    assert await store.get_state("empty") == b""
    assert await _all(store) == {}
    await store.close()


async def test_who_waits_for_a_put_without_awaiting_is_called_once_or_told_to_await(new_store: NewStore) -> None:
    """Called and told to await, a gateway would send the end of an answer twice."""
    store = new_store()
    await store.open()
    calls: list[str] = []
    for put in (lambda: None, lambda: store.append_turn("t", {}), lambda: store.put_piece("t", "p", b"")):
        put()
        is_called = store.when_settled(lambda: calls.append("called"))
        await asyncio.sleep(0)
        assert calls == ["called"] * is_called
        assert await store.settle(60.0)
        assert len(calls) == is_called
        calls.clear()
    await store.close()


@pytest.mark.parametrize("kind", ["sqlite", "redis"], indirect=True)
async def test_a_reopened_store_has_everything_and_continues_the_history(new_store: NewStore) -> None:
    """Records, answers, history, pieces and blobs are there after a close, and the history continues in order."""
    for number in range(3):
        store = new_store("same", max_turns_kept=2)
        await store.open()
        found = await _all(store)
        assert found == ({"t": ({"run": number - 1}, found["t"][1])} if number else {})
        assert [each.answer for each in await store.load()] == [b"answer %d" % (number - 1)] * bool(number)
        assert await store.get_state("run") == (str(number - 1).encode() if number else None)
        store.put_trajectory("t", {"run": number}, b"answer %d" % number)
        store.append_turn("t", {"run": number})
        assert await store.get_pieces("t") == {str(run): b"piece" for run in range(number)}
        store.put_state("run", str(number).encode())
        store.put_piece("t", str(number), b"piece")
        await store.close()
    store = new_store("same")
    await store.open()
    assert await store.piece_sizes() == {"t": 15}
    assert await _all(store) == {"t": ({"run": 2}, [{"run": 1}, {"run": 2}])}
    await store.close()


async def test_ten_thousand_trajectories_load_in_two_seconds(new_store: NewStore, kind: str) -> None:
    """A full gateway restarts quickly: 10,000 trajectories of ten turns are closed, opened and loaded.

    The bound is on processor time, so that a crowded machine does not fail it.
    """
    store = new_store("large")
    await store.open()
    record = {"group": "g" * 16, "home": "engine-1", "state": "tool", "pad": "z" * 500}
    for number in range(10_000):
        store.put_trajectory(f"trajectory-{number}", record)
        for turn in range(10):
            store.append_turn(f"trajectory-{number}", {"number": turn, "tokens": 900, "pad": "y" * 150})
    assert await store.settle(60.0)
    started_at, started_cpu = time.perf_counter(), time.process_time()
    if kind != "memory":
        await store.close()
        store = new_store("large")
        await store.open()
    found = await store.load()
    cpu_s = time.process_time() - started_cpu
    print(f"loaded in {time.perf_counter() - started_at:.2f} s, {cpu_s:.2f} s of processor time")
    assert len(found) == 10_000
    assert all(len(each.turns) == 10 for each in found)
    assert cpu_s < 2.0
    await store.close()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=3)
IDS = st.sampled_from(["a", "b", "ü:*", "turns:a", ""])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), IDS, OBJECTS),
        st.tuples(st.just("append"), IDS, OBJECTS),
        st.tuples(st.just("forget"), IDS, st.just({})),
        st.tuples(st.just("piece"), IDS, OBJECTS),
        st.tuples(st.just("drop"), IDS, st.just({})),
        st.tuples(st.sampled_from(["settle", "restart"]), st.just(""), st.just({})),
    ),
    max_size=30,
)
_numbers = itertools.count()


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=STEPS)
@example(steps=[("put", "a", {}), ("restart", "", {}), ("append", "b", {})])  # it must not take the place of the first
async def test_any_sequence_of_puts_matches_a_dictionary(
    new_store: NewStore, kind: str, steps: list[tuple[str, str, dict[str, Any]]]
) -> None:
    """Records, history, pieces and forgetting behave as in plain dictionaries, however the puts fall into flushes and
    processes."""
    place = f"sequence-{next(_numbers)}"
    store = new_store(place, max_turns_kept=3)
    await store.open()
    model: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    pieces: dict[str, dict[str, bytes]] = {}
    for step, trajectory_id, value in steps:
        record, turns = model.get(trajectory_id, ({}, []))
        match step:
            case "put":
                store.put_trajectory(trajectory_id, value)
                model[trajectory_id] = (value, turns)
            case "append":
                store.append_turn(trajectory_id, value)
                model[trajectory_id] = (record, [*turns, value][-3:])
            case "forget":
                store.forget_trajectory(trajectory_id)
                model.pop(trajectory_id, None)
                pieces.pop(trajectory_id, None)
            case "piece":
                name, data = f"{len(value)}/{len(str(value)) % 3}", str(value).encode()
                store.put_piece(trajectory_id, name, data)
                pieces.setdefault(trajectory_id, {}).setdefault(name, data)
            case "drop":
                store.drop_pieces(trajectory_id, "1/")
                left = {name: data for name, data in pieces.pop(trajectory_id, {}).items() if name[:2] != "1/"}
                pieces |= {trajectory_id: left} if left else {}
            case "restart" if kind != "memory":
                await store.close()
                store = new_store(place, max_turns_kept=3)
                await store.open()
            case _:
                assert await store.settle(5.0)
    assert await _all(store) == model
    for trajectory_id in ("a", "b", "ü:*", "turns:a", ""):
        assert await store.get_pieces(trajectory_id) == pieces.get(trajectory_id, {})
    assert await store.piece_sizes() == {name: sum(map(len, each.values())) for name, each in pieces.items()}
    await store.close()
