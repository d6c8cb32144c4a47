"""How long tool calls take, learned from those that have ended, and how long to keep a context for one.

A context that is kept in a tool call takes room, and one that is not kept must be prefilled again. If calls are known,
an engine whose KV is full ends most turns with the lease that makes the cycle of its residents shortest. A cycle is

    cycle = turn / (1 - prefill) + kept

where `turn` is the time on the engine, `kept` the part of the call for which the context is kept, and `prefill` the
share of time in which the engine prefills what was not kept, `longer * refill / cycle`: the share of calls longer than
the lease, times the seconds to prefill all contexts there once per cycle. Often the best lease is an extreme: calls of
10 s are worth waiting for or they are not, and then a lease of 5 s costs the room and the prefill as well.
"""

from bisect import bisect_left
from math import inf, log2, sqrt

# Calls are counted in classes with these upper bounds, two for each doubling, from 0.05 s to over two hours. A lease is
# 0 or such a bound. For longer calls no context is kept.
_CLASSES_S = tuple(0.05 * 2 ** (index / 2) for index in range(36))
# Leases are chosen anew after this many calls; before the first time, nothing is known.
LEARNS_EVERY = 16
# When so many calls are known, each counts half from then on: agents and tools change while a model is trained.
MOST_CALLS = 1_024
# Costs of a refill are rounded to eight steps for each doubling, so that few leases are computed.
_STEPS_PER_DOUBLING = 8
# A refill that costs less costs nothing.
_LEAST_REFILL_S = 1e-6


class ToolCalls:
    """The tool calls of one fleet, and the turns between them.

    Cost: no max() where each turn passes, which takes ten times as long as a comparison.
    """

    def __init__(self) -> None:
        self._num_turns = self._turns_s = 0.0
        self._num_calls = 0.0
        self._num_by_class = [0.0] * len(_CLASSES_S)
        self._total_s_by_class = [0.0] * len(_CLASSES_S)
        self._num_unread = 0
        self._turn_s = 0.0
        self._choices: list[tuple[float, float, float]] = []
        self._leases_s: dict[int, float] = {}

    def note_turn(self, took_s: float) -> None:
        """Count a turn that has ended, with its time on its engine."""
        self._num_turns += 1
        self._turns_s += took_s

    def note(self, took_s: float) -> None:
        """Count a call that has ended."""
        index = bisect_left(_CLASSES_S, took_s)
        self._num_calls += 1
        if index < len(_CLASSES_S):
            self._num_by_class[index] += 1
            self._total_s_by_class[index] += took_s if took_s > 0.0 else 0.0
        self._num_unread += 1
        if self._num_unread == LEARNS_EVERY:
            self._num_unread = 0
            self._learn()
            if self._num_calls >= MOST_CALLS:
                self._forget_half()

    def lease_s(self, refill_s: float) -> float | None:
        """The lease with the shortest cycle on an engine that prefills all its residents' contexts in `refill_s`. None
        while too few calls are known."""
        if not self._choices:
            return None
        step = round(_STEPS_PER_DOUBLING * log2(refill_s if refill_s > _LEAST_REFILL_S else _LEAST_REFILL_S))
        lease_s = self._leases_s.get(step)
        if lease_s is None:
            lease_s = self._leases_s[step] = self._shortest_cycle(2 ** (step / _STEPS_PER_DOUBLING))
        return lease_s

    def _shortest_cycle(self, refill_s: float) -> float:
        turn_s, best_s, shortest_s = self._turn_s, 0.0, inf
        for lease_s, kept_s, longer in self._choices:
            refilled_s = longer * refill_s
            sum_s = turn_s + kept_s + refilled_s
            square = sum_s * sum_s - 4 * kept_s * refilled_s
            cycle_s = (sum_s + sqrt(square)) / 2 if square > 0.0 else sum_s / 2
            if cycle_s < shortest_s:
                best_s, shortest_s = lease_s, cycle_s
        return best_s

    def _learn(self) -> None:
        """List the leases that may be best: for each, how long a context is kept on average, and the share of longer
        calls."""
        self._leases_s.clear()
        self._turn_s = self._turns_s / self._num_turns if self._num_turns else 0.0
        self._choices = [(0.0, 0.0, 1.0)]
        num_ended = ended_s = 0.0
        for lease_s, num, total_s in zip(_CLASSES_S, self._num_by_class, self._total_s_by_class, strict=True):
            if num:
                num_ended += num
                ended_s += total_s
                longer = max(1.0 - num_ended / self._num_calls, 0.0)
                self._choices.append((lease_s, ended_s / self._num_calls + longer * lease_s, longer))

    def _forget_half(self) -> None:
        self._num_turns /= 2
        self._turns_s /= 2
        self._num_calls /= 2
        self._num_by_class = [num / 2 for num in self._num_by_class]
        self._total_s_by_class = [total_s / 2 for total_s in self._total_s_by_class]
