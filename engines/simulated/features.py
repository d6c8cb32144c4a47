"""Optional features of an engine: speculative decoding, and a second tier for KV."""

import math
from dataclasses import dataclass

# Drafts that slow steps down more are a mistake, and with some 1e-9 a run would not end.
_MIN_SPEED_UP = 0.01


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding while the batch is small enough to have compute to spare.

    Args:
        speed_up: how much faster decode steps are; drafts accepted at usual rates give 1.6.
        max_batch: applies to steps of at most this many sequences.
    """

    speed_up: float = 1.6
    max_batch: int = 8

    def __post_init__(self) -> None:
        assert _MIN_SPEED_UP <= self.speed_up < math.inf, f"speed_up: at least {_MIN_SPEED_UP}, and finite"
        assert self.max_batch > 0, "max_batch: at least 1"


@dataclass(frozen=True, slots=True)
class HostTier:
    """Host memory that takes evicted KV; KV found there is copied back instead of recomputed.

    Args:
        capacity_tokens: KV tokens that it holds; the least recently evicted go first.
        bytes_per_s: of copies to the engine, which do not overlap with anything.
    """

    capacity_tokens: int
    bytes_per_s: float = 25e9

    def __post_init__(self) -> None:
        assert self.capacity_tokens >= 0 and self.bytes_per_s > 0, "capacity_tokens from 0, bytes_per_s above 0"


@dataclass(frozen=True, slots=True)
class Features:
    """An engine's features; None means that it lacks one."""

    speculation: Speculation | None = None
    host_tier: HostTier | None = None


PLAIN = Features()
