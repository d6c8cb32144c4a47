"""Puts that wait for Redis: coalescing does not change what the server ends up with, and the queue is bounded."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from store import StoreSettings
from store.pending import ENTRY_BYTES, Operation, Pending

MAX_TURNS = 3
UNBOUNDED = StoreSettings(max_turns_kept=MAX_TURNS, batch_bytes=10**9)

Put = tuple[str, str, int]

ids = st.sampled_from("ab")
sizes = st.sampled_from([0, 1, 2, 3, 300, 600, 900])
kinds = st.sampled_from(
    ["record", "answer", "turn", "turn", "turn", "forget", "piece", "piece", "drop", "drop all", "state"]
)
puts = st.tuples(kinds, ids, sizes)


def operations(one: Put, number: int) -> list[Operation]:
    """The operations that a put stands for, with a value of at least `size` bytes that no other put has."""
    kind, id, size = one
    value = b"%d" % number + b"x" * size
    match kind:
        case "answer":
            return [Operation("record", id, value), Operation("answer", id, value[::-1])]
        case "piece":
            return [Operation("piece", id, value, f"{size % 2}/{size % 3}")]
        case "drop":
            return [Operation("drop", id, b"", f"{size % 2}/")]
        case "drop all":
            return [Operation("drop", id, b"")]
        case "forget":
            return [Operation("forget", id, b"")]
        case _:
            return [Operation(kind, id, value)]  # type: ignore[arg-type]


def pending_of(some: list[Put], start: int) -> Pending:
    """A queue of these puts, numbered from `start`."""
    pending = Pending(UNBOUNDED)
    for number, one in enumerate(some):
        put(pending, one, start + number)
    return pending


def put(pending: Pending, one: Put, number: int) -> None:
    """The same put through the queue's own methods."""
    name, id, value, part = operations(one, number)[-1]
    match name:
        case "record":
            pending.put_trajectory(id, value)
        case "answer":
            pending.put_trajectory(id, value[::-1], value)
        case "turn":
            pending.append_turn(id, value)
        case "forget":
            pending.forget_trajectory(id)
        case "piece":
            pending.put_piece(id, part, value)
        case "drop":
            pending.drop_pieces(id, part)
        case "state":
            pending.put_state(id, value)


@dataclass
class Server:
    """A server that applies what it is sent, one operation after the other."""

    records: dict[str, bytes] = field(default_factory=dict)
    answers: dict[str, bytes] = field(default_factory=dict)
    turns: dict[str, deque[bytes]] = field(default_factory=dict)
    pieces: dict[str, dict[str, bytes]] = field(default_factory=dict)
    states: dict[str, bytes] = field(default_factory=dict)
    rewritten: set[str] = field(default_factory=set)

    def take(self, batches: Iterable[list[Operation]]) -> "Server":
        for name, id, value, part in (operation for batch in batches for operation in batch):
            match name:
                case "record":
                    self.records[id] = value
                case "answer":
                    self.answers[id] = value
                case "turn":
                    self.turns.setdefault(id, deque(maxlen=MAX_TURNS)).append(value)
                case "piece":
                    self.pieces.setdefault(id, {}).setdefault(part, value)
                case "drop":
                    left = {
                        other: data for other, data in self.pieces.pop(id, {}).items() if not other.startswith(part)
                    }
                    self.pieces |= {id: left} if left else {}
                case "state":
                    self.states[id] = value
                case "forget":
                    for each in (self.records, self.answers, self.turns, self.pieces):
                        each.pop(id, None)
                case "rewrite":
                    self.rewritten.clear()
                case "replace":
                    for each in (self.records, self.answers, self.turns):
                        each.pop(id, None)
                    self.rewritten.add(id)
                case "sweep":
                    for each in (self.records, self.answers, self.turns):
                        for other in each.keys() - self.rewritten:
                            del each[other]
                    self.rewritten.clear()
                    self.pieces = {id: pieces for id, pieces in self.pieces.items() if id in self.records}
        return self


