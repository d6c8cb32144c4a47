"""Where, for many at once: trajectories sorted by predicted work and cut into contiguous groups, one per engine.

The largest estimated finish (estimate.py) is minimised. Engines take their groups in order: the fastest engine first,
the longest trajectories first. Given a bound on the finish, each engine takes as many trajectories as it can within the
bound. More work never takes less time, so no other cut of the list gets further. Bisection finds the least bound that
places all of them. The result is exact, to a millionth, among contiguous groups in that order of engines; for equal
engines, among all contiguous groups.

One long trajectory may set the makespan alone. The bound would then leave the engines behind it filled up to its
finish, or empty. So the bound is lowered for them whenever they can do clearly better.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from scheduling.cost import EngineProfile
from scheduling.estimate import USABLE_KV_SHARE, Remaining, estimate_finish_s
from scheduling.running_sums import LoadedEngine, RunningSums

PRECISION = 1e-6

# The remaining engines get a lower bound of their own if they can keep to this share of the present one.
CLEARLY_BETTER = 0.95


@dataclass(frozen=True, slots=True)
class Partition:
    """Which trajectories go to which engine.

    Args:
        groups: for each engine, in the order given, the indices of its trajectories, longest first.
        finish_s: for each engine, the estimated finish of its group and of the work that it had.
    """

    groups: tuple[tuple[int, ...], ...]
    finish_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        return max(self.finish_s)


def partition(trajectories: Sequence[Remaining], engines: Sequence[LoadedEngine]) -> Partition:
    """The contiguous groups with the least makespan, the fastest engine first; of equals, the one with less work.

    Args:
        engines: at least one.

    Cost: 10,000 trajectories on 64 engines of four kinds take 50 ms (tests/bench/test_partition_speed.py).
    """
    presorted = Presorted(trajectories)
    by_speed = sorted(range(len(engines)), key=lambda index: _speed(engines[index]))
    cuts = presorted.cuts([engines[index] for index in by_speed])
    bounds_of = dict(zip(by_speed, zip([0, *cuts], cuts, strict=False), strict=True))
    return Partition(
        tuple(tuple(presorted.order[slice(*bounds_of[index])]) for index in range(len(engines))),
        tuple(presorted.running_sums.finish_s(engine, *bounds_of[index]) for index, engine in enumerate(engines)),
    )


def _speed(engine: LoadedEngine) -> tuple[float, float]:
    return engine.profile.decode_base_ms, estimate_finish_s(engine.profile, engine.work)


class Presorted:
    """Trajectories, longest first, prepared for trying many fleets on them. Immutable except for a cache.

    `order` holds the indices of the trajectories as given; positions below count in that order.
    """

    def __init__(self, trajectories: Sequence[Remaining]) -> None:
        self.order = sorted(range(len(trajectories)), key=lambda index: -trajectories[index].output_tokens)
        self.running_sums = RunningSums([trajectories[index] for index in self.order])
        self.next_slower_tools = _next_greater(self.running_sums.tool_s)
        self._fillers: dict[tuple[object, ...], Filler] = {}
        self._sums: dict[EngineProfile, _Sums] = {}

    def __len__(self) -> int:
        return len(self.order)

    def filler(self, engine: LoadedEngine) -> "Filler":
        """The Filler for such an engine. Keep it if it is needed often."""
        profile = engine.profile
        like_it = profile, engine.speculation, astuple(engine.work)
        if like_it not in self._fillers:
            if profile not in self._sums:
                self._sums[profile] = _Sums(
                    profile,
                    self.running_sums.total_tokens,
                    self.running_sums.products,
                    self.running_sums.prefill_tokens,
                )
            self._fillers[like_it] = Filler(self, engine, self._sums[profile])
        return self._fillers[like_it]

    def cuts(self, engines: Sequence[LoadedEngine]) -> list[int]:
        """Where each engine's group ends; engines take their groups in the order given."""
        fillers = [self.filler(engine) for engine in engines]
        cuts: list[int] = []
        bound_s, start = self.bound_s(fillers), 0
        for index, filler in enumerate(fillers):
            lower_s = CLEARLY_BETTER * bound_s
            if 0 < start < len(self) and self.reach(fillers[index:], lower_s, start) == len(self):
                bound_s = self.bound_s(fillers[index:], start, lower_s)
            start = filler.reach(start, bound_s)
            cuts.append(start)
        cuts[-1] = len(self)  # rounding may have left one
        return cuts

    def bound_s(self, fillers: Sequence["Filler"], start: int = 0, high_s: float | None = None) -> float:
        """The least bound within which these engines, in this order, finish all trajectories from `start` on.

        Args:
            high_s: a bound that is known to suffice. None: that of all trajectories on the first engine.
        """
        if high_s is None:
            high_s = (1 + PRECISION) * self.running_sums.finish_s(fillers[0].engine, start, len(self))
        return least_bound_s(lambda bound_s: self.reach(fillers, bound_s, start) == len(self), high_s)

    def reach(self, fillers: Sequence["Filler"], bound_s: float, start: int = 0) -> int:
        """How far down the list these engines get, in this order, if each finishes within the bound."""
        for filler in fillers:
            start = filler.reach(start, bound_s)
            if start == len(self):
                break
        return start


