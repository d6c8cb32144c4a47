"""What the predictor is told of a trajectory, built from what the ledger knows."""

from collections.abc import Iterable
from typing import Any

from gateway.state.ledger import Entry
from predictor.progress import Progress
from scheduling.types import TrajectoryRecord


def progress_before_turn(
    trajectory_id: str,
    group_id: str,
    prompt_id: str,
    context_tokens: int,
    entry: Entry | None,
    outcomes: tuple[str, ...] = (),
) -> Progress:
    """A trajectory before its next turn, with `context_tokens` in its context.

    Args:
        entry: what is known of its trajectory, if anything.
        outcomes: of its tools, for a predictor that reads them.
    """
    if entry is None or not entry.record.num_turns:
        return Progress(trajectory_id, group_id, prompt_id, context_tokens, context_tokens)
    record = entry.record
    last = _first_finished(reversed(entry.turns))  # from the end: hundreds may lie between
    last_output_tokens = last["output_tokens"] if last else 0
    return Progress(
        trajectory_id,
        group_id,
        prompt_id,
        first_prompt_tokens(entry),
        context_tokens,
        record.output_tokens,
        last_output_tokens,
        record.num_turns,
        outcomes,
    )


def first_prompt_tokens(entry: Entry) -> int:
    """The prompt of its first finished turn; 0 if that turn is not in its history any more, or did not tell it."""
    num_turns, turns = entry.record.num_turns, entry.turns
    # Failed turns, which are not among the turns counted, may have pushed it out of a full history.
    if len(turns) < num_turns or (len(turns) == turns.maxlen and _num_finished(turns) < num_turns):
        return 0
    first = _first_finished(turns)
    return (first["prompt_tokens"] or 0) if first else 0


def progress_at_end(record: TrajectoryRecord) -> Progress:
    """A trajectory that ended well."""
    return Progress(
        record.trajectory_id,
        record.group_id,
        context_tokens=record.context_tokens,
        output_tokens=record.output_tokens,
        num_turns=record.num_turns,
    )


def _num_finished(turns: Iterable[dict[str, Any]]) -> int:
    return sum(turn["outcome"] == "finished" for turn in turns)


def _first_finished(turns: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    for turn in turns:
        if turn["outcome"] == "finished":
            return turn
    return None
