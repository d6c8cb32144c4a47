"""Repeated requests: one whose turn still runs joins it, one whose turn has ended gets the same answer.

A client repeats exactly the same bytes. While a turn runs, a request that also names its trajectory is a repeat;
siblings that share only a `user` ask the same question and want answers of their own. Once a turn has ended, the
request must say that it is a retry: an agent may ask the same question twice, for another answer. It says so by the
Idempotency-Key of the turn that it repeats, or, unless both have a key, by a count of retries. A key that no turn has
says nothing, because clients give each request one.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping

import orjson
from xxhash import xxh3_128

from gateway.http.errors import Api
from gateway.http.outlet import Outlet, sent_outlet
from gateway.turns.ask import Ask
from gateway.turns.turn import Turn

_COUNT, _KEY = b"x-stainless-retry-count", b"idempotency-key"
# Between two looks at how much running turns keep, 6,400 streams of 50 tokens/s bring 80 MB.
_LOOK_S = 1.0


def retry_of(headers: Mapping[bytes, bytes]) -> tuple[bool, str]:
    """Whether the client counts this as a retry; and its Idempotency-Key, "" without one."""
    count, key = headers.get(_COUNT), headers.get(_KEY)
    return count is not None and count not in (b"", b"0"), "" if key is None else key.decode("latin-1")


class Repeats:
    """The turns that run, and the last answer of each trajectory.

    An answer is kept in the form in which it is stored: one object, of which there may be tens of thousands, instead of
    a dozen that the garbage collector would scan.

    Args:
        max_answer_bytes: for all answers kept; the oldest go first.
        max_stored_bytes: for an answer that is also stored, for a client whose gateway was killed before it got it.
        max_running_bytes: for what running turns keep of their answers, until one look later.
    """

    def __init__(self, max_answer_bytes: int, max_stored_bytes: int, max_running_bytes: int) -> None:
        self._running: dict[str, list[Turn]] = {}
        # Each with the engine that gave it and the milliseconds that its turn waited for it.
        self._answered: OrderedDict[str, tuple[bytes, str, int]] = OrderedDict()
        self._room = max_answer_bytes
        self._max_stored_bytes = max_stored_bytes
        self._max_running_bytes = max_running_bytes

    def began(self, turn: Turn) -> None:
        """A turn that may be joined."""
        self._running.setdefault(turn.ask.trajectory_id, []).append(turn)

    def ended(self, turn: Turn) -> None:
        """It cannot be joined any more."""
        running = self._running[turn.ask.trajectory_id]
        running.remove(turn)
        if not running:
            del self._running[turn.ask.trajectory_id]

    def has_beside(self, ask: Ask) -> bool:
        """Whether another request without an id has a running turn of this one's trajectory."""
        running = self._running.get(ask.trajectory_id, ())
        return any(turn.ask is not ask and turn.ask.history is not None for turn in running)

    async def keep_in_bounds(self) -> None:
        """Bound what running turns keep, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.bound()

    def bound(self) -> None:
        """Free the longest of what running turns keep, as far as nobody has joined them, until the rest is in bounds.

        Cost: 1.5 ms for 6,400 turns.
        """
        keeping = [turn for turns in self._running.values() for turn in turns if turn.outlet.kept is not None]
        excess = sum([turn.outlet.num_bytes for turn in keeping]) - self._max_running_bytes
        if excess <= 0:
            return
        for turn in sorted(keeping, key=lambda turn: turn.outlet.num_bytes, reverse=True):
            if turn.num_clients == 1 and turn.outlet.keep_no_longer():
                excess -= turn.outlet.num_bytes
            if excess <= 0:
                return

    def answered(self, turn: Turn) -> None:
        """Its whole answer is out: keep it in case it did not arrive."""
        outlet = turn.outlet
        if outlet.kept is not None:
            packed = turn.packed_answer or _packed(turn, outlet.kept)
            self._keep(turn.ask.trajectory_id, packed, outlet.engine_id, outlet.queued_ms)
        else:
            self.forget(turn.ask.trajectory_id)

    def to_store(self, turn: Turn, end: bytes) -> bytes | None:
        """What to store of an answer of which only this end is still to be sent; None if it is too long."""
        pieces = turn.outlet.kept
        if pieces is None or turn.outlet.num_bytes + len(end) > self._max_stored_bytes:
            return None
        turn.packed_answer = _packed(turn, [*pieces, end])
        return turn.packed_answer

    def stored(self, trajectory_id: str) -> bytes | None:
        """What `to_store` gave last for a trajectory, as far as it is still here; an answer may not be out yet."""
        for turn in reversed(self._running.get(trajectory_id, ())):
            if turn.packed_answer is not None:
                return turn.packed_answer
        kept = self._answered.get(trajectory_id)
        if kept is None or len(kept[0]) - kept[0].find(b"\n") - 1 > self._max_stored_bytes:
            return None
        return kept[0]

    def restore(self, trajectory_id: str, stored: bytes) -> None:
        """Take up what `to_store` gave an earlier process."""
        self._keep(trajectory_id, stored, "", 0)

    def outdated_by(self, turn: Turn) -> bool:
        """Drop its trajectory's last answer if this turn asks the same question for another one: a retry from now on
        means this turn, unless keys tell the two apart. Returns: whether there was such an answer.
        """
        kept = self._answered.get(turn.ask.trajectory_id)
        # Asked of every turn, so nothing is parsed for it: the digest comes first in what is kept.
        if kept is None or not kept[0].startswith(b'["' + digest_of(turn).encode()):
            return False
        key = _whose(kept[0])[-1]
        if key and turn.ask.retry_key:
            return False
        self.forget(turn.ask.trajectory_id)
        return True

    def forget(self, trajectory_id: str) -> None:
        """Drop a trajectory's last answer."""
        kept = self._answered.pop(trajectory_id, None)
        if kept is not None:
            self._room += len(kept[0])

    def running(self, ask: Ask) -> Turn | None:
        """The running turn that this request repeats."""
        for turn in self._running.get(ask.trajectory_id, ()):
            is_open = turn.num_clients and turn.outlet.kept is not None
            if is_open and _is_same(turn.ask, ask) and (ask.may_be_joined or _retries(ask, turn.ask.retry_key)):
                return turn
        return None

    def answer(self, ask: Ask) -> Outlet | None:
        """The answer that this request got before."""
        if not (ask.is_retry or ask.retry_key) or ask.trajectory_id not in self._answered:
            return None
        packed, engine_id, queued_ms = self._answered[ask.trajectory_id]
        digest, api, request_id, is_stream, key = _whose(packed)
        if digest != _digest(ask) or not _retries(ask, key):
            return None
        body = packed[packed.find(b"\n") + 1 :]
        return sent_outlet(api, request_id, ask.trajectory_id, engine_id, queued_ms, body, is_stream)

    def _keep(self, trajectory_id: str, packed: bytes, engine_id: str, queued_ms: int) -> None:
        if trajectory_id in self._answered:
            self.forget(trajectory_id)
        self._answered[trajectory_id] = (packed, engine_id, queued_ms)
        self._room -= len(packed)
        while self._room < 0:
            self.forget(next(iter(self._answered)))


