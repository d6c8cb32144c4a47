"""What the simulated model answers: all of it is decided before the first step, because nothing later can change it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import orjson

from engines.simulated.chat import ToolCall, call_text
from engines.simulated.json_shapes import instance_of
from engines.simulated.text import ASSISTANT, END, Continuation, Tokenizer, packed, rival

Rated = tuple[float, list[tuple[int, float]]]
"""A token's log-probability, and alternatives with theirs, the token itself first."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request wants of one choice.

    Args:
        max_tokens: at least 1.
        schema: the answer is JSON that this schema accepts. None: free text.
        tools: OpenAI tool definitions.
        tool_choice: `none`, `auto`, `required`, or a function's name after `=`.
        num_logprobs: alternatives listed with each token. None: no log-probabilities.
    """

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    seed: int | None = None
    index: int = 0
    schema: dict[str, Any] | None = None
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: str = "none"
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Args:
        texts: what each token adds to the text; a stop string and everything after it are cut off.
        stop_reason: the stop string or token id that ended it.
        call: the tool call in its text, if it is one.
        is_named_call: the request named the tool.
        logprobs: of each token, if they were asked for.
    """

    token_ids: list[int]
    texts: list[str]
    finish_reason: str
    stop_reason: str | int | None = None
    call: ToolCall | None = None
    logprobs: list[Rated] | None = None
    is_named_call: bool = False


def answer(
    prompt: list[int],
    wish: Wish,
    tokenizer: Tokenizer,
    weights: str,
    mean_tokens: int,
    made: Answer | None = None,
    num_made: int = 0,
) -> Answer:
    """The answer to a prompt, a pure function of its arguments.

    Args:
        weights: greedy text depends on them; the form of JSON and tool calls does not.
        made: an answer by other weights, of which `num_made` tokens exist already; the answer continues from there.

    Raises:
        ValueError: the prompt contains an id that is not a token, or a schema is not understood.
    """
    if structured := _structured_text(prompt, wish, _salt(wish, "default")):
        text, call = structured
        token_ids = [*tokenizer.encode(text), END]
        made_before = _after_last_turn(prompt)
        if made_before and token_ids[: len(made_before)] == made_before:
            token_ids = token_ids[len(made_before) :]
        finish = "stop" if len(token_ids) <= wish.max_tokens else "length"
        token_ids = token_ids[: wish.max_tokens]
        is_named_call = call is not None and wish.tool_choice.startswith("=")
        logprobs = _flat_logprobs(token_ids, wish)
        return Answer(token_ids, tokenizer.texts(token_ids), finish, None, call, logprobs, is_named_call)
    before = made.token_ids[:num_made] if made else []
    rated = made.logprobs[:num_made] if made and made.logprobs else []
    return _free_answer(prompt, wish, tokenizer, _salt(wish, weights), mean_tokens, before, rated)


def _salt(wish: Wish, weights: str) -> int:
    if wish.index == 0 and wish.seed is None and weights == "default":
        return 0
    # Choices with a seed use successive seeds, as in vLLM (0.33, v1/engine/parallel_sampling.py).
    dice = f"{wish.index}/None" if wish.seed is None else f"0/{wish.seed + wish.index}"
    return crc32(f"{dice}/{weights}".encode())


def _free_answer(
    prompt: list[int],
    wish: Wish,
    tokenizer: Tokenizer,
    salt: int,
    mean_tokens: int,
    token_ids: list[int],
    rated: list[Rated],
) -> Answer:
    continuation = Continuation(packed([*prompt, *token_ids]), salt, mean_tokens)
    logprobs: list[Rated] | None = None if wish.num_logprobs is None else rated
    text = tokenizer.decode(token_ids)
    finish, stop_reason = "length", None
    stops = set(wish.stop_token_ids)
    while len(token_ids) < wish.max_tokens:
        id = continuation.next(may_end=not wish.ignore_eos and len(token_ids) >= wish.min_tokens)
        token_ids.append(id)
        if logprobs is not None:
            logprobs.append(_logprobs_of(id, continuation, wish.num_logprobs or 0))
        if id == END:
            finish = "stop"
            break
        if len(token_ids) <= wish.min_tokens:
            text += tokenizer.decode([id])
            continue
        if id in stops:
            finish, stop_reason = "stop", id
            break
        if wish.stop:
            text += tokenizer.decode([id])
            if found := [s for s in wish.stop if s and s in text[-len(s) - 8 :]]:
                return _stopped_at(found[0], text, token_ids, wish, tokenizer, logprobs)
    return Answer(token_ids, tokenizer.texts(token_ids), finish, stop_reason, None, logprobs)


def _stopped_at(
    stop: str,
    text: str,
    token_ids: list[int],
    wish: Wish,
    tokenizer: Tokenizer,
    logprobs: list[Rated] | None,
) -> Answer:
    """The answer whose text ends before the stop string, or after it."""
    length = text.rfind(stop) + (len(stop) if wish.include_stop else 0)
    texts = []
    for part in tokenizer.texts(token_ids):
        texts.append(part[:length])
        length -= len(texts[-1])
    return Answer(token_ids, texts, "stop", stop, None, logprobs)


def _structured_text(prompt: list[int], wish: Wish, salt: int) -> tuple[str, ToolCall | None] | None:
    """The text of an answer with a form, and the tool call in it; None for free text.

    It depends on the prompt without the part of the answer already made, so that a resumed answer continues
    identically.
    """
    if wish.schema is None and (not wish.tools or wish.tool_choice == "none"):
        return None
    seed = crc32(packed(prompt[: len(prompt) - len(_after_last_turn(prompt))])) ^ salt
    try:
        if wish.tools and wish.tool_choice != "none" and (wish.tool_choice != "auto" or seed >> 5 & 1):
            call = _call(wish, seed)
            return call_text(call), call
        if wish.schema is not None:
            return orjson.dumps(instance_of(wish.schema, seed)).decode(), None
    except (AttributeError, KeyError, IndexError, TypeError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"The JSON schema is not understood: {error}") from error
    return None


def _call(wish: Wish, seed: int) -> ToolCall:
    functions = [tool.get("function", tool) for tool in wish.tools]
    named = [f for f in functions if f"={f.get('name')}" == wish.tool_choice]
    function = named[0] if named else functions[(seed >> 9) % len(functions)]
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return ToolCall(function.get("name", ""), orjson.dumps(instance_of(schema, seed)).decode())


def _after_last_turn(prompt: list[int]) -> list[int]:
    """The tokens after the last one that opens an assistant's message."""
    for i in range(len(prompt) - 1, -1, -1):
        if prompt[i] == ASSISTANT:
            return prompt[i + 1 :]
    return []


def _logprobs_of(id: int, continuation: Continuation, num_rivals: int) -> Rated:
    own = continuation.log_probability(0)
    rivals = [(rival(id, rank), continuation.log_probability(rank)) for rank in range(1, num_rivals)]
    return own, [(id, own), *rivals][:num_rivals]


def _flat_logprobs(token_ids: list[int], wish: Wish) -> list[Rated] | None:
    num = wish.num_logprobs
    if num is None:
        return None
    return [
        (-0.01, [(id, -0.01), *((rival(id, rank), -3.0 - rank) for rank in range(1, num))][:num]) for id in token_ids
    ]