@settings(max_examples=300)
@given(steps=st.lists(st.one_of(puts, puts, puts, st.just("take")), min_size=2, max_size=25))
def test_coalesced_puts_equal_puts_applied_one_by_one(steps: list[Put | str]) -> None:
    """This holds however the puts fall into flushes."""
    pending = Pending(UNBOUNDED)
    coalesced, plain = Server(), Server()
    touched: set[object] = set()
    for number, step in enumerate([*steps, "take"]):
        if isinstance(step, str):
            coalesced.take(pending.take())
            assert coalesced == plain and len(pending) == 0 and pending.since == 0.0
            touched = set()
        else:
            put(pending, step, number)
            plain.take([operations(step, number)])
            assert pending.since > 0.0
            touched |= {step[:2] if step[0] == "state" else step[1]}
            assert len(pending) == len(touched)


def pending_bytes(puts_of: dict[str, list[tuple[Put, int]]]) -> dict[str, int]:
    """Bytes pending for each trajectory, computed from what would be sent of it."""
    found = {}
    for id, some in puts_of.items():
        alone = Pending(UNBOUNDED)
        for one, number in some:
            put(alone, one, number)
        sent = [operation for batch in alone.take() for operation in batch]
        found[id] = ENTRY_BYTES + sum(len(operation.value) + len(operation.part) for operation in sent)
    return found


@settings(max_examples=300)
@given(
    steps=st.lists(puts.filter(lambda one: one[0] != "state"), min_size=4, max_size=25),
    max_bytes=st.integers(600, 5_000),
    max_trajectories=st.integers(1, 2),
)
def test_pending_puts_stay_within_their_bounds(steps: list[Put], max_bytes: int, max_trajectories: int) -> None:
    """The trajectory that has waited longest is dropped first, whole, and counted. Nothing is dropped that would have
    fitted."""
    bounds = {"max_pending_bytes": max_bytes, "max_pending_trajectories": max_trajectories}
    pending = Pending(replace(UNBOUNDED, **bounds))
    puts_of: dict[str, list[tuple[Put, int]]] = {}
    num_dropped = 0
    for number, step in enumerate(steps):
        put(pending, step, number)
        puts_of.setdefault(step[1], []).append((step, number))
        while len(puts_of) > max_trajectories or sum(pending_bytes(puts_of).values()) > max_bytes:
            del puts_of[next(iter(puts_of))]
            num_dropped += 1
        assert (len(pending), pending.num_dropped, pending.num_puts) == (len(puts_of), num_dropped, number + 1)
    expected = Pending(UNBOUNDED)
    for one, number in sorted((each for some in puts_of.values() for each in some), key=lambda each: each[1]):
        put(expected, one, number)
    assert Server().take(pending.take()) == Server().take(expected.take())
    for number, step in enumerate(steps):  # after `take`, the bounds start from zero again
        put(pending, step, number)
    assert pending.num_dropped == 2 * num_dropped


@given(steps=st.lists(puts, max_size=25), batch_bytes=st.integers(1, 3_000))
def test_a_batch_ends_with_the_operation_that_fills_it(steps: list[Put], batch_bytes: int) -> None:
    """Only the last batch may be smaller than `batch_bytes`. Together the batches hold every operation, in order."""
    pending, whole = Pending(replace(UNBOUNDED, batch_bytes=batch_bytes)), Pending(UNBOUNDED)
    for number, step in enumerate(steps):
        put(pending, step, number)
        put(whole, step, number)
    batches = list(pending.take())
    assert [operation for batch in batches for operation in batch] == [one for batch in whole.take() for one in batch]
    filled = [[len(one.id) + len(one.value) for one in batch] for batch in batches]
    assert all(sum(sizes) >= batch_bytes for sizes in filled[:-1])
    assert all(sum(sizes[:-1]) < batch_bytes for sizes in filled)


@given(steps=st.lists(puts, max_size=25))
def test_no_record_comes_before_pieces_of_its_trajectory(steps: list[Put]) -> None:
    """A gateway may be killed between two batches."""
    pending = Pending(UNBOUNDED)
    for number, step in enumerate(steps):
        put(pending, step, number)
    recorded: set[str] = set()
    for operation in (each for batch in pending.take() for each in batch):
        if operation.name in ("record", "answer", "turn"):
            recorded.add(operation.id)
        assert operation.name != "piece" or operation.id not in recorded


