"""Consecutive steps of one batch, in closed form: `n` steps take `n * first + growth * n * (n - 1) / 2`."""

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Steps:
    """Consecutive engine steps between two changes of the batch.

    Args:
        start_at: seconds.
        num_steps: after this many the batch changes; may be lowered, not below `num_done`.
        first_s: duration of the first step.
        growth_s: how much longer each step is than the one before, because the KV cache grows.
        num_done: steps that are over.

    Attributes:
        done_at: when they were over.
        next_at: when the step after them is over.
    """

    start_at: float
    num_steps: int
    first_s: float
    growth_s: float
    num_done: int = 0
    done_at: float = field(init=False)
    next_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.done_at = self.start_at
        self.next_at = self.start_at + self.first_s

    @property
    def end_at(self) -> float:
        """When all of them are over."""
        return self.next_at if self.num_steps == self.num_done + 1 else self.end_of(self.num_steps)

    def end_of(self, num_steps: int) -> float:
        """When the first `num_steps` steps are over."""
        return self.start_at + num_steps * self.first_s + self.growth_s * (num_steps * (num_steps - 1) / 2)

    def pass_until(self, at: float) -> bool:
        """Count the steps that are over at `at`, including one that ends exactly then; returns whether all are over."""
        if self.num_done < self.num_steps and at < self.next_at:
            return False  # requests that come together do so within one step
        end_at = self.end_at
        if at >= end_at:
            self.num_done, self.done_at = self.num_steps, end_at
            return True
        # The quadratic's root, in the form that stays exact if growth is nearly zero; then corrected so that it agrees
        # with end_of to the last bit.
        half = self.growth_s / 2
        linear = self.first_s - half
        elapsed = at - self.start_at
        done = int(2 * elapsed / (linear + math.sqrt(linear * linear + 4 * half * elapsed)))
        while self.end_of(done + 1) <= at:
            done += 1
        while done > self.num_done and self.end_of(done) > at:
            done -= 1
        if done > self.num_done:
            self.num_done = done
            self.done_at, self.next_at = self.end_of(done), self.end_of(done + 1)
        return False
