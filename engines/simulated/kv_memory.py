"""The KV memory of a simulated engine: the prefix cache, the KV that running sequences hold beside it, and what is
free.

Evictable KV counts as free: it goes, least recently used first, as soon as more is held than there is room for.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engines.simulated.features import HostTier
from engines.simulated.prefix_cache import Piece, PrefixCache


class Room(NamedTuple):
    """What one running sequence holds in the prefix cache; the rest of its KV is its own.

    Args:
        num_tokens: of the pieces.
        num_present: tokens at its beginning that were there before it.
        num_cached: tokens at its beginning that need not be computed, in whole blocks.
        num_copied: how many of these came back from the host.
    """

    pieces: Sequence[Piece]
    num_tokens: int
    num_present: int
    num_cached: int
    num_copied: int


class KvMemory:
    """Who holds how much of `capacity_tokens`.

    Args:
        block_tokens: prefix hits and evictions count in whole blocks.
    """

    def __init__(self, capacity_tokens: int, block_tokens: int, host_tier: HostTier | None) -> None:
        self._capacity_tokens = capacity_tokens
        self._block_tokens = block_tokens
        self._has_host = host_tier is not None
        self._cache = PrefixCache(host_tier.capacity_tokens if host_tier else 0)
        self._own_tokens = 0  # of running sequences, beside what they pin in the prefix cache

    @property
    def num_used(self) -> int:
        """Tokens that cannot be evicted."""
        return self._cache.num_pinned_tokens + self._own_tokens

    @property
    def num_free(self) -> int:
        """Tokens that are free, or cached and evictable."""
        return self._capacity_tokens - self._cache.num_pinned_tokens - self._own_tokens

    def num_cached(self, pieces: Sequence[Piece]) -> int:
        """Tokens at the front of these pieces that are cached."""
        return self._cache.probe(pieces)[0]

    # --- running sequences ----------------------------------------------------------------------------------

    def enter(self, pieces: Sequence[Piece], num_tokens: int, num_kept_free: int) -> Room | None:
        """Room for a sequence of `num_tokens`, of which these pieces are full, and for its next token.

        Returns: None if that would leave fewer than `num_kept_free` tokens.
        """
        in_pieces = sum(size for _, size in pieces)
        present, pin_growth = self._cache.probe(pieces)
        own = num_tokens + 1 - in_pieces
        if pin_growth + own + num_kept_free > self.num_free:
            return None
        copied = 0
        if self._has_host:
            present, copied = self._cache.probe_host(pieces)
        # The last token is always computed, because its output is the next token.
        cached = min(present, num_tokens - 1) // self._block_tokens * self._block_tokens
        self._cache.pin(pieces)
        self.grow(own)
        return Room(pieces, in_pieces, present, cached, copied)

    def grow(self, num_tokens: int) -> None:
        """Running sequences hold this many more tokens of their own."""
        self._own_tokens += num_tokens
        self._evict_overdraft()

    def leave(self, room: Room, num_tokens: int, filled: Sequence[Piece] = ()) -> None:
        """A sequence that held `num_tokens` leaves; the pieces that it filled remain as cache."""
        self._own_tokens -= num_tokens - room.num_tokens
        self._cache.pin(filled)
        self._cache.unpin(filled)
        self._cache.unpin(room.pieces)

    def leave_early(self, room: Room, num_tokens: int, num_computed: int) -> None:
        """A sequence leaves that has computed, or found, only the first `num_computed` of its tokens."""
        self.leave(room, num_tokens)
        self._cache.drop(room.pieces, max(num_computed, room.num_present))

    # --- other engines --------------------------------------------------------------------------------------

    def keep(self, pieces: Sequence[Piece], num_promised: int) -> bool:
        """Pin pieces; False if there is no room for them beside `num_promised` tokens."""
        if not self._fits(pieces, num_promised):
            return False
        self._cache.pin(pieces)
        self._evict_overdraft()
        return True

    def let_go(self, pieces: Sequence[Piece]) -> None:
        """Unpin them."""
        self._cache.unpin(pieces)

    def adopt(self, pieces: Sequence[Piece], num_promised: int) -> bool:
        """Add pieces that were computed elsewhere; False if there is no room for them beside `num_promised` tokens."""
        if not self._fits(pieces, num_promised):
            return False
        self._cache.pin(pieces)
        self._cache.unpin(pieces)
        self._evict_overdraft()
        return True

    def clear(self) -> None:
        """Drop everything that is not pinned."""
        self._cache.clear()

    def _fits(self, pieces: Sequence[Piece], num_promised: int) -> bool:
        return self._cache.probe(pieces)[1] <= self.num_free - num_promised

    def _evict_overdraft(self) -> None:
        overdraft = self._cache.num_tokens + self._own_tokens - self._capacity_tokens
        if overdraft > 0:
            self._cache.evict(overdraft, self._block_tokens)
