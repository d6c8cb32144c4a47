"""Builds a later turn's prompt from its trajectory's own earlier tokens, if the client continues from them.

A template renders an answer's text to tokens again, which may differ from the tokens that were made: `ab` may have been
`a` and `b`. With the original tokens the prompt is what a trainer expects and what the engine has in its cache. This
needs no tokenizer: the token that ends a turn splits prompts into messages. The earlier prompt's messages must equal
those of the render, except for answers: these begin with the tokens that open an answer, and were themselves spliced
into the earlier prompt. Or the template leaves out their thoughts, and what opens thoughts in the prompt (`<think>`,
with Qwen3 an empty thought): then all else must be equal. An answer that was cut has no such token; an earlier turn's
splits the prompts, and the answer itself must be equal.
"""

from collections.abc import Iterable

import numpy as np

from engines.token_ids import TokenIds, messages, put_together
from gateway.messages.transcripts import History
from gateway.tokens.book import TokenBook
from gateway.tokens.packed import KeptTurn
from gateway.tokens.turn_tokens import ONLY_WHOLE, TurnTokens

_END_TOKENS = 3
"""By so many last tokens of a message its end is recognised: the one that ends it, and two of its text."""


def spliced(
    book: TokenBook, trajectory_id: str, history: History | None, rendered: TokenIds
) -> tuple[TokenIds, str | None]:
    """The prompt, and the turn that it continues; for a branch, the render unchanged and None.

    Of several turns with equal answers it continues one whose tokens the template renders too, else the latest. A turn
    that thought otherwise than the client has it is not continued, because the client changed its history. Whatever the
    history, a render that begins with all tokens of a turn continues it.

    Args:
        history: of the request; None for a completion.
    """
    found: list[tuple[TokenIds, str | None]] = []
    answer = history.digests[-1] if history is not None and history.digests else ""
    for before in book.continued(trajectory_id, answer, history.with_thoughts if history is not None else {}):
        prompt = joined(before, rendered, book.ancestors(trajectory_id, before.turn_id))
        if prompt is rendered:
            return prompt, before.turn_id
        if prompt is not None:
            found.append((prompt, before.turn_id))
    return found[0] if found else (rendered, book.begun_by(trajectory_id, rendered))


def joined(before: TurnTokens, rendered: TokenIds, ancestors: Iterable[KeptTurn] = ()) -> TokenIds | None:
    """An earlier turn's tokens, then what is new in a render after them; None if the render does not continue them.

    Args:
        ancestors: of the earlier turn, the nearest first.
    """
    prompt, output = TokenIds.of(before.prompt_ids), TokenIds.of(before.output_ids)
    if not output:
        return None
    if rendered.begins_with(prompt, output):
        return rendered
    end_of_turn = _end_of_turn(before)
    is_cut = end_of_turn is None
    if is_cut:
        end_of_turn = next((end for end in map(_end_of_turn, ancestors) if end is not None), None)
    if end_of_turn is None:
        return None
    *known, opening = messages(prompt, end_of_turn)
    found = messages(rendered, end_of_turn)
    if len(found) < len(known) + 2 or not opening.text:
        return None
    answer, *new = found[len(known) :]
    if is_cut:  # the rest of its message may be more than the end token
        start = answer.end_of(opening, output)
        if start is None:
            return None
        new.insert(0, TokenIds(answer.text[start:]))
    elif _is_split(output, answer, new[:-1]):
        return None
    else:
        known.append(put_together((opening, output)))
    for mine, theirs in zip(known, found, strict=False):
        if mine != theirs and not _is_answer(mine, theirs, opening):
            return None
    return put_together((prompt, output, *new))


def _end_of_turn(turn: TurnTokens | KeptTurn) -> int | None:
    """The token with which this turn ended its message; None if it did not end there, or its last token need not be
    that one. A stop string's last token may be anywhere in the messages that follow.
    """
    history = turn.history.split()  # none of a completion, whose stop strings are not noted
    if not turn.output_ids or not history or ONLY_WHOLE in history:
        return None
    *made, last = turn.output_ids
    return None if last in made else last


def _is_split(output: TokenIds, answer: TokenIds, later: Iterable[TokenIds]) -> bool:
    """Whether the render makes several messages of an answer, whose text spells the token that ends one: the answer
    ends as a later message does, or has that as its end, and not as the first one does.
    """
    made = b"," + output.text
    end = b",".join((b"", *made.rsplit(b",", _END_TOKENS)[1:]))
    if (b"," + answer.text).endswith(end):
        return False
    texts = [b"," + message.text for message in later]
    return any(text.endswith(end) or made.endswith(text) for text in texts)


def _is_answer(mine: TokenIds, theirs: TokenIds, opening: TokenIds) -> bool:
    """Whether this is an answer, and the same in a render: opened alike, or all of it but one run of tokens, which ends
    with its opening or after it.
    """
    if not mine.begins_with(opening):
        return False
    if theirs.begins_with(opening):
        return True
    made, said = mine.numbers, theirs.numbers
    num_left_out = len(made) - len(said)
    if num_left_out <= 0:
        return False
    start = int(np.argmin(np.append(made[: len(said)] == said, False)))
    if not start or start + num_left_out < len(opening):
        return False
    return np.array_equal(made[start + num_left_out :], said[start:])