class _Sums:
    """Running sums of the seconds that work takes on an engine of one profile, one sum for each limit."""

    def __init__(
        self, profile: EngineProfile, tokens: Sequence[float], products: Sequence[float], prefill: Sequence[float]
    ) -> None:
        self.per_step_s = profile.decode_base_ms / 1000
        per_token_s = profile.decode_per_sequence_ms / 1000
        per_product_s = profile.decode_per_kv_ktoken_ms / 1e6
        per_prefill_s = profile.prefill_per_ktoken_ms / 1e6
        slot_s = self.per_step_s / profile.slots
        kv_s = self.per_step_s / (USABLE_KV_SHARE * profile.kv_capacity_tokens) if profile.kv_capacity_tokens else 0.0
        self.tokens_s = [
            per_token_s * token + per_product_s * product + per_prefill_s * filled
            for token, product, filled in zip(tokens, products, prefill, strict=True)
        ]
        self.slots_s = [shared + slot_s * token for shared, token in zip(self.tokens_s, tokens, strict=True)]
        self.kv_s = [shared + kv_s * product for shared, product in zip(self.tokens_s, products, strict=True)]


class Filler:
    """Fills one engine within a bound. The estimate is the largest of three running sums, so each is bisected."""

    def __init__(self, presorted: Presorted, engine: LoadedEngine, sums: _Sums) -> None:
        work = engine.work
        self.engine = engine
        self._presorted = presorted
        self._sums = sums
        self._before = _Sums(engine.profile, [work.total_tokens], [work.token_context_products], [work.prefill_tokens])

    def reach(self, start: int, bound_s: float) -> int:
        """Where its group ends if it begins at `start` and finishes within the bound."""
        presorted = self._presorted
        if start == len(presorted):
            return start
        # Time in tools is that of the slowest trajectory in the group; few are slower than all before them.
        end = slowest = start
        while True:
            tool_s = max(self.engine.work.tool_s, presorted.running_sums.tool_s[slowest])
            end = max(end, self._decoded(start, bound_s - tool_s))
            slower = presorted.next_slower_tools[slowest]
            if slower >= end:
                return end
            end = slowest = slower

    def _decoded(self, start: int, left_s: float) -> int:
        """Where the group ends if prefill and decoding may take `left_s`."""
        output_tokens = self._presorted.running_sums.output_tokens
        speculation = self.engine.active_speculation
        if speculation is None:
            return self._decoded_behind(start, left_s, output_tokens[start])
        crowd = start + speculation.max_batch
        alone = speculation.critical_tokens(output_tokens[start], 0.0)
        end = self._decoded_behind(start, left_s, alone)
        if end < crowd or crowd >= len(output_tokens):
            return end
        crowded = speculation.critical_tokens(output_tokens[start], output_tokens[crowd])
        return max(crowd, self._decoded_behind(start, left_s, crowded))

    def _decoded_behind(self, start: int, left_s: float, critical_tokens: float) -> int:
        sums, before = self._sums, self._before
        longest_s = sums.per_step_s * max(self.engine.work.longest_tokens, critical_tokens)
        end = bisect_right(sums.tokens_s, left_s - longest_s - before.tokens_s[0] + sums.tokens_s[start], start)
        end = bisect_right(sums.slots_s, left_s - before.slots_s[0] + sums.slots_s[start], start, end)
        end = bisect_right(sums.kv_s, left_s - before.kv_s[0] + sums.kv_s[start], start, end)
        return max(start, end - 1)


def least_bound_s(suffices: Callable[[float], bool], high_s: float) -> float:
    """The least bound that suffices, to a millionth. `high_s` suffices, as does every bound above one that suffices."""
    low_s = 0.0
    while high_s - low_s > PRECISION * high_s:
        middle_s = (low_s + high_s) / 2
        if middle_s in (low_s, high_s):
            break  # they are neighbours: below 5e-318 s, floats are further apart than a millionth
        if suffices(middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s


def _next_greater(values: Sequence[float]) -> list[int]:
    """For each position, the next one with a greater value; the length if there is none."""
    following = [len(values)] * len(values)
    open_places: list[int] = []
    for place, value in enumerate(values):
        while open_places and values[open_places[-1]] < value:
            following[open_places.pop()] = place
        open_places.append(place)
    return following
