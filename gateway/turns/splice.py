"""The prompt of a later turn, made of its trajectory's own earlier tokens where the client goes on with them.

A template renders an answer's text to tokens anew, which need not be those that were made: `ab` may have been `a` and
`b`. With the made ones the prompt is what a trainer expects and what the engine has in its cache. Needs no tokenizer:
the token that ends a turn cuts prompts into messages. The messages of the earlier prompt must be those of the render,
but for answers, which begin with what opens one, and were spliced into the earlier prompt themselves.
"""

from itertools import pairwise

import numpy as np

from engines.token_ids import ID_BYTES, TokenIds
from gateway.messages.transcripts import History
from gateway.tokens.packed import id_bytes
from gateway.tokens.turn_tokens import TokenBook, TurnTokens


def spliced(
    book: TokenBook, trajectory_id: str, history: History | None, rendered: TokenIds
) -> tuple[TokenIds, str | None]:
    """The prompt, and the turn that it goes on from; the render as it is, and None, where it is a branch.

    Args:
        history: of the request; None where it has none.
    """
    before = book.continued(trajectory_id, history.digests[-1]) if history and history.digests else None
    if before is None:
        return rendered, None
    prompt = joined(before, rendered)
    return (rendered, None) if prompt is None else (prompt, before.turn_id)


def joined(before: TurnTokens, rendered: TokenIds) -> TokenIds | None:
    """An earlier turn's tokens, and what is new in a render after them; None where that does not go on from them."""
    made = before.output_ids
    if not len(made):
        return None
    prompt, output = id_bytes(before.prompt_ids), id_bytes(made)
    if rendered.packed.startswith(prompt + output):
        return rendered
    # An answer cut by its limit has no end of its own, and neither does one that ran over its end.
    end_of_turn = made[-1]
    if before.finish_reason == "length" or end_of_turn in made[:-1]:
        return None
    *known, opening = _messages(prompt, end_of_turn)
    messages = _messages(rendered.packed, end_of_turn)
    if len(messages) < len(known) + 2 or not opening:
        return None
    size = len(opening)
    if messages[len(known)][:size] != opening:
        return None
    for mine, theirs in zip(known, messages, strict=False):
        if mine != theirs and not mine[:size] == theirs[:size] == opening:
            return None
    return TokenIds(b"".join((prompt, output, *messages[len(known) + 1 :])))


def _messages(packed: bytes, end_of_turn: int) -> list[bytes]:
    """Cut behind each such token; what follows the last one comes last."""
    ends = ID_BYTES * (np.flatnonzero(np.frombuffer(packed, np.uint32) == end_of_turn) + 1)
    return [packed[start:end] for start, end in pairwise((0, *ends.tolist(), len(packed)))]
