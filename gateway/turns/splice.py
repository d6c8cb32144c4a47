"""The prompt of a later turn, made of its trajectory's own earlier tokens where the client goes on with them.

A template renders an answer's text to tokens anew, which need not be those that were made: `ab` may have been `a` and
`b`. With the made ones the prompt is what a trainer expects and what the engine has in its cache. Needs no tokenizer:
the token that ends a turn cuts prompts into messages. The messages of the earlier prompt must be those of the render,
but for answers, which begin with what opens one, and were spliced into the earlier prompt themselves.
"""

from gateway.messages.transcripts import History
from gateway.tokens.turn_tokens import TokenBook, TurnTokens


def spliced(
    book: TokenBook, trajectory_id: str, history: History | None, rendered: list[int]
) -> tuple[list[int], str | None]:
    """The prompt, and the turn that it goes on from; the render as it is, and None, where it is a branch.

    Args:
        history: of the request; None where it has none.
    """
    before = book.continued(trajectory_id, history.digests[-1]) if history and history.digests else None
    if before is None:
        return rendered, None
    prompt = _joined(before, rendered)
    return (rendered, None) if prompt is None else (prompt, before.turn_id)


def _joined(before: TurnTokens, rendered: list[int]) -> list[int] | None:
    prompt, output = list(before.prompt_ids), list(before.output_ids)
    if not output:
        return None
    if rendered[: len(prompt) + len(output)] == prompt + output:
        return rendered
    # An answer cut by its limit has no end of its own, and neither does one that ran over its end.
    end_of_turn = output[-1]
    if before.finish_reason == "length" or end_of_turn in output[:-1]:
        return None
    *known, opening = _messages(prompt, end_of_turn)
    messages = _messages(rendered, end_of_turn)
    if len(messages) < len(known) + 2 or not opening:
        return None
    size = len(opening)
    if messages[len(known)][:size] != opening:
        return None
    for mine, theirs in zip(known, messages, strict=False):
        if mine != theirs and not mine[:size] == theirs[:size] == opening:
            return None
    return prompt + output + [id for message in messages[len(known) + 1 :] for id in message]


def _messages(ids: list[int], end_of_turn: int) -> list[list[int]]:
    """Cut behind each such token; what follows the last one comes last."""
    cut, start = [], 0
    try:
        while True:
            end = ids.index(end_of_turn, start) + 1
            cut.append(ids[start:end])
            start = end
    except ValueError:
        return [*cut, ids[start:]]
