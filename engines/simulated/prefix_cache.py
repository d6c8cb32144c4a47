"""The prefix cache of a simulated engine: which tokens are present, pinned, or evictable.

Contents are abstract. A sequence of tokens is cut into *pieces*, and a piece's key names the whole prefix that ends
with it, so equal keys mean equal contents up to there. An HTTP server cuts blocks of 16 tokens and keys them by a hash
chain; a simulator whose tokens have no contents uses one piece per turn, keyed by trajectory and turn.

Rules: pinned pieces are never evicted. Among the others the least recently used goes first, and the end of a sequence
before its beginning, so a piece is never present without the ones before it.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

Piece = tuple[Hashable, int]
"""A key that names the prefix ending here, and the number of tokens that this piece adds to it."""


def front(pieces: Sequence[Piece], num_tokens: int) -> list[Piece]:
    """The pieces of the first `num_tokens` tokens of these; the last one may be a part."""
    found: list[Piece] = []
    for key, size in pieces:
        if num_tokens <= 0:
            break
        found.append((key, min(size, num_tokens)))
        num_tokens -= size
    return found


class PrefixCache:
    """Counts tokens by piece. The owner keeps `num_tokens` within its capacity by calling `evict`.

    Args:
        host_capacity_tokens: a second tier that takes evicted pieces, always whole; the least recently evicted goes
            first. A piece that is used again stays there, too.
    """

    def __init__(self, host_capacity_tokens: int = 0) -> None:
        self.num_tokens = 0
        self.num_pinned_tokens = 0
        self._present: dict[Hashable, int] = {}
        self._pins: dict[Hashable, int] = {}
        self._idle: OrderedDict[Hashable, None] = OrderedDict()
        self._host_capacity_tokens = host_capacity_tokens
        self._host: OrderedDict[Hashable, int] = OrderedDict()
        self._num_host_tokens = 0

    def probe(self, pieces: Sequence[Piece]) -> tuple[int, int]:
        """What pinning these pieces would find, and what it would cost.

        Returns:
            Tokens at the front that are present, and tokens by which `num_pinned_tokens` would grow.
        """
        present, pins = self._present, self._pins
        cached = growth = 0
        unbroken = True
        for key, size in pieces:
            held = present.get(key, 0)
            if unbroken:
                cached += min(held, size)
                unbroken = held >= size
            growth += max(size - held, 0) if key in pins else size
        return cached, growth

    def probe_host(self, pieces: Sequence[Piece]) -> tuple[int, int]:
        """What both tiers have together.

        Returns:
            Tokens at the front that are present in either, and how many of these only the host has.
        """
        found = copied = 0
        for key, size in pieces:
            held = min(self._present.get(key, 0), size)
            had = max(held, min(self._host.get(key, 0), size))
            found += had
            copied += had - held
            if had < size:
                break
        return found, copied

    def pin(self, pieces: Sequence[Piece]) -> None:
        """Makes the pieces present and keeps them until they are unpinned as often as they were pinned.

        An unpinned piece that is present with more tokens than needed loses the rest.
        """
        present, pins, idle = self._present, self._pins, self._idle
        for key, size in pieces:
            held = present.get(key, 0)
            num_pins = pins.get(key, 0)
            pins[key] = num_pins + 1
            if num_pins == 0:
                idle.pop(key, None)
                self.num_pinned_tokens += size
            elif size > held:
                self.num_pinned_tokens += size - held
            else:
                continue
            present[key] = size
            self.num_tokens += size - held

    def unpin(self, pieces: Sequence[Piece]) -> None:
        """Removes one pin of each piece; unpinned pieces stay until they are evicted."""
        pins, idle = self._pins, self._idle
        for key, _ in reversed(pieces):
            if pins[key] > 1:
                pins[key] -= 1
            else:
                del pins[key]
                idle[key] = None
                self.num_pinned_tokens -= self._present[key]

    def drop(self, pieces: Sequence[Piece], num_kept: int) -> None:
        """Drops these pieces beyond their first `num_kept` tokens, from their end up to one that is pinned."""
        begin = sum(size for _, size in pieces)
        for key, size in reversed(pieces):
            begin -= size
            kept = max(num_kept - begin, 0)
            if kept >= size or key in self._pins:
                return
            self.num_tokens -= self._present[key] - kept
            self._present[key] = kept
            if not kept:
                del self._present[key], self._idle[key]

    def evict(self, num_tokens: int, block_tokens: int) -> None:
        """Frees at least `num_tokens` of unpinned pieces, in whole blocks from a piece's end."""
        wanted = -(-num_tokens // block_tokens) * block_tokens
        while wanted > 0:
            key = next(iter(self._idle))
            held = self._present[key]
            taken = min(held, wanted)
            wanted -= taken
            self.num_tokens -= taken
            if self._host_capacity_tokens:
                self._take_to_host(key, held)
            if taken < held:
                self._present[key] = held - taken
            else:
                del self._present[key]
                del self._idle[key]
            if not self._idle:
                return

    def clear(self) -> None:
        """Drops everything that is not pinned."""
        for key in self._idle:
            self.num_tokens -= self._present.pop(key)
        self._idle.clear()
        self._host.clear()
        self._num_host_tokens = 0

    def _take_to_host(self, key: Hashable, num_tokens: int) -> None:
        had = self._host.pop(key, 0)
        self._host[key] = max(had, num_tokens)
        self._num_host_tokens += self._host[key] - had
        while self._num_host_tokens > self._host_capacity_tokens:
            self._num_host_tokens -= self._host.popitem(last=False)[1]
