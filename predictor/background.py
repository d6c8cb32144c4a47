"""Answers of a slow predictor, computed while tools run, so that the next turn never waits for one."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from scheduling.types import Prediction

Question = TypeVar("Question")


@dataclass(slots=True)
class BackgroundCounts:
    """What became of the questions: for metrics, and to see whether the executor keeps up."""

    num_in_time: int = 0
    num_late: int = 0
    num_failed: int = 0
    num_refused: int = 0


class BackgroundPredictions(Generic[Question]):
    """Asks in the background when a turn ends, and gives the answer at the next turn if it is ready.

    One event loop calls `begin`, `take` and `dropped`; none of them waits.

    Args:
        predict: the slow predictor, called in the executor.
        executor: one thread or process is enough; its owner shuts it down.
        max_open: limit on unanswered questions. Further ones are refused, because a queue would only make all answers
            late.
    """

    def __init__(self, predict: Callable[[Question], Prediction], executor: Executor, max_open: int = 64) -> None:
        self._predict = predict
        self._executor = executor
        self._max_open = max_open
        self._asked: dict[str, Future[Prediction]] = {}
        self._open: list[Future[Prediction]] = []
        self.counts = BackgroundCounts()

    def begin(self, trajectory_id: str, question: Question) -> None:
        """Ask, because a turn ended and its tool runs. An older question of this trajectory is dropped."""
        self.dropped(trajectory_id)
        self._open = [asked for asked in self._open if not asked.done()]
        if len(self._open) >= self._max_open:
            self.counts.num_refused += 1
            return
        self._asked[trajectory_id] = self._executor.submit(self._predict, question)
        self._open.append(self._asked[trajectory_id])

    def take(self, trajectory_id: str) -> Prediction | None:
        """The answer, once; None if there was no question, the answer is not ready, or the predictor failed."""
        asked = self._asked.pop(trajectory_id, None)
        if asked is None:
            return None
        if not asked.done():
            asked.cancel()
            self.counts.num_late += 1
            return None
        if asked.cancelled() or asked.exception() is not None:
            self.counts.num_failed += 1
            return None
        self.counts.num_in_time += 1
        return asked.result()

    def dropped(self, trajectory_id: str) -> None:
        """Drop the question of a trajectory that ended."""
        if asked := self._asked.pop(trajectory_id, None):
            asked.cancel()
