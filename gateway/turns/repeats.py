"""Repeated requests: one whose turn still runs joins it, one whose turn has ended gets the same answer.

A client repeats exactly the same bytes. While a turn runs, a request that also names its trajectory is a repeat;
siblings that share only a `user` ask the same question and want answers of their own. Once a turn has ended, the
request must say that it is a retry: an agent may ask the same question twice, for another answer.
"""

from collections import OrderedDict
from collections.abc import Iterable

import orjson
from xxhash import xxh3_128

from gateway.http.outlet import Outlet, kept_outlet
from gateway.turns.ask import Ask
from gateway.turns.turn import Turn

_RETRY_HEADERS = frozenset({b"x-stainless-retry-count", b"idempotency-key"})


def is_retry(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the client says that this is a retry."""
    said = [value for name, value in headers if name in _RETRY_HEADERS]
    return any(value not in (b"", b"0") for value in said) if said else False


class Repeats:
    """The turns that run, and the last answer of each trajectory.

    Args:
        max_answer_bytes: for all answers kept; the oldest go first.
        max_stored_bytes: for an answer that is also stored, for a client whose gateway was killed before it got it.
    """

    def __init__(self, max_answer_bytes: int, max_stored_bytes: int) -> None:
        self._running: dict[str, list[Turn]] = {}
        self._answered: OrderedDict[str, tuple[str, Outlet, int]] = OrderedDict()
        self._room = max_answer_bytes
        self._max_stored_bytes = max_stored_bytes

    def began(self, turn: Turn) -> None:
        """A turn that may be joined."""
        self._running.setdefault(turn.ask.trajectory_id, []).append(turn)

    def ended(self, turn: Turn) -> None:
        """It cannot be joined any more."""
        running = self._running[turn.ask.trajectory_id]
        running.remove(turn)
        if not running:
            del self._running[turn.ask.trajectory_id]

    def answered(self, turn: Turn) -> None:
        """Its whole answer is out: keep it in case it did not arrive."""
        outlet = turn.outlet
        if outlet.kept is not None:
            outlet.seal()
            self._keep(turn.ask.trajectory_id, digest_of(turn), outlet)
        else:
            self.forget(turn.ask.trajectory_id)

    def to_store(self, turn: Turn, end: bytes) -> bytes | None:
        """What to store of an answer of which only this end is still to be sent: a line of JSON that identifies it,
        then its bytes. None if it is too long.
        """
        ask, pieces = turn.ask, turn.outlet.kept
        if pieces is None or turn.outlet.num_bytes + len(end) > self._max_stored_bytes:
            return None
        whose = orjson.dumps([digest_of(turn), ask.api, turn.turn_id, ask.wants_stream])
        return b"".join([whose, b"\n", *pieces, end])

    def restore(self, trajectory_id: str, stored: bytes) -> None:
        """Take up what `to_store` gave an earlier process."""
        whose, _, body = stored.partition(b"\n")
        digest, api, request_id, is_stream = orjson.loads(whose)
        self._keep(trajectory_id, digest, kept_outlet(api, request_id, trajectory_id, body, is_stream))

    def forget(self, trajectory_id: str) -> None:
        """Drop a trajectory's last answer."""
        _, _, size = self._answered.pop(trajectory_id, (None, None, 0))
        self._room += size

    def running(self, ask: Ask, retries: bool) -> Turn | None:
        """The running turn that this request repeats."""
        for turn in self._running.get(ask.trajectory_id, ()):
            is_open = turn.num_clients and turn.outlet.kept is not None
            if is_open and _is_same(turn.ask, ask) and (ask.may_be_joined or retries):
                return turn
        return None

    def answer(self, ask: Ask, retries: bool) -> Outlet | None:
        """The answer that this request got before."""
        if not retries or ask.trajectory_id not in self._answered:
            return None
        digest, outlet, _ = self._answered[ask.trajectory_id]
        return outlet if digest == _digest(ask) else None

    def _keep(self, trajectory_id: str, digest: str, outlet: Outlet) -> None:
        if trajectory_id in self._answered:
            self.forget(trajectory_id)
        self._answered[trajectory_id] = (digest, outlet, outlet.num_bytes)
        self._room -= outlet.num_bytes
        while self._room < 0:
            self.forget(next(iter(self._answered)))


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
