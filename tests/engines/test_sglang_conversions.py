"""Which messages and responses run at token level on SGLang, and as which chat requests."""

from typing import Any

import pytest

from engines.sglang_anthropic import chat_of_messages
from engines.sglang_responses import chat_of_response

SCHEMA = {"type": "object", "properties": {}}
TOOL = {"name": "look", "input_schema": {"properties": {}}}
MESSAGE: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
FUNCTION = {"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA}
RESPONSE: dict[str, Any] = {"model": "m", "input": "hi", "store": False}


def chat(**fields: Any) -> dict[str, Any]:
    made = chat_of_messages(MESSAGE | fields, None)
    assert made is not None
    return made


def response(**fields: Any) -> dict[str, Any]:
    made = chat_of_response(RESPONSE | fields, is_storing=True)
    assert made is not None
    return made


def messages_of(*blocks: dict[str, Any], role: str = "user") -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = chat(messages=[{"role": role, "content": list(blocks)}])["messages"]
    return made


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def test_tool_results_keep_their_place() -> None:
    """Between the texts before and after them, each as a message; a single text becomes a plain string."""
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("a"), text(""), text("b")]}
    assert messages_of(text("x"), result, text("y"), text("z")) == [
        {"role": "user", "content": "x"},
        {"role": "tool", "tool_call_id": "t1", "content": [text("a"), text("b")]},
        {"role": "user", "content": [text("y"), text("z")]},
    ]
    assert [one["content"] for one in messages_of(result | {"content": None})] == [""]


def test_earlier_answers_keep_calls_and_reasoning() -> None:
    """A server without a reasoning parser drops reasoning; another one puts it back into the text."""
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1.5}}
    function = {"name": "look", "arguments": '{"a": 1.5}'}
    calls = [{"id": "t1", "type": "function", "function": function}]
    assert messages_of(thought, call, role="assistant") == [{"role": "assistant", "tool_calls": calls}]
    assert messages_of(thought, role="assistant") == [{"role": "assistant", "content": ""}]
    request = MESSAGE | {"messages": [{"role": "assistant", "content": [thought, text("Well.")]}]}
    made = chat_of_messages(request, "qwen3")
    assert made is not None
    assert made["messages"][0]["content"] == [text("<think>hm\n</think>"), text("Well.")]
    assert chat_of_messages(request, "deepseek-v3") is None


def test_fields_of_a_message_request_become_chat_fields() -> None:
    """Tools, tool choice, response format and sampling parameters."""
    made = chat(
        tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}, top_k=3, stop_sequences=["x"]
    )
    function = {"name": "look", "description": "", "parameters": SCHEMA, "strict": False}
    assert made["tools"] == [{"type": "function", "function": function}]
    assert (made["tool_choice"], made["parallel_tool_calls"], made["top_k"], made["stop"]) == ("auto", False, 3, ["x"])
    shape = {"type": "json_schema", "schema": SCHEMA}
    assert chat(output_config={"format": shape})["response_format"]["json_schema"]["schema"] == SCHEMA
    assert "tool_choice" not in chat(tools=[]) and chat(tools=[TOOL])["tool_choice"] == "auto"


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "adaptive"}},
        {"output_config": {"effort": "low"}},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"tools": [TOOL | {"defer_loading": True}]},
        {"tools": [TOOL], "tool_choice": {"type": "any"}},
        {"routed_dp_rank": 1},
        {"max_tokens": "9"},
        {"stop_sequences": "x"},
    ],
    ids=str,
)
def test_messages_that_only_the_engine_can_render_pass_through(fields: dict[str, Any]) -> None:
    """So do those that the engine must refuse."""
    assert chat_of_messages(MESSAGE | fields, None) is None


def test_items_of_one_answer_become_one_message() -> None:
    """Text and call together; an item of another phase becomes another message."""
    message = {
        "type": "message",
        "id": "m1",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I look."}],
    }
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "nonsense"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "dust"}]}
    given = [{"role": "user", "content": "hi"}, message, call, output]
    _, answer, result = response(input=given)["messages"]
    calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    assert answer == {"role": "assistant", "content": [text("I look.")], "tool_calls": calls}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "dust"}
    assert len(response(input=[message | {"phase": "commentary"}, call])["messages"]) == 2


def test_fields_of_a_response_request_become_chat_fields() -> None:
    """The limit is two tokens less, the default temperature is 0.7, and a developer message gets a label."""
    made = response(max_output_tokens=9, input=[{"role": "developer", "content": "Be short."}], tools=[FUNCTION])
    assert (made["max_tokens"], made["temperature"]) == (7, 0.7)
    assert made["messages"] == [{"role": "system", "content": "Developer instructions:\nBe short."}]
    assert made["tools"][0]["function"] == {
        "name": "look", "description": "Look.", "parameters": SCHEMA, "strict": False
    }  # fmt: skip
    assert response(reasoning={})["reasoning_effort"] == "medium"


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"include": ["message.output_text.logprobs"]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function", "name": "bare"}]},
        {"tools": [FUNCTION], "tool_choice": "required"},
        {"instructions": "x", "input": [{"role": "developer", "content": "y"}]},
        {"input": [{"role": "system", "content": [{"type": "input_text", "text": "x"}]}]},
        {"input": [{"type": "reasoning", "summary": []}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
        {"metadata": "x"},
        {"temperature": True},
        {"truncation": "other"},
    ],
    ids=str,
)
def test_responses_that_only_the_engine_can_serve_pass_through(fields: dict[str, Any]) -> None:
    """The engine stores them, does more for them, knows what its template makes of them, or refuses them."""
    assert chat_of_response(RESPONSE | fields, is_storing=True) is None


def test_store_does_not_matter_on_a_server_that_stores_nothing() -> None:
    """Nobody can ask that server for the response later."""
    for store in ({}, {"store": True}):
        request = {name: value for name, value in RESPONSE.items() if name != "store"} | store
        assert chat_of_response(request, is_storing=False) is not None
        assert chat_of_response(request, is_storing=True) is None
