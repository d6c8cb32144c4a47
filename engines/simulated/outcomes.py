"""How choices ended, in the words of OpenAI's answers."""

from zlib import crc32

from engines.simulated.chat import CALL_TAIL, call_head
from engines.simulated.dialect import Shape
from engines.simulated.fields import Body
from engines.simulated.live import Generation
from engines.simulated.running import Running


def finish_reason(generation: Generation) -> str:
    """`stop`, `length`, `tool_calls`, or the engines' own `abort`."""
    if generation.is_aborted:
        return "abort"
    if generation.answer.call is not None and generation.answer.finish_reason == "stop":
        return "tool_calls"
    return generation.answer.finish_reason


def chat_finish_reason(generation: Generation, shape: Shape) -> str:
    """The same on the chat route."""
    reason = finish_reason(generation)
    return shape.named_call_reason if reason == "tool_calls" and generation.answer.is_named_call else reason


def call_id_of(answer_id: str, index: int, shape: Shape) -> str:
    """The id of the tool call in a choice."""
    return f"{shape.call_id_prefix}{crc32(f'{answer_id}-{index}'.encode()):08x}"


def usage_of(running: Running) -> Body:
    """The usage block so far: prompts counted once, cached tokens of the first choice."""
    completion_tokens = sum(generation.num_done for generation in running.generations)
    return {
        "prompt_tokens": running.asked.prompt_tokens,
        "total_tokens": running.asked.prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": running.generations[0].cached_tokens},
    }


def text_of(generation: Generation) -> str:
    """The text of the tokens made so far."""
    return "".join(generation.answer.texts[: generation.num_done])


def message_of(generation: Generation, call_id: str, shape: Shape) -> Body:
    """The assistant's message of a choice so far."""
    call = generation.answer.call
    if call is None or finish_reason(generation) != "tool_calls":
        return {"role": "assistant", "content": text_of(generation), **shape.message_fields}
    function = {"name": call.name, "arguments": call.arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": shape.call_content, **shape.message_fields, "tool_calls": calls}


def call_fragment(generation: Generation, begin: int, end: int) -> tuple[bool, str]:
    """The part of a tool call in tokens `begin` to `end`: whether its name ends in them, and which arguments."""
    call = generation.answer.call
    assert call is not None
    texts = generation.answer.texts
    text = "".join(texts)
    before = sum(map(len, texts[:begin]))
    after = before + sum(map(len, texts[begin:end]))
    first = len(call_head(call.name))
    last = len(text) - len(CALL_TAIL) if text.endswith(CALL_TAIL) else len(text)
    return before < first <= after, text[max(before, first) : max(min(after, last), first)]