def _packed(turn: Turn, pieces: list[bytes]) -> bytes:
    """An answer: a line of JSON that identifies it, then its bytes."""
    ask = turn.ask
    whose = [digest_of(turn), ask.api, turn.turn_id, ask.wants_stream]
    if ask.retry_key:
        whose.append(ask.retry_key)
    return b"".join([orjson.dumps(whose), b"\n", *pieces])


def _whose(packed: bytes) -> tuple[str, Api, str, bool, str]:
    """What identifies an answer: its request's digest, API, id, whether it wants a stream, and its key."""
    digest, api, request_id, is_stream, *key = orjson.loads(packed[: packed.find(b"\n")])
    return digest, api, request_id, is_stream, key[0] if key else ""


def _retries(ask: Ask, key: str) -> bool:
    """Whether the client says that this retries an equal request with this key; "" if that had none."""
    return ask.retry_key == key if ask.retry_key and key else ask.is_retry


def _is_same(one: Ask, other: Ask) -> bool:
    return one.body == other.body and one.path == other.path


def digest_of(turn: Turn) -> str:
    """The digest of a turn's whole request."""
    turn.digest = turn.digest or _digest(turn.ask)
    return turn.digest


def _digest(ask: Ask) -> str:
    # Digests are compared only within a trajectory, so a client that makes two requests collide deceives only itself.
    # XXH3 takes 3 us for 100 KB, SHA-256 87.
    digest = xxh3_128(ask.path.encode() + b" ")
    digest.update(ask.body)
    return digest.hexdigest()