@given(before=st.lists(puts, max_size=15), after=st.lists(puts, max_size=15), batch_bytes=st.integers(1, 2_000))
def test_a_rewrite_that_is_cut_off_loses_no_record(before: list[Put], after: list[Put], batch_bytes: int) -> None:
    """A gateway may be killed between two batches. Of 2,000 trajectories, 209 were left: the record was emptied. Each
    has the history and the answer that it had, or all of the new ones."""
    first, pending = Pending(UNBOUNDED), Pending(replace(UNBOUNDED, batch_bytes=batch_bytes))
    for number, one in enumerate(before):
        put(first, one, number)
    pending.replace_all(lambda: [put(pending, one, 100 + number) for number, one in enumerate(after)].clear())
    server, complete = Server().take(first.take()), Server()
    for number, one in enumerate(after):
        put(first, one, 100 + number)
    complete.take(first.take())
    known = complete.records.keys() & server.records.keys() - {id for kind, id, _ in after if kind == "forget"}

    def kept_of(one: Server, id: str) -> tuple[bytes | None, list[bytes], bytes | None]:
        return one.records.get(id), list(one.turns.get(id, ())), one.answers.get(id)

    old = {id: kept_of(server, id) for id in known}
    rewritten = Server().take(list(pending_of(after, 100).take()))
    for batch in pending.take():
        server.take([batch])
        assert known <= server.records.keys()
        assert all(kept_of(server, id) in (old[id], kept_of(rewritten, id)) for id in known)
    assert server.records == complete.records


@given(before=st.lists(puts, max_size=15), waits=st.lists(puts, max_size=10), after=st.lists(puts, max_size=15))
@example(before=[("piece", "a", 0)], waits=[("drop", "a", 0)], after=[("record", "a", 0)])
@example(before=[("piece", "a", 0)], waits=[("forget", "a", 0)], after=[("record", "a", 0)])
def test_a_rewrite_leaves_only_its_own_puts_named_blobs_and_pieces_in_use(
    before: list[Put], waits: list[Put], after: list[Put]
) -> None:
    """This holds whatever the server had and whatever waited. No bounds apply to a rewrite, because none of it may be
    dropped. Pieces that were to be dropped are: those of a turn that had ended, or of a trajectory that was forgotten,
    became those of the next trajectory with its id."""
    first, rewritten = Pending(UNBOUNDED), Pending(UNBOUNDED)
    bounds = replace(UNBOUNDED, max_pending_bytes=600, max_pending_trajectories=1)
    pending, waiting = Pending(bounds), Pending(bounds)

    def put_all(some: list[Put], target: Pending, start: int) -> Callable[[], None]:
        return lambda: [put(target, one, start + number) for number, one in enumerate(some)].clear()

    put_all(before, first, 0)()
    put_all(waits, pending, 100)()
    put_all(waits, waiting, 100)()
    num_dropped, num_puts = pending.num_dropped, pending.num_puts
    pending.replace_all(put_all(after, pending, 200))
    put_all(after, rewritten, 200)()
    assert pending.num_dropped == num_dropped and pending.num_puts > num_puts
    server = Server().take(first.take())
    pieces, states = dict(server.pieces), dict(server.states)
    waited_states = {id: b"%d" % (100 + n) + b"x" * size for n, (kind, id, size) in enumerate(waits) if kind == "state"}
    server.take(pending.take())
    dropped = [
        Operation("drop", one.id, b"", one.part)
        for batch in waiting.take()
        for one in batch
        if one.name in ("drop", "forget") and any(kind != "state" and id == one.id for kind, id, _ in after)
    ]
    alone = Server(pieces=pieces, states=states | waited_states).take([dropped, *rewritten.take()])
    alone.pieces = {id: some for id, some in alone.pieces.items() if id in alone.records}
    assert server == alone
    put_all([("record", id, 900) for id in "ab"], pending, 300)()
    assert pending.num_dropped > num_dropped, "the bounds hold again"
