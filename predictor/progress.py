"""What a predictor is told about a trajectory, and its interface. The gateway and the simulator tell it the same."""

from collections.abc import Container
from typing import Protocol

from scheduling.types import Prediction
from scheduling.values import value_class


@value_class(frozen=True, slots=True)
class Progress:
    """One trajectory so far, passed before each turn and once more at its end.

    Args:
        trajectory_id: tells the running siblings of a group apart.
        group_id: siblings answer one prompt; empty if it is unknown.
        prompt_id: stays the same for the same prompt in a later rollout; empty if it is unknown, and maybe after the
            first turn.
        prompt_tokens: prompt of the first turn.
        context_tokens: prompt of the turn that now begins; for an ended trajectory, all its tokens.
        output_tokens: output of all finished turns.
        last_output_tokens: output of the last finished turn.
        num_turns: finished turns.
        outcomes: tool outcomes so far, oldest first, each `tool:size:status` (predictor/outcomes.py).
    """

    trajectory_id: str
    group_id: str = ""
    prompt_id: str = ""
    prompt_tokens: int = 0
    context_tokens: int = 0
    output_tokens: int = 0
    last_output_tokens: int = 0
    num_turns: int = 0
    outcomes: tuple[str, ...] = ()


class Predictor(Protocol):
    """Learns while it serves. Not thread-safe: one event loop calls it."""

    @property
    def reads_outcomes(self) -> bool:
        """Whether it uses `Progress.outcomes`; for other predictors the conversation need not be read at every turn."""
        ...

    def predict(self, progress: Progress) -> Prediction:
        """Total output of this trajectory, as predicted now. Remembers its progress, for its siblings' predictions."""
        ...

    def ended(self, progress: Progress) -> None:
        """A trajectory ended with `progress.output_tokens` in total: learn from it, then forget it."""
        ...

    def dropped(self, trajectory_id: str) -> None:
        """A trajectory was aborted or expired: forget it, learn nothing."""
        ...

    def dump(self) -> bytes:
        """What was learned, to be stored."""
        ...

    def restore(self, dumped: bytes, running: Container[str] = ()) -> None:
        """Restore what an earlier process learned.

        Args:
            running: trajectories of that process that go on here; no other ones will report again.

        Raises:
            ValueError: it is not a dump of this kind of predictor; nothing has changed then.
        """
        ...
