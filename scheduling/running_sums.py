"""Trajectories in a row, and the cost of any stretch of them to an engine, by differences of running sums."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from scheduling.cost import EngineProfile
from scheduling.estimate import Remaining, Work, estimate_finish_s


@dataclass(frozen=True, slots=True)
class Speculation:
    """An engine that decodes speculatively while its batch is small: `speedup` with up to `max_batch` running turns."""

    speedup: float
    max_batch: int

    def critical_tokens(self, longest_tokens: float, crowd_tokens: float) -> float:
        """Steps that the longest trajectory waits for.

        Args:
            crowd_tokens: the steps after which at most `max_batch` trajectories are left.
        """
        return crowd_tokens + (longest_tokens - crowd_tokens) / self.speedup


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that takes a share of the trajectories.

    Args:
        profile: its timing; slots and KV capacity are the engine's own.
        work: the work that it already has.
        speculation: how it decodes small batches; not counted while it has other work, which may crowd it.
    """

    profile: EngineProfile
    work: Work = field(default_factory=Work)
    speculation: Speculation | None = None

    @property
    def active_speculation(self) -> Speculation | None:
        return None if self.work.total_tokens else self.speculation


class RunningSums:
    """Trajectories in the order given, with running sums. Position 0 is before the first."""

    def __init__(self, trajectories: Sequence[Remaining]) -> None:
        self.output_tokens = [one.output_tokens for one in trajectories]
        self.tool_s = [one.tool_s for one in trajectories]
        self.total_tokens = list(accumulate(self.output_tokens, initial=0.0))
        products = (one.output_tokens * one.mean_context_tokens for one in trajectories)
        self.products = list(accumulate(products, initial=0.0))
        self.prefill_tokens = list(accumulate((one.prefill_tokens for one in trajectories), initial=0.0))

    def finish_s(self, engine: LoadedEngine, start: int, end: int) -> float:
        """The estimated finish of an engine with the trajectories at [start, end) added to its work."""
        return estimate_finish_s(engine.profile, self._work(engine, start, end))

    def _work(self, engine: LoadedEngine, start: int, end: int) -> Work:
        before = engine.work
        if start == end:
            return before
        output_tokens = self.output_tokens[start:end]
        critical_tokens = max(output_tokens)
        if speculation := engine.active_speculation:
            output_tokens.sort(reverse=True)
            crowd_tokens = output_tokens[speculation.max_batch] if speculation.max_batch < len(output_tokens) else 0.0
            critical_tokens = speculation.critical_tokens(critical_tokens, crowd_tokens)
        return Work(
            max(before.longest_tokens, critical_tokens),
            before.total_tokens + self.total_tokens[end] - self.total_tokens[start],
            before.token_context_products + self.products[end] - self.products[start],
            before.prefill_tokens + self.prefill_tokens[end] - self.prefill_tokens[start],
            max(before.tool_s, *self.tool_s[start:end]),
        )
