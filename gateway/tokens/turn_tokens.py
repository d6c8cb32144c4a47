"""The tokens of a turn as they were made: what a later turn is spliced from, and what a trainer learns from."""

from collections.abc import Sequence

from scheduling.values import value_class


@value_class(frozen=True, slots=True)
class VersionSpan:
    """Output tokens at [start, end) of a turn were made with weights of this version."""

    version: str
    start: int
    end: int


@value_class(frozen=True, slots=True)
class TurnTokens:
    """One ended turn at token level.

    Args:
        prompt_ids: all of the prompt, as the engine saw it.
        output_ids: what was made, the end-of-turn token included where one was made.
        logprobs: of the chosen tokens, as many as output_ids; None where they were not asked for.
        versions: cover output_ids without a gap, in order.
        parent: the turn whose prompt and output this prompt begins with, token by token; None at a trajectory's first
            turn and where the client changed its history, which begins a branch.
        history: digest of the conversation up to and with this turn's answer, by which the next turn is known to
            continue it.
        ended_at: seconds since the epoch.
    """

    trajectory_id: str
    turn_id: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    logprobs: Sequence[float] | None
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    parent: str | None
    history: str
    ended_at: float
