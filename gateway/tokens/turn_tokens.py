"""The tokens of a turn as they were made: later turns are spliced from them, and trainers learn from them."""

from collections.abc import Sequence

from scheduling.values import value_class

ONLY_WHOLE = "only-whole"
"""In a turn's history: only a prompt that begins with all its tokens continues it. Its limit or its client's own stop
ended it, so its last token need not be the one that ends a message.
"""


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
        prompt_ids: the whole prompt, as the engine saw it.
        output_ids: what was made, including the end-of-turn token if one was made.
        logprobs: of the chosen tokens, as many as output_ids, all of them numbers; None if the engine did not give all.
        versions: cover output_ids without gaps, in order.
        finish_reason: as the client was told, in a chat's words.
        parent: the turn whose prompt and output this prompt begins with, token by token; None for a trajectory's first
            turn, and if the client changed its history, which begins a branch.
        history: words, separated by blanks: the digest of the conversation up to and including this turn's answer, by
            which the next turn is recognised as its continuation, then the digest with the answer's thoughts if it has
            any, and `ONLY_WHOLE` if that applies. "" for a completion, which is continued only by a prompt that begins
            with all its tokens.
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
