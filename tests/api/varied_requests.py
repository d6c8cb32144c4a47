"""Random requests to `/v1/messages` and `/v1/responses` as agents send them: conversations with tools, forms and
limits."""

import random
from typing import Any

from tests.api.requests_table import Case

Json = dict[str, Any]
_TEXTS = ("Hello 🙂", "Look around, then go on.", "a", "Grüße, 世界 \\ \" \u2028 '{}[]", "one\n\ntwo\n", " ")
_SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "enum": ["a", "b"]}, "deep": {"default": None}}}
_SHAPE = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
_NAMES = ("look", "run", "read_file")


def messages_case(dice: random.Random, model: str, number: int) -> Case:
    """One request to `/v1/messages`."""
    body: Json = {"model": model, "max_tokens": dice.choice((1, 8, 40, 200)), "stream": dice.random() < 0.5}
    body["messages"] = _conversation(dice)
    body |= _some(dice, {
        "system": dice.choice((dice.choice(_TEXTS), [_text(dice), _text(dice)], [])),
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 1,
        "metadata": {"user_id": "someone"},
        "my_field": [1, None],
        "ignore_eos": True,
    })  # fmt: skip
    match dice.choice(("plain", "tools", "tools", "stop", "form")):
        case "tools":
            tools = dice.sample(_NAMES, dice.randrange(1, 3))
            body["tools"] = [{"name": name, "description": f"To {name}.", "input_schema": _SCHEMA} for name in tools]
            body |= _some(dice, {"tool_choice": dice.choice(({"type": "auto"}, {"type": "none"}))})
            body["max_tokens"] = 200  # only the engine itself reports a call that is cut
        case "stop":
            body["stop_sequences"] = dice.choice((["e"], ["n t", " of the"]))
        case "form":
            body |= {"output_config": {"format": {"type": "json_schema", "schema": _SHAPE}}, "max_tokens": 60}
    return Case(f"messages {number}", "/v1/messages", body)


def responses_case(dice: random.Random, model: str, number: int) -> Case:
    """One request to `/v1/responses` that need not be stored."""
    body: Json = {"model": model, "max_output_tokens": dice.choice((3, 8, 40, 200)), "stream": dice.random() < 0.5}
    body["input"] = dice.choice(_TEXTS) if dice.random() < 0.3 else _items(dice)
    body["store"] = False
    body |= _some(dice, {
        "instructions": dice.choice(_TEXTS),
        "temperature": 0.0,
        "top_p": 0.9,
        "user": "someone",
        "truncation": "auto",
        "metadata": {"purpose": "test"},
        "parallel_tool_calls": True,
        "reasoning": dice.choice(({"effort": "low"}, {}, {"effort": "medium", "summary": "auto"})),
        "my_field": 1,
    })  # fmt: skip
    match dice.choice(("plain", "tools", "tools", "form", "text")):
        case "tools":
            tools = dice.sample(_NAMES, dice.randrange(1, 3))
            function = {"type": "function", "parameters": _SCHEMA}
            body["tools"] = [{**function, "name": name, "description": f"To {name}."} for name in tools]
            body |= _some(dice, {"tool_choice": dice.choice(("auto", "none"))})
            body["max_output_tokens"] = 200
        case "form":
            body |= {"text": {"format": {"type": "json_schema", "name": "s", "schema": _SHAPE}}}
            body["max_output_tokens"] = 60
        case "text":
            body["text"] = {"format": {"type": "text"}}
    return Case(f"responses {number}", "/v1/responses", body)


def _some(dice: random.Random, fields: Json) -> Json:
    return {name: value for name, value in fields.items() if dice.random() < 0.3}


def _text(dice: random.Random) -> Json:
    return {"type": "text", "text": dice.choice(_TEXTS)}


def _conversation(dice: random.Random) -> list[Json]:
    messages: list[Json] = [{"role": "user", "content": dice.choice((dice.choice(_TEXTS), [_text(dice)]))}]
    for number in range(dice.randrange(3)):
        call = {"type": "tool_use", "id": f"t{number}", "name": dice.choice(_NAMES), "input": {"path": "a"}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}"}
        thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
        blocks = [thought, _text(dice), call] if dice.random() < 0.5 else [call]
        messages.append({"role": "assistant", "content": blocks})
        content = dice.choice(("dust", [_text(dice)], [_text(dice), _text(dice)], None))
        more = [_text(dice)] if dice.random() < 0.5 else []
        messages.append({"role": "user", "content": [result | {"content": content}, *more]})
    return messages


def _items(dice: random.Random) -> list[Json]:
    items: list[Json] = [{"role": "user", "content": [{"type": "input_text", "text": dice.choice(_TEXTS)}]}]
    for number in range(dice.randrange(3)):
        if dice.random() < 0.5:
            text = {"type": "output_text", "text": dice.choice(_TEXTS), "annotations": []}
            items.append({"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [text]})
        call = {"type": "function_call", "call_id": f"c{number}", "name": dice.choice(_NAMES)}
        items.append(call | {"arguments": '{"path": "a"}'})
        output = dice.choice(("dust", [{"type": "input_text", "text": "dust"}]))
        items.append({"type": "function_call_output", "call_id": f"c{number}", "output": output})
        if dice.random() < 0.5:
            items.append({"role": "user", "content": dice.choice(_TEXTS)})
    return items
