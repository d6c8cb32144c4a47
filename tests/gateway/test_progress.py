"""What the predictor is told comes from the ledger, and lacks nothing that the ledger knows."""

from collections import deque
from typing import Any

from gateway.state.ledger import Entry
from gateway.turns.progress import begun, ended
from predictor.progress import Progress
from scheduling.types import TrajectoryRecord, TrajectoryState

RECORD = TrajectoryRecord("t", "g", None, TrajectoryState.ACTIVE, "e", 400, 70, 2, 900.0, 1.0, 2.0)


def turn(prompt_tokens: int | None, output_tokens: int, outcome: str = "finished") -> dict[str, Any]:
    return {"outcome": outcome, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}


def test_a_first_turn_has_only_its_prompt() -> None:
    """A trajectory that nobody knows, and one that was declared only, start with nothing made."""
    assert begun("t", "g", "p", 100, None) == Progress("t", "g", "p", 100, 100)


def test_a_later_turn_tells_what_the_finished_ones_made() -> None:
    """The first prompt, the last finished turn's tokens, and the sum; a failed turn counts for nothing."""
    turns = deque([turn(100, 30), turn(None, 3, "failed"), turn(200, 40)])
    assert begun("t", "g", "", 500, Entry(RECORD, turns)) == Progress("t", "g", "", 100, 500, 70, 40, 2)


def test_a_history_that_was_cut_has_no_first_prompt() -> None:
    """When the oldest turns are gone, the oldest one left is not taken for the first."""
    assert begun("t", "g", "", 500, Entry(RECORD, deque([turn(200, 40)]))).prompt_tokens == 0


def test_a_later_turn_tells_what_its_tools_gave_back() -> None:
    """As read from the messages; a first turn has had no tools."""
    turns = deque([turn(100, 30), turn(200, 40)])
    told = begun("t", "g", "", 500, Entry(RECORD, turns), ("bash:small:success",))
    assert told == Progress("t", "g", "", 100, 500, 70, 40, 2, ("bash:small:success",))


def test_a_history_that_is_full_may_have_lost_its_first_turn() -> None:
    """A failed turn among as many turns as are kept stands where the first prompt was pushed out."""
    turns = deque([turn(200, 40), turn(None, 3, "failed")], maxlen=2)
    assert begun("t", "g", "", 500, Entry(RECORD, turns)).prompt_tokens == 0


def test_an_ended_trajectory_tells_its_total() -> None:
    """What the siblings learn from."""
    assert ended(RECORD) == Progress("t", "g", context_tokens=400, output_tokens=70, num_turns=2)
