"""What a predictor is told about a trajectory, and what it promises. The gateway and the simulator tell the same."""

from collections.abc import Container
from typing import Protocol

from scheduling.types import Prediction
from scheduling.values import value_class


@value_class(frozen=True, slots=True)
class Progress:
    """One trajectory so far, told before each turn and once more at its end.

    Args:
        trajectory_id: tells the running siblings of a group apart.
        group_id: siblings answer one prompt; empty when nobody said.
        prompt_id: the same for the same prompt in a later rollout; empty when unknown.
        prompt_tokens: prompt of the first turn.
        context_tokens: prompt of the turn that now begins; of an ended trajectory, all its tokens.
        output_tokens: made so far, in all finished turns.
        last_output_tokens: made by the last finished turn.
        num_turns: finished turns.
        outcomes: what the tools gave back so far, oldest first, each `tool:size:status` (predictor/outcomes.py).
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
    """Learns while it serves. Not thread-safe: one loop calls it."""

    @property
    def reads_outcomes(self) -> bool:
        """It looks at `Progress.outcomes`; for others nobody need read a conversation at every turn."""
        ...

    def predict(self, progress: Progress) -> Prediction:
        """Total output of this trajectory, as predicted now; remembers how far it is, for its siblings' sake."""
        ...

    def ended(self, progress: Progress) -> None:
        """A trajectory ended with `progress.output_tokens` in all: learn from it, forget it."""
        ...

    def dropped(self, trajectory_id: str) -> None:
        """A trajectory was aborted or expired: forget it, learn nothing."""
        ...

    def dump(self) -> bytes:
        """What was learned, to be kept."""
        ...

    def restore(self, dumped: bytes, running: Container[str] = ()) -> None:
        """Take up what an earlier process learned.

        Args:
            running: trajectories of that process that go on here; of no other one a word is awaited.

        Raises:
            ValueError: it is not a dump of this kind of predictor; nothing changed.
        """
        ...
