"""How slow an engine is that nobody measured, learned from turns that end there.

Such an engine is assumed to have one profile (`UNMEASURED` in placement.py). Its *slowness* is the time that turns took
there, divided by the time that the assumed profile gives them. Estimates and leases take that profile as many times as
slow. One ratio for decode and prefill does not describe an engine, but it makes unlike engines comparable.

An engine that seems slow may get no turn that could tell otherwise, as long as few turns run: its first ones may have
waited for a compiler. So it gets another chance: when work comes to an idle fleet, an engine that was not used since
work came last is presumed to be as fast as the fastest one. If that proves wrong, its next chance comes half as soon.
"""

from dataclasses import dataclass

# An engine learns from the first turn that ends after this long, so the others cost nothing. Learning from five turns a
# second gives like makespans.
LEARNS_EVERY_S = 2.0
# What a turn counts after the next one was learned: a busy engine remembers the last minute, in which its load changes
# little.
KEPT_SHARE = 0.96
# The weight of the assumed profile: one second, less than a turn usually takes.
PRIOR_S = 1.0
# No turn counts as more than this many times as slow, or as fast, as assumed: a client that stops reading or an engine
# that hangs is not a speed. Tiny models on a CPU, and engines simulated at ten times their speed, are within it.
LARGEST = 30.0
# An engine that is up to this many times as slow as the fastest one is no worse than it was presumed to be.
LIKE = 1.5


@dataclass(slots=True)
class Slowness:
    """The slowness of one engine: 1 until something is learned."""

    ratio: float = 1.0
    _num_idle: int = 0
    _num_until_chance: int = 1
    _took_s: float = PRIOR_S
    _assumed_s: float = PRIOR_S

    def learn(self, took_s: float, assumed_s: float) -> None:
        """Learn from a turn that took `took_s` on the engine and would take `assumed_s` by the assumed profile."""
        bounded_s = min(max(took_s, assumed_s / LARGEST), assumed_s * LARGEST)
        self._took_s = PRIOR_S + KEPT_SHARE * (self._took_s - PRIOR_S) + bounded_s
        self._assumed_s = PRIOR_S + KEPT_SHARE * (self._assumed_s - PRIOR_S) + assumed_s
        self.ratio = self._took_s / self._assumed_s

    def give_chance(self, least_ratio: float, was_used: bool) -> bool:
        """Work comes to an idle fleet, of which the fastest engine in use was this slow: presume that this one is no
        slower, if its turn has come. Returns whether the ratio changed."""
        if was_used:
            self._num_idle = 0
            if self.ratio <= LIKE * least_ratio:
                self._num_until_chance = 1
            return False
        self._num_idle += 1
        if self._num_idle < self._num_until_chance:
            return False
        self._num_idle, self._num_until_chance = 0, 2 * self._num_until_chance
        self._took_s, self._assumed_s, self.ratio = PRIOR_S * least_ratio, PRIOR_S, least_ratio
        return True
