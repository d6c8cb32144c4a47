"""What the predictor is told comes from the ledger and omits nothing that the ledger knows."""

from collections import deque
from typing import Any

from gateway.state.ledger import Entry
from gateway.turns.progress import progress_at_end, progress_before_turn
from predictor.progress import Progress
from scheduling.types import TrajectoryRecord, TrajectoryState

RECORD = TrajectoryRecord("t", "g", None, TrajectoryState.ACTIVE, "e", 400, 70, 2, 900.0, 1.0, 2.0)


def turn(prompt_tokens: int | None, output_tokens: int, outcome: str = "finished") -> dict[str, Any]:
    return {"outcome": outcome, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}


def test_a_first_turn_has_only_its_prompt() -> None:
    """A trajectory without an entry in the ledger has generated nothing yet."""
    assert progress_before_turn("t", "g", "p", 100, None) == Progress("t", "g", "p", 100, 100)


def test_a_later_turn_reports_the_output_of_finished_turns() -> None:
    """The first prompt, the last finished turn's tokens, and the sum; a failed turn counts for nothing."""
    turns = deque([turn(100, 30), turn(None, 3, "failed"), turn(200, 40)])
    assert progress_before_turn("t", "g", "", 500, Entry(RECORD, turns)) == Progress("t", "g", "", 100, 500, 70, 40, 2)


def test_a_truncated_history_has_no_first_prompt() -> None:
    """When the oldest turns are gone, the oldest remaining one is not taken for the first."""
    assert progress_before_turn("t", "g", "", 500, Entry(RECORD, deque([turn(200, 40)]))).prompt_tokens == 0


def test_a_later_turn_reports_its_tool_results() -> None:
    """They are passed on as they were read from the messages."""
    turns = deque([turn(100, 30), turn(200, 40)])
    progress = progress_before_turn("t", "g", "", 500, Entry(RECORD, turns), ("bash:small:success",))
    assert progress == Progress("t", "g", "", 100, 500, 70, 40, 2, ("bash:small:success",))


def test_a_full_history_has_no_first_prompt() -> None:
    """Its failed turn, which is not among the turns counted, pushed out the first one."""
    turns = deque([turn(200, 40), turn(None, 3, "failed")], maxlen=2)
    assert progress_before_turn("t", "g", "", 500, Entry(RECORD, turns)).prompt_tokens == 0


def test_a_full_history_that_lost_nothing_has_its_first_prompt() -> None:
    """As many turns are kept as the trajectory had."""
    turns = deque([turn(100, 30), turn(200, 40)], maxlen=2)
    assert progress_before_turn("t", "g", "", 500, Entry(RECORD, turns)).prompt_tokens == 100


def test_an_ended_trajectory_reports_its_totals() -> None:
    """The predictor learns from them."""
    assert progress_at_end(RECORD) == Progress("t", "g", context_tokens=400, output_tokens=70, num_turns=2)
