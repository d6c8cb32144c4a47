"""How long legs are on their way to an engine's steps and back, and how many are sent before a slot is free for them.

If a leg is only sent once another has ended, the slot is empty while it is on its way, and where turns are short that
is much of the time. So some are sent *ahead*, and wait in the engine: as many as end meanwhile. They end at random, so
two standard deviations of a Poisson count are added: a leg too many waits where it will run anyway, a leg too few
leaves a slot empty. A rollout begins before anything is known of it, so if a profile says that a leg takes time, two
are always ahead.

How long it is on its way is learned. An engine tells every second how many requests it has. The scheduler has sent
more: the others are in a connection, a chat template, a tokenizer, a busy event loop, or on their way back. Their mean
number, divided by the legs that end in a second, is the time that a leg spends there (Little 1961). What else talks to
the engine makes it too short.
"""

from math import ceil, sqrt

# Legs that are always ahead, if a profile says that a leg takes time. At 1, rollouts of short turns end as late as at
# 0; at 4 as soon as at 2.
LEAST_AHEAD = 2
# The weight of what was assumed before the first look: that of so many legs.
PRIOR_LEGS = 10.0
# What a second counts after the next one. A new load of gateway and engine is known after half a minute.
KEPT_SHARE = 0.96
# The longest that what a look has seen is taken to have lasted: looks are a second apart, but there are none while
# weights are loaded, and then all turns that waited for them are on their way at once.
MOST_S = 2.0
# How often legs end changes sooner: with the rollout.
RATE_KEPT_SHARE = 0.5


class Transit:
    """The legs of one engine on their way.

    Args:
        leg_s: how long a leg is on its way: what its profile says, until looks tell more.
        legs_per_s: that ended lately.
    """

    __slots__ = (
        "_assumed_s",
        "_last_ended",
        "_last_s",
        "_looked_at",
        "_num_ended",
        "_sum_ended",
        "_sum_s",
        "leg_s",
        "legs_per_s",
    )

    def __init__(self, assumed_s: float = 0.0) -> None:
        self.leg_s = self._assumed_s = assumed_s
        self.legs_per_s = 0.0
        self._looked_at: float | None = None
        self._num_ended = 0
        # Seconds on their way, of all legs, and legs that ended, both forgotten slowly.
        self._sum_s = self._sum_ended = 0.0
        # Legs that ended, in so many seconds, both forgotten soon.
        self._last_ended = self._last_s = 0.0

    def note_end(self) -> None:
        """A leg ended."""
        self._num_ended += 1

    def look(self, at: float, num_on_way: int | None) -> None:
        """So many legs are on their way; negative if others send requests to the engine, too; None: unknown.

        The first look only starts the clock.
        """
        before, num_ended, self._looked_at, self._num_ended = self._looked_at, self._num_ended, at, 0
        if before is None:
            return
        elapsed_s = at - before
        kept = RATE_KEPT_SHARE**elapsed_s
        self._last_ended = kept * self._last_ended + num_ended
        self._last_s = kept * self._last_s + elapsed_s
        self.legs_per_s = self._last_ended / max(self._last_s, 1.0)
        if num_on_way is None:
            return
        seen_s = elapsed_s if elapsed_s < MOST_S else MOST_S
        kept = KEPT_SHARE**seen_s
        self._sum_s = kept * self._sum_s + num_on_way * seen_s
        self._sum_ended = kept * self._sum_ended + (num_ended * seen_s / elapsed_s if elapsed_s else num_ended)
        known_s = self._sum_s + PRIOR_LEGS * self._assumed_s
        self.leg_s = max(known_s, 0.0) / (self._sum_ended + PRIOR_LEGS)

    def num_ahead(self, slots: int) -> int:
        """Legs that may be sent before a slot is free; at most as many as there are slots."""
        meanwhile = self.leg_s * self.legs_per_s
        least = LEAST_AHEAD if self._assumed_s and self.leg_s > 0.0 else 0
        return min(max(ceil(meanwhile + 2.0 * sqrt(meanwhile)), least), slots)
