"""The token book finds what was added: on every store, within its limits, after a restart."""

import asyncio
import itertools
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.token_ids import TokenIds
from gateway.clock import started_clock
from gateway.state.ledger import Ledger
from gateway.tokens.book import PREFIX, TURN_BYTES, TokenBook, TokenLimits, wants_tokens
from gateway.tokens.packed import decoded, kept, piece
from gateway.tokens.partials import Partials
from gateway.tokens.turn_tokens import TurnTokens, VersionSpan
from scheduling.types import TrajectoryRecord, TrajectoryState
from store import Store, StoreSettings, open_store
from tests.support.conversations import Step, comparable, conversation, steps
from tests.support.gateway import eventually
from tests.support.redis_server import PATIENT, RedisServer, redis_server

__all__ = ["redis_server"]

LIMITS = TokenLimits(keep=True, memory_bytes=2**30, stored_bytes=2**30, age_s=3600)
IDS = ("a", "b/ü", "c")
_numbers = itertools.count()


@pytest.fixture(params=["memory", "sqlite", "redis"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Store]:
    """Creates stores: empty, or on the data of an earlier one."""

    def make(name: str = "") -> Store:
        name = name or f"unnamed-{next(_numbers)}"
        match request.param:
            case "memory":
                return open_store("memory:", StoreSettings())
            case "sqlite":
                return open_store(f"sqlite:{tmp_path / name}.sqlite3", StoreSettings())
            case _:
                server: RedisServer = request.getfixturevalue("redis_server")
                return open_store(server.url(), StoreSettings(namespace=f"{tmp_path.name}-{name}:", **PATIENT))

    return make


class AdjustableClock:
    """A clock that a test can set forward."""

    def __init__(self) -> None:
        self._now = started_clock()
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return self._now() + self.ahead_s


class Site:
    """A book on a store, with its ledger; it can be restarted if the store allows it."""

    def __init__(self, new_store: Callable[..., Store], limits: TokenLimits = LIMITS) -> None:
        self._new_store = new_store
        self._limits = limits
        self.clock = AdjustableClock()
        self.store: Store
        self.ledger: Ledger
        self.book: TokenBook

    async def start(self, name: str) -> "Site":
        self.store = self._new_store(name)
        await self.store.open()
        self.ledger = Ledger(self.store, 100)
        self.ledger.restore(await self.store.load(), self.clock())
        self.book = TokenBook(self.store, self.ledger, self.clock, self._limits)
        await self.book.restore()
        return self

    def save(self, *trajectory_ids: str) -> None:
        """Add trajectories with these ids to the ledger."""
        for trajectory_id in trajectory_ids:
            now = self.clock()
            state = TrajectoryState.ACTIVE
            self.ledger.save(TrajectoryRecord(trajectory_id, "g", "r", state, None, 0, 0, 0, 0.0, now, now))

    def add(self, *turns: TurnTokens) -> None:
        """Add turns to the book and to their trajectories' histories, as at their ends."""
        for turn in turns:
            self.book.add(turn)
            row = {"turn_id": turn.turn_id.partition("/")[0], "outcome": "finished", "ended_at": turn.ended_at}
            self.ledger.add_turn(turn.trajectory_id, row)

    async def kept(self, trajectory_id: str, turns: list[TurnTokens]) -> list[TurnTokens | None]:
        """The book's turns with the histories of these turns."""
        await self.book.ready(trajectory_id)
        return [next(self.book.continued(trajectory_id, turn.history), None) for turn in turns]


@pytest.mark.parametrize("memory_bytes", [2**30, 3_000, 0])
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(plans=st.lists(st.tuples(st.sampled_from(IDS), st.lists(steps(), max_size=4)), max_size=6), data=st.data())
async def test_added_turns_are_found(
    new_store: Callable[..., Store], memory_bytes: int, plans: list[tuple[str, list[Step]]], data: st.DataObject
) -> None:
    """Every turn with all its tokens, however few fit into memory; a forgotten trajectory is gone."""
    site = await Site(new_store, replace(LIMITS, memory_bytes=memory_bytes)).start("")
    site.save(*IDS)
    known: dict[str, list[TurnTokens]] = {name: [] for name in IDS}
    for name, plan in plans:
        if data.draw(st.booleans()):
            site.book.forget(name)
            known[name] = []
        added = [
            replace(turn, turn_id=f"{turn.turn_id}-{next(_numbers)}", parent=None, history=f"h{next(_numbers)}")
            for turn in conversation(plan, name)
        ]
        site.add(*added)
        known[name] += added
        checked = data.draw(st.sampled_from(IDS))
        assert _same(await site.kept(checked, known[checked]), known[checked])
    for name, turns in known.items():
        assert _same(await site.kept(name, turns), turns)
        assert set(await site.book.turns(name)) == {turn.turn_id for turn in turns}
        assert not list(site.book.continued(name, "never heard"))
        site.book.forget(name)
    view = site.book.view()
    assert (view["num_trajectories"], view["memory_bytes"], view["stored_bytes"]) == (0, 0, 0)
    await site.store.close()


async def test_the_least_recently_used_tokens_leave_memory_first(new_store: Callable[..., Store]) -> None:
    """Adding, reading and continuing are uses. What left memory is found once it is ready again."""
    site = await Site(new_store, replace(LIMITS, memory_bytes=2 * TURN_BYTES + 100)).start("")
    site.save("a", "b", "c")
    turns = {name: conversation([Step(None, [1], [2], None, 0)], name)[0] for name in "abc"}

    def in_memory() -> list[str]:
        assert site.book.view()["memory_bytes"] <= 2 * TURN_BYTES + 100
        return [name for name in "abc" if list(site.book.continued(name, turns[name].history))]

    site.add(turns["b"], turns["a"])
    assert list(site.book.continued("b", turns["b"].history))
    site.add(turns["c"])
    assert in_memory() == ["b", "c"]
    await site.book.ready("a")
    assert in_memory() == ["a", "c"]
    await site.store.close()


async def test_a_trajectory_forgotten_while_it_is_read_stays_forgotten(
    new_store: Callable[..., Store],
) -> None:
    """Nothing of it is found or counted."""
    site = await Site(new_store, replace(LIMITS, memory_bytes=0)).start("")
    site.save("a", "b")
    plan = [Step(None, [1], [2], None, 0)]
    site.add(*conversation(plan, "a"), *conversation(plan, "b"))
    reading = asyncio.create_task(site.book.ready("a"))
    await asyncio.sleep(0)
    site.book.forget("a")
    await reading
    site.book.rewrite()
    site.book.forget("b")
    assert (await site.book.turns("a"), site.book.view()["memory_bytes"]) == ({}, 0)
    await site.store.close()


async def test_a_trajectory_that_is_held_stays_in_memory(new_store: Callable[..., Store]) -> None:
    """Until all turns that hold it are over, even beyond the limit: a turn that begins finds what it continues, and is
    kept as what it adds to it."""
    site = await Site(new_store, replace(LIMITS, memory_bytes=0)).start("")
    site.save(*IDS)
    held, later = conversation([Step(None, [1, 2], [3], None, 0), Step(0, [4], [5], None, 0)], "a")
    one, other = (conversation([Step(None, [1], [2], None, 0)], name)[0] for name in IDS[1:])

    def is_in_memory() -> bool:
        return next(site.book.continued("a", held.history), None) is not None

    site.add(held, one, other)
    assert not is_in_memory()
    for turn_id in ("begun", "begun", "another"):
        await site.book.hold("a", turn_id)
    site.add(replace(one, turn_id="b-1"), replace(other, turn_id="c-1"))
    assert is_in_memory()
    site.add(later)
    site.book.release("a", "begun")
    site.add(replace(one, turn_id="b-2"), replace(other, turn_id="c-2"))
    assert is_in_memory()
    site.book.release("a", "another")
    site.add(replace(one, turn_id="b-3"))
    assert not is_in_memory()
    assert {name: turn.parent for name, turn in (await site.book.turns("a")).items()} == {"a-0": None, "a-1": "a-0"}
    site.book.release("a", "one that never began")
    for name in IDS:
        site.book.forget(name)
    assert site.book.view()["memory_bytes"] == 0
    await site.store.close()


@pytest.mark.parametrize("new_store", ["sqlite", "redis"], indirect=True)
async def test_a_turn_that_ends_while_its_trajectory_is_read_is_found(new_store: Callable[..., Store]) -> None:
    """By the reader and from then on, though others push the trajectory out of memory before the store has answered:
    an export called it dropped."""
    site = await Site(new_store, replace(LIMITS, memory_bytes=0)).start("")
    site.save(*IDS)
    first, second = conversation([Step(None, [1], [2], None, 0), Step(None, [3], [4], None, 0)], "a")
    one, other = (conversation([Step(None, [1], [2], None, 0)], name)[0] for name in IDS[1:])
    site.add(first, one)
    assert await site.store.settle(60)
    reading = asyncio.create_task(site.book.turns("a"))
    loading = asyncio.create_task(site.book.ready("a"))
    await asyncio.sleep(0)
    site.add(second, other)
    assert list(await reading) == ["a-0", "a-1"]
    await loading
    assert list(await site.book.turns("a")) == ["a-0", "a-1"]
    await site.store.close()


async def test_a_turn_without_history_is_never_continued(new_store: Callable[..., Store]) -> None:
    """Its history is empty, and so is that of other turns."""
    site = await Site(new_store).start("")
    site.save("a")
    site.add(replace(tokens_of("u", [1], [2]), history=""))
    assert not list(site.book.continued("a", ""))
    await site.store.close()


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(plan=st.lists(steps(), max_size=6), data=st.data())
async def test_the_turn_with_which_a_prompt_begins_is_found(plan: list[Step], data: st.DataObject) -> None:
    """Token by token: the longest, and the latest of equals."""
    site = await Site(lambda _: open_store("memory:", StoreSettings())).start("")
    site.save("a")
    turns = conversation(plan, "a")
    site.add(*turns)
    starts = [[*turn.prompt_ids, *turn.output_ids] for turn in turns] + [[]]
    prompt = [*data.draw(st.sampled_from(starts)), *data.draw(st.lists(st.integers(0, 12), max_size=2))]
    lengths = {
        turn.turn_id: len(start) for turn, start in zip(turns, starts, strict=False) if prompt[: len(start)] == start
    }
    expected = max(reversed(lengths), key=lengths.__getitem__, default=None)
    assert site.book.begun_by("a", TokenIds.of(prompt)) == expected
    assert site.book.begun_by("another", TokenIds.of(prompt)) is None
    await site.store.close()


@pytest.mark.parametrize("ready", [False, True])
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(plan=st.lists(steps(), max_size=10))
async def test_a_tree_stores_each_token_once(new_store: Callable[..., Store], ready: bool, plan: list[Step]) -> None:
    """Also while others push its trajectory out of memory between its turns. A turn of a trajectory that is not in
    memory stands alone, with its whole prompt."""
    site = await Site(new_store, replace(LIMITS, memory_bytes=0)).start("")
    site.save("t", "u")
    turns = conversation(plan)
    for number, turn in enumerate(turns):
        if ready:
            await site.book.ready("t")
        site.add(turn, replace(turn, trajectory_id="u", turn_id=f"u{number}", parent=None))
    kept = await site.book.turns("t")
    assert list(kept) == [turn.turn_id for turn in turns]
    if ready:
        assert _same(await site.kept("t", turns), turns)
        assert sum(each.num_new for each in kept.values()) == sum(len(step.new) for step in plan)
    else:
        assert all((each.num_before, each.parent) == (0, None) for each in kept.values())
        assert [each.num_new for each in kept.values()] == [len(turn.prompt_ids) for turn in turns]
    await site.store.close()


@pytest.mark.parametrize("new_store", ["sqlite", "redis"], indirect=True)
async def test_turns_survive_a_restart_and_are_continued(new_store: Callable[..., Store]) -> None:
    """Turns from before are found, and continued by those after; those of a trajectory that the ledger does not know
    are not."""
    turns = conversation(
        [Step(None, [1, 2], [3], [-0.5], 0), Step(0, [4], [5, 6], [-0.25, 0.0], 1), Step(0, [7], [8], None, 0)]
    )
    site = await Site(new_store).start("same")
    site.save("t")
    site.add(turns[0], turns[1])
    site.add(*conversation([Step(None, [1], [2], None, 0)], "stray"))
    await site.store.close()

    site = await Site(new_store).start("same")
    assert not list(site.book.continued("t", turns[0].history)), "only once it is ready"
    assert _same(await site.kept("t", turns[:2]), turns[:2])
    site.add(turns[2])
    assert await site.store.get_pieces("stray") == {}
    in_memory = site.book.view()["memory_bytes"]
    await site.store.close()

    site = await Site(new_store).start("same")
    assert _same(await site.kept("t", turns), turns)
    assert site.book.view()["memory_bytes"] == in_memory
    assert {name: each.parent for name, each in (await site.book.turns("t")).items()} == {
        "t-0": None,
        "t-1": "t-0",
        "t-2": "t-0",
    }
    site.ledger.forget("t")
    site.book.forget("t")
    assert await site.store.piece_sizes() == {}
    await site.store.close()


async def test_tokens_later_than_the_history_are_dropped(new_store: Callable[..., Store]) -> None:
    """A gateway killed between a turn's tokens and the record of its end: the client asks again, for another turn.
    Those of turns that the history is too short for stay."""
    if new_store("").health().detail.startswith("in memory"):
        pytest.skip("it does not outlive the process")
    turns = conversation([Step(None, [1], [2], None, 0), Step(0, [3], [4], None, 0), Step(0, [3], [5], None, 0)])
    turns = [replace(turn, ended_at=float(number)) for number, turn in enumerate(turns, 1)]
    choice = replace(turns[2], turn_id="t-2/1", output_ids=[6])
    site = await Site(new_store).start("same")
    site.save("t")
    site.book.add(turns[0])
    site.add(turns[1])
    before = await site.store.piece_sizes()
    site.book.add(turns[2])
    site.book.add(choice)
    await site.store.close()

    site = await Site(new_store).start("same")
    assert list(await site.book.turns("t")) == ["t-0", "t-1"]
    assert await site.store.piece_sizes() == before
    assert site.book.view()["stored_bytes"] == before["t"]
    site.add(replace(turns[2], turn_id="t-3", ended_at=4.0))
    assert list(await site.book.turns("t")) == ["t-0", "t-1", "t-3"]
    await site.store.close()


@pytest.mark.parametrize("restarted", [False, True])
async def test_the_store_drops_whole_trajectories_beyond_its_limit(
    new_store: Callable[..., Store], restarted: bool
) -> None:
    """The one that was added to longest ago first; a restart counts what is there."""
    if restarted and new_store("").health().detail.startswith("in memory"):
        pytest.skip("it does not outlive the process")
    plan = [Step(None, list(range(300)), list(range(200)), None, 0)]
    site = await Site(new_store, replace(LIMITS, stored_bytes=2**30 if restarted else 7_000)).start("same")
    for name in "abcd":
        site.clock.ahead_s += 1
        site.save(name)
        site.add(*conversation(plan, name))
        if name == "b":
            site.save("a")
            site.add(replace(conversation(plan, "a")[0], turn_id="more", prompt_ids=[1], output_ids=[2], versions=()))
    if restarted:
        await site.store.close()
        site = Site(new_store, replace(LIMITS, stored_bytes=7_000))
        site.clock.ahead_s = 10
        await site.start("same")
    assert [name for name in "abcd" if await site.book.turns(name)] == ["a", "c", "d"]
    assert sum((await site.store.piece_sizes()).values()) <= 7_000
    assert site.book.num_dropped == 1
    site.add(*conversation(plan, "b"))
    assert [name for name in "abcd" if await site.book.turns(name)] == ["b", "c", "d"]
    site.add(*conversation([Step(None, list(range(3_000)), [1], None, 0)], "huge"))
    assert [name for name in ("a", "b", "c", "d", "huge") if await site.book.turns(name)] == []
    assert await site.store.piece_sizes() == {}
    await site.store.close()


async def test_tokens_expire_by_the_age_of_the_last_turn(new_store: Callable[..., Store]) -> None:
    """Expired tokens leave the store, too."""
    site = await Site(new_store).start("")
    site.save("old", "young")
    old = conversation([Step(None, [1], [2], None, 0), Step(0, [3], [4], None, 0)], "old")
    site.add(old[0], *conversation([Step(None, [1], [2], None, 0)], "young"))
    site.clock.ahead_s = 3_000
    site.add(old[1])
    site.clock.ahead_s = 3_700
    assert (len(await site.book.turns("old")), len(await site.book.turns("young"))) == (2, 0)
    site.clock.ahead_s = 6_700
    assert await site.book.turns("old") == {}
    assert await site.store.piece_sizes() == {}
    await site.store.close()


async def test_a_turn_whose_ancestor_is_lost_is_lost_too(new_store: Callable[..., Store]) -> None:
    """Its prompt could not be rebuilt; turns of other branches stay."""
    site = await Site(new_store, replace(LIMITS, memory_bytes=3_500)).start("")
    site.save("t", "u")
    chosen = [
        Step(None, [1], [2], None, 0),
        Step(0, [3], [4], None, 0),
        Step(1, [5], [6], None, 0),
        Step(None, [9], [9], None, 0),
    ]
    turns = conversation(chosen)
    site.add(*turns[:3])
    site.add(*conversation(chosen[:1], "u"))
    site.store.drop_pieces("t", "tokens/t-1")
    await site.book.ready("t")
    site.add(turns[3])
    assert list(await site.book.turns("t")) == ["t-0", "t-3"]
    assert [each is not None for each in await site.kept("t", turns)] == [True, False, False, True]
    await site.store.close()


async def test_a_redis_that_comes_back_empty_gets_what_is_in_memory(redis_server: RedisServer) -> None:
    """Another book on that Redis finds all of it."""
    settings = StoreSettings(check_every_s=0.05, backoff_min_s=0.01, **PATIENT)
    site = await Site(lambda _: open_store(redis_server.url(3), settings)).start("")
    site.save("t")
    turns = conversation([Step(None, [1, 2], [3], None, 0), Step(0, [4], [5], None, 0)])
    site.add(*turns)

    def rewrite() -> None:
        site.ledger.rewrite(lambda _: None)
        site.book.rewrite()

    site.store.on_loss(rewrite)
    assert await site.store.settle(60)
    redis_server.restart(empty=True)
    await eventually(lambda: site.store.health().num_losses > 0, 60)
    assert await site.store.settle(60)
    await site.store.close()
    site = await Site(lambda _: open_store(redis_server.url(3), settings)).start("")
    assert _same(await site.kept("t", turns), turns)
    await site.store.close()


async def test_parts_of_an_unfinished_turn_are_kept_until_dropped(new_store: Callable[..., Store]) -> None:
    """In order, up to the first missing part; each turn's of each request separately; all are gone with their
    trajectory. Parts that an earlier version wrote do not name their turn, and are ignored."""
    store = new_store("same")
    await store.open()
    partials = Partials(store)
    store.put_trajectory("t", {})
    for number in (0, 1, 2, 11, 10, 9, 8, 7, 6, 5, 4):
        partials.put("t", "request", "turn", number, b"%d" % number)
        partials.put("t", "request", "turn-2", number + 1, b"without a first part")
        partials.put("t", "request", "turn-3", number, b"sibling")
        partials.put("t", "request-2", "turn", number, b"other")
        store.put_piece("t", f"partial/request/{number}", b"of an earlier version")
    sibling = {"turn-3": [b"sibling"] * 3}
    assert await partials.get("t", "request") == {"turn": [b"0", b"1", b"2"]} | sibling
    partials.put("t", "request", "turn", 3, b"3")
    if not store.health().detail.startswith("in memory"):
        await store.close()
        store = new_store("same")
        await store.open()
        partials = Partials(store)
    assert await partials.get("t", "request") == {"turn": [b"%d" % number for number in range(12)]} | sibling
    partials.drop("t", "request", "turn")
    assert await partials.get("t", "request") == sibling
    partials.drop("t", "request", None)
    assert (await partials.get("t", "request"), len(await partials.get("t", "request-2"))) == ({}, 1)
    store.forget_trajectory("t")
    assert await store.piece_sizes() == {}
    await store.close()


@pytest.mark.parametrize(
    ("prefer", "kept"),
    [
        ((), True),
        ((b"tokens=none",), False),
        ((b"respond-async, Tokens = none; x=1",), False),
        ((b"wait=5", b'tokens="none"'), False),
        ((b"tokens=all",), True),
        ((b"mytokens=none", b"\xff"), True),
    ],
)
async def test_tokens_are_kept_unless_declined(prefer: tuple[bytes, ...], kept: bool) -> None:
    """By the request's header, the trajectory's declaration, or the settings."""
    headers: list[Any] = [(b"x-other", b"tokens=none"), *((b"prefer", value) for value in prefer)]
    assert wants_tokens(headers) is kept
    site = await Site(lambda _: open_store("memory:")).start("")
    site.save("t", "declared")
    site.ledger.declare("declared", {"tokens": "none"})
    assert site.book.wants("t", headers) is kept
    assert site.book.wants("unknown", headers) is kept
    assert not site.book.wants("declared", headers)
    keeps_nothing = await Site(lambda _: open_store("memory:"), replace(LIMITS, keep=False)).start("")
    assert not keeps_nothing.book.wants("t", [])


def _same(found: list[TurnTokens | None], expected: list[TurnTokens]) -> bool:
    assert [each and comparable(each) for each in found] == [comparable(each) for each in expected]
    return True


def test_a_turn_stored_as_integers_can_be_read() -> None:
    """A store outlives the version that wrote it."""
    logprobs = array("f", [-0.5, -0.25])
    fields = ("u2", "u1", "h", "stop", 5.0, [("7", 0, 2)], 3, 2, 2, True)
    head = orjson.dumps(fields)
    head += b" " * (-len(head) % 4)
    data = len(head).to_bytes(4) + head + array("I", [4, 70_000, 6, 7]).tobytes() + logprobs.tobytes()
    [turn] = decoded([data])
    assert (turn.num_tokens, list(turn.new_ids), list(turn.output_ids)) == (7, [4, 70_000], [6, 7])
    assert turn.logprobs is not None and turn.logprobs.tolist() == [-0.5, -0.25]
    assert (turn.turn_id, turn.parent, turn.versions) == ("u2", "u1", (VersionSpan("7", 0, 2),))
    assert decoded([piece(turn, None)]) == [turn]


def test_a_turn_stored_by_a_newer_version_can_be_read() -> None:
    """Whose heads and versions have more fields, as after a rollback. The field was taken for a base that is missing,
    so the turn was dropped."""
    made = replace(tokens_of("u", [1, 2, 3], [4]), versions=(VersionSpan("7", 0, 1),))
    whole = kept(made, None, TokenIds.of([1, 2, 3]), TokenIds.of([]))
    based = kept(tokens_of("v", [1, 2, 3, 5], [6]), None, TokenIds.of([1, 2, 3, 5]), TokenIds.of([]))
    stored = [newer(piece(whole, None), None), newer(piece(based, whole))]
    assert decoded(stored) == [whole, based]


def newer(data: bytes, *more: Any) -> bytes:
    """A piece with further fields."""
    end = 4 + int.from_bytes(data[:4])
    head = orjson.loads(data[4:end])
    head[5] = [[*span, "of a newer version"] for span in head[5]]
    written = orjson.dumps([*head, *more, "of a newer version"])
    return len(written).to_bytes(4) + written + data[end:]


async def test_a_repeated_prompt_is_stored_once(new_store: Callable[..., Store]) -> None:
    """For all choices of a turn, and for a question that is asked again; read from the store, each turn has its whole
    prompt. Memory, too, holds one copy of an identical prompt."""
    prompt = list(range(100_000, 110_000))
    site = await Site(new_store).start("again")
    site.save("a")
    first = tokens_of("u", prompt, [1, 2])
    for turn in (first, tokens_of("u/1", prompt, [3]), tokens_of("v", [*prompt, 7], [4, 5])):
        site.book.add(turn)
    site.book.add(tokens_of("w", prompt[1:], [6]))  # another prompt is stored whole
    num_bytes = site.book.view()["stored_bytes"]
    assert 2 * 7 * len(prompt) - 10 < num_bytes < 2 * 7 * len(prompt) + 2_000
    num_bytes = site.book.view()["memory_bytes"]
    assert 3 * 7 * len(prompt) - 10 < num_bytes < 3 * 7 * len(prompt) + 4 * TURN_BYTES + 2_000
    before = await site.book.turns("a")
    assert [(list(turn.new_ids), list(turn.output_ids)) for turn in before.values()] == [
        (prompt, [1, 2]),
        (prompt, [3]),
        ([*prompt, 7], [4, 5]),
        (prompt[1:], [6]),
    ]
    assert {turn.turn_id: turn for turn in decoded(await pieces(site))} == before


async def test_log_probabilities_count_as_memory(new_store: Callable[..., Store]) -> None:
    """Four bytes each, whether they were just added or read from the store; without them, memory would outgrow its
    limit by a third."""
    site = await Site(new_store, replace(LIMITS, memory_bytes=0)).start("logprobs")
    site.save("a", "b")
    for turn in (tokens_of("u", [1], [7] * 1_000), replace(tokens_of("v", [2], [7] * 1_000), trajectory_id="b")):
        site.add(turn)
        num_bytes = site.book.view()["memory_bytes"]
        assert TURN_BYTES + 2 * 1_000 + 4 * 1_000 <= num_bytes < TURN_BYTES + 2 * 1_000 + 4 * 1_000 + 100
    await site.book.ready("a")
    assert site.book.view()["memory_bytes"] == num_bytes
    await site.store.close()


async def test_a_turn_that_does_not_begin_with_its_parent_stands_alone(new_store: Callable[..., Store]) -> None:
    """With its whole prompt: otherwise a trainer would get tokens that no engine read."""
    site = await Site(new_store).start("")
    site.save("a")
    site.add(tokens_of("u", [1, 2], [3]), replace(tokens_of("v", [1, 9, 3, 4], [5]), parent="u"))
    turn = (await site.book.turns("a"))["v"]
    assert (turn.parent, turn.num_before, list(turn.new_ids)) == (None, 0, [1, 9, 3, 4])
    await site.store.close()


async def test_a_stored_turn_whose_base_is_lost_is_dropped(
    new_store: Callable[..., Store],
) -> None:
    """Together with its base, it can be read."""
    site = await Site(new_store).start("lost")
    site.save("a")
    for turn_id in ("u", "v"):
        site.book.add(tokens_of(turn_id, list(range(50)), [1]))
    based, whole = sorted(await pieces(site), key=len)
    assert (decoded([based]), [turn.turn_id for turn in decoded([based, whole])]) == ([], ["u", "v"])


def tokens_of(turn_id: str, prompt: list[int], output: list[int]) -> TurnTokens:
    return TurnTokens("a", turn_id, prompt, output, [-0.5] * len(output), (), "stop", None, "h", 1_000.0)


async def pieces(site: Site) -> list[bytes]:
    assert await site.store.settle(60.0)
    return list((await site.store.get_pieces("a", PREFIX)).values())
