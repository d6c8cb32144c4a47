"""How long a leg is on its way to an engine's steps and back, learned from what the engine says of itself.

An engine reports every second how many requests it has. The scheduler has sent more: the others are in a connection, a
chat template, a tokenizer, a busy event loop, or on their way back. Their mean number, divided by the legs that begin
in a second, is the time that a leg spends there (Little 1961). What else talks to the engine makes it too short.
"""

# The weight of what was assumed before the first look: that of one look while ten legs a second begin.
PRIOR_LEGS_PER_S = 10.0
# What a look counts after the next one: a new load of gateway and engine is known after half a minute.
KEPT_SHARE = 0.96


class Transit:
    """The legs of one engine on their way.

    Args:
        leg_s: how long a leg is on its way: what its profile says, until looks tell more.
    """

    __slots__ = ("_assumed_s", "_legs_per_s", "_looked_at", "_num_legs", "_num_on_way", "leg_s")

    def __init__(self, assumed_s: float = 0.0) -> None:
        self.leg_s = self._assumed_s = assumed_s
        self._num_on_way = self._legs_per_s = 0.0
        self._looked_at = 0.0
        self._num_legs = 0

    def note(self) -> None:
        """A leg begins."""
        self._num_legs += 1

    def look(self, at: float, num_on_way: int) -> None:
        """So many legs are on their way; negative if others send requests to the engine, too."""
        legs_per_s = self._num_legs / (at - self._looked_at) if at > self._looked_at else 0.0
        self._looked_at, self._num_legs = at, 0
        self._num_on_way = KEPT_SHARE * self._num_on_way + num_on_way
        self._legs_per_s = KEPT_SHARE * self._legs_per_s + legs_per_s
        known = self._num_on_way + PRIOR_LEGS_PER_S * self._assumed_s
        self.leg_s = max(known, 0.0) / (self._legs_per_s + PRIOR_LEGS_PER_S)
