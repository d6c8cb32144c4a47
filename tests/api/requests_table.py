"""Two hundred requests, most of them valid and some invalid, from a table and a fixed seed."""

import random
from dataclasses import dataclass
from itertools import product
from typing import Any

Json = dict[str, Any]
NUM_CASES = 227
_SEED = 20260203

_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Köln", "Oslo"]}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
_RUN = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}
_SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
_NAMED = {"type": "function", "function": {"name": "run"}}

_CHAT: tuple[tuple[str, Json], ...] = (
    ("plain", {}),
    ("tools auto", {"tools": [_WEATHER, _RUN], "tool_choice": "auto"}),
    ("tools auto to the end", {"tools": [_WEATHER, _RUN], "max_tokens": 200}),
    ("tools none", {"tools": [_WEATHER], "tool_choice": "none"}),
    ("tools required", {"tools": [_WEATHER, _RUN], "tool_choice": "required", "max_tokens": 60}),
    ("tools named", {"tools": [_WEATHER, _RUN], "tool_choice": _NAMED, "max_tokens": 60}),
    ("n", {"n": 3, "seed": 5}),
    ("logprobs", {"logprobs": True}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 3}),
    ("stop", {"stop": "e", "max_tokens": 40}),
    ("stop list", {"stop": ["zz", " the", "~"], "max_tokens": 40, "include_stop_str_in_output": True}),
    ("json_object", {"response_format": {"type": "json_object"}, "max_tokens": 40}),
    (
        "json_schema",
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA, "strict": True}},
            "max_tokens": 40,
        },
    ),
    ("seed", {"temperature": 1.0, "seed": 7}),
    ("max_completion_tokens", {"max_completion_tokens": 3}),
    ("the default limit of completions", {"max_tokens": 16}),
    ("unknown fields", {"my_field": {"deep": [1, None, "ü"]}, "another": True}),
    ("token ids", {"return_token_ids": True}),
    ("ignore_eos", {"ignore_eos": True, "min_tokens": 5}),
    ("user and metadata", {"user": "someone", "metadata": {"purpose": "test"}}),
    ("priority", {"priority": 3}),
    ("parallel_tool_calls", {"tools": [_RUN], "tool_choice": "none", "parallel_tool_calls": False}),
)
_STREAM: tuple[tuple[str, Json], ...] = (
    ("", {}),
    ("usage", {"stream_options": {"include_usage": True}}),
    ("continuous usage", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("continuous usage without usage", {"stream_options": {"continuous_usage_stats": True}}),
    ("usage false", {"stream_options": {"include_usage": False}}),
    ("no options", {"stream_options": None}),
)
_CONVERSATIONS: tuple[list[Json], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Repeat."}, {"role": "user", "content": "Grüße, 世界 🙂 \\ \" \u2028 \x00 '{}[]"}],
    [{"role": "user", "content": [{"type": "text", "text": "One part, "}, {"type": "text", "text": "two."}]}],
    [
        {"role": "user", "content": "What is the weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": '{"error": "abort", "finish_reason": "abort"}'},
    ],
)
_COMPLETIONS: tuple[tuple[str, Json], ...] = (
    ("plain", {"prompt": "Once upon a time"}),
    ("unicode", {"prompt": "Ünïcödé 世界 🙂🙃"}),
    ("token ids", {"prompt": [200, 201, 202]}),
    ("several", {"prompt": ["one", "two", "three"]}),
    ("n", {"prompt": "abc", "n": 2, "seed": 5}),
    ("echo", {"prompt": "é ß 🙂", "echo": True}),
    ("logprobs", {"prompt": "abc", "logprobs": 2}),
    ("return_token_ids", {"prompt": "abc", "return_token_ids": True}),
    ("stop", {"prompt": "abc", "stop": ["e"], "max_tokens": 40}),
    ("seed", {"prompt": "abc", "temperature": 1.0, "seed": 3}),
    ("no limit", {"prompt": "abc", "max_tokens": None}),
)
_LOOK_AT = {
    "type": "function",
    "name": "look",
    "description": "Look there.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string", "enum": ["a", "b"]}},
        "required": ["path"],
        "additionalProperties": False,
    },
    "strict": True,
}
_ITEMS: list[Json] = [
    {"role": "user", "content": [{"type": "input_text", "text": "Look around."}]},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"path": "a"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "dust"},
    {"role": "user", "content": "Go on."},
]
_CALLED: Json = {
    "input": "Look around.",
    "store": False,
    "tools": [_LOOK_AT],
    "tool_choice": "required",
    "max_output_tokens": 60,
}
_SHAPE: Json = {
    "format": {
        "type": "json_schema",
        "name": "short",
        "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    }
}
_RESPONSES: tuple[tuple[str, Json], ...] = (
    ("text", {"input": "Hello 🙂"}),
    ("items", {"instructions": "Be short.", "input": [{"role": "user", "content": "Hello"}]}),
    ("tools", {"input": "Weather?", "tools": [{"type": "function", "name": "run", "parameters": {"type": "object"}}]}),
    ("limit", {"input": "Hello", "max_output_tokens": 2}),
    ("unknown fields", {"input": "Hello", "my_field": [1]}),
    ("metadata", {"input": "Hello", "metadata": {"purpose": "test"}, "temperature": 0.0}),
    ("not stored", {"input": "Hello 🙂", "store": False}),
    ("not stored, items", {"input": _ITEMS, "store": False, "instructions": "Be short.", "max_output_tokens": 2}),
    ("not stored, echoed", {"input": "Hello", "store": False, "user": "me", "truncation": "auto", "my_field": 1}),
    ("not stored, tools", {"input": _ITEMS, "store": False, "tools": [_LOOK_AT], "max_output_tokens": 60}),
    ("not stored, call", _CALLED),
    ("not stored, call cut", _CALLED | {"max_output_tokens": 10}),
    ("not stored, no call", _CALLED | {"tool_choice": "none", "max_output_tokens": 10}),
    ("not stored, named call", _CALLED | {"tool_choice": {"type": "function", "name": "look"}}),
    ("not stored, schema", {"input": "Hello", "store": False, "text": _SHAPE, "max_output_tokens": 40}),
)
_TOOL = {
    "name": "run",
    "description": "Run it.",
    "input_schema": {"type": "object", "properties": {"fast": {"type": "boolean"}}, "required": ["fast"]},
    "strict": True,  # otherwise a call may be any JSON, from which the engine cannot build a message
}
_LOOK = {
    "name": "look",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string", "enum": ["a", "b"]}}},
    "strict": True,
}
_AGENT: list[Json] = [
    {"role": "user", "content": "Look around."},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"path": "a"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "dust"}]},
            {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
        ],
    },
]
_MESSAGES: tuple[tuple[str, Json], ...] = (
    ("text", {}),
    ("system", {"system": "Be short."}),
    ("system parts", {"system": [{"type": "text", "text": "Be short."}]}),
    ("stop_sequences", {"stop_sequences": ["e"], "max_tokens": 40}),
    ("tools", {"tools": [_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 60}),
    ("unknown fields", {"my_field": 1, "n": 2, "logprobs": True, "stop": "e"}),
    ("tool choice auto", {"tools": [_TOOL, _LOOK], "tool_choice": {"type": "auto"}, "max_tokens": 60}),
    ("tool choice by default", {"tools": [_TOOL], "max_tokens": 200}),
    ("tool choice none", {"tools": [_TOOL], "tool_choice": {"type": "none"}}),
    ("tool named", {"tools": [_TOOL, _LOOK], "tool_choice": {"type": "tool", "name": "look"}, "max_tokens": 60}),
    ("tool that is cut", {"tools": [_LOOK], "tool_choice": {"type": "any"}, "max_tokens": 20}),
    (
        "one tool",
        {"tools": [_TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 60},
    ),
    ("tools with stop_sequences", {"tools": [_TOOL], "stop_sequences": ["e"], "max_tokens": 40}),
    ("tool results", {"tools": [_TOOL, _LOOK], "messages": _AGENT, "max_tokens": 40}),
    ("thinking", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}),
    ("thinking by budget", {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1000}),
    ("thinking disabled", {"thinking": {"type": "disabled"}}),
    ("form", {"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}, "max_tokens": 40}),
    ("dice", {"temperature": 1.0, "top_k": 1, "top_p": 0.9, "metadata": {"user_id": "someone"}}),
)
_CHAT_BAD: tuple[tuple[str, Any], ...] = (
    ("messages a string", {"messages": "Hello"}),
    ("no messages", {"messages": None}),
    ("empty messages", {"messages": []}),
    ("max_tokens a word", {"max_tokens": "many"}),
    ("max_tokens negative", {"max_tokens": -1}),
    ("max_tokens too many", {"max_tokens": 9_000_000}),
    ("temperature negative", {"temperature": -1}),
    ("n is 0", {"n": 0}),
    ("too long", {"messages": [{"role": "user", "content": "ab cd " * 9_000}]}),
    ("tool_choice without tools", {"tool_choice": _NAMED}),
    ("stream_options without stream", {"stream_options": {"include_usage": True}}),
    ("stream_options a word", {"stream": True, "stream_options": "usage"}),
    ("include_usage a list", {"stream": True, "stream_options": {"include_usage": [1]}}),
    ("top_logprobs too many", {"logprobs": True, "top_logprobs": 5_000}),
    ("bad schema", {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": 5}}}}),
    ("stop a list of numbers", {"stop": [5]}),
)
# Refused by the gateway, which asks no engine.
_REFUSED_HERE: tuple[tuple[str, Any, int], ...] = (
    ("not JSON", b'{"model": ', 400),
    ("nothing", b"", 400),
    ("a list", [], 400),
    ("stream a word", {"stream": "maybe"}, 400),
    ("unknown model", {"model": "nope"}, 404),
    ("unknown model in a stream", {"model": "nope", "stream": True}, 404),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `refused_with`: the status with which the gateway answers without asking an engine."""

    name: str
    path: str
    body: Any
    refused_with: int | None = None


def make_cases(model: str) -> list[Case]:
    """The same requests at every call."""
    cases = [*_bad_cases(model), *_small_apis(model), *_systematic_chats(model), *_spelled_streams(model)]
    dice = random.Random(_SEED)
    while len(cases) < NUM_CASES:
        picked = dice.sample(_CHAT, 2)
        stream, options = dice.choice(((False, {}), *((True, options) for _, options in _STREAM)))
        merged: Json = {}
        for _, fields in picked:
            merged |= fields
        body = _chat(model, dice.choice(_CONVERSATIONS), stream, merged | options)
        name = f"chat, {' + '.join(name for name, _ in picked)}, {'stream' if stream else 'whole'} {options}"
        cases.append(Case(name, "/v1/chat/completions", body))
    assert len(cases) == NUM_CASES, len(cases)
    return cases


def _chat(model: str, messages: list[Json], stream: bool, fields: Json) -> Json:
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0.0, **fields}
    return {**body, "stream": True} if stream else body


def _systematic_chats(model: str) -> list[Case]:
    cases = []
    for (name, fields), stream in product(_CHAT, (False, True)):
        body = _chat(model, _CONVERSATIONS[0], stream, fields)
        cases.append(Case(f"chat, {name}, {'stream' if stream else 'whole'}", "/v1/chat/completions", body))
    for (name, options), messages in product(_STREAM, _CONVERSATIONS):
        body = _chat(model, messages, True, options)
        cases.append(Case(f"chat, talk {_CONVERSATIONS.index(messages)}, stream {name}", "/v1/chat/completions", body))
    return cases


def _small_apis(model: str) -> list[Case]:
    cases = []
    for (name, fields), stream in product(_COMPLETIONS, (False, True)):
        body = {"model": model, "max_tokens": 8, "temperature": 0.0, **fields, "stream": stream}
        cases.append(Case(f"completions, {name}, {'stream' if stream else 'whole'}", "/v1/completions", body))
    for name, options in _STREAM[1:]:
        body = {"model": model, "prompt": "abc", "max_tokens": 4, "temperature": 0.0, "stream": True, **options}
        cases.append(Case(f"completions, stream {name}", "/v1/completions", body))
    for (name, fields), stream in product(_RESPONSES, (False, True)):
        body = {"model": model, "max_output_tokens": 8, "temperature": 0.0, **fields, "stream": stream}
        cases.append(Case(f"responses, {name}, {'stream' if stream else 'whole'}", "/v1/responses", body))
    for (name, fields), stream in product(_MESSAGES, (False, True)):
        messages = [{"role": "user", "content": "Hello 🙂"}]
        body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0.0, **fields, "stream": stream}
        cases.append(Case(f"messages, {name}, {'stream' if stream else 'whole'}", "/v1/messages", body))
    cases += [
        Case("count_tokens", "/v1/messages/count_tokens", {"model": model, "messages": _CONVERSATIONS[0]}),
        Case("tokenize", "/tokenize", {"model": model, "prompt": "Hé🙂"}),
        Case("tokenize messages", "/tokenize", {"model": model, "messages": _CONVERSATIONS[1]}),
        Case("tokenize nothing", "/tokenize", {"model": model}),
        Case("detokenize", "/detokenize", {"model": model, "tokens": [200, 201]}),
        Case("detokenize a word", "/detokenize", {"model": model, "tokens": "abc"}),
        Case("embeddings", "/v1/embeddings", {"model": model, "input": "Hello"}),
        Case("a model without a name", "/tokenize", {"model": "", "prompt": "hi"}),
        Case(
            "a chat's model without a name",
            "/v1/chat/completions",
            {"model": "", "messages": _CONVERSATIONS[0], "max_tokens": 4, "temperature": 0.0},
        ),
        Case("no model", "/v1/chat/completions", {"messages": _CONVERSATIONS[0], "max_tokens": 4, "temperature": 0.0}),
    ]
    return cases


def _spelled_streams(model: str) -> list[Case]:
    cases = []
    for stream in (0, 1, 1.0, "true", "False", "yes", "off"):
        body = _chat(model, _CONVERSATIONS[0], False, {"stream": stream})
        cases.append(Case(f"chat, stream {stream!r}", "/v1/chat/completions", body))
    return cases


def _bad_cases(model: str) -> list[Case]:
    cases = []
    for name, fields in _CHAT_BAD:
        body = {
            name: value for name, value in _chat(model, _CONVERSATIONS[0], False, fields).items() if value is not None
        }
        cases.append(Case(f"bad chat, {name}", "/v1/chat/completions", body))
    for name, fields, status in _REFUSED_HERE:
        body = _chat(model, _CONVERSATIONS[0], False, fields) if isinstance(fields, dict) else fields
        cases.append(Case(f"refused chat, {name}", "/v1/chat/completions", body, status))
    messages = {"model": model, "messages": _CONVERSATIONS[0]}
    cases += [
        Case("bad completion, no prompt", "/v1/completions", {"model": model}),
        Case("bad completion, token id", "/v1/completions", {"model": model, "prompt": [2**40]}),
        Case("bad response, no input", "/v1/responses", {"model": model}),
        Case(
            "bad response, unknown previous",
            "/v1/responses",
            {"model": model, "input": "a", "previous_response_id": "resp_x"},
        ),
        Case("bad message, no max_tokens", "/v1/messages", messages),
        Case("bad message, model", "/v1/messages", {**messages, "model": "nope", "max_tokens": 1}, 404),
    ]
    return cases
