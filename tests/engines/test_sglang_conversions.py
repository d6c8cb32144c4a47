"""Which messages and responses run at token level on SGLang, and as which chats."""

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


def talk(*blocks: dict[str, Any], role: str = "user") -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = chat(messages=[{"role": role, "content": list(blocks)}])["messages"]
    return made


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def test_tool_results_stand_in_their_place() -> None:
    """Between the texts before and after them, each a message; one text alone is told without its part."""
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("a"), text(""), text("b")]}
    assert talk(text("x"), result, text("y"), text("z")) == [
        {"role": "user", "content": "x"},
        {"role": "tool", "tool_call_id": "t1", "content": [text("a"), text("b")]},
        {"role": "user", "content": [text("y"), text("z")]},
    ]
    assert [one["content"] for one in talk(result | {"content": None})] == [""]


def test_calls_and_thoughts_of_earlier_answers() -> None:
    """A server without a parser of reasoning drops thoughts, another one puts them back into the text."""
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1.5}}
    function = {"name": "look", "arguments": '{"a": 1.5}'}
    calls = [{"id": "t1", "type": "function", "function": function}]
    assert talk(thought, call, role="assistant") == [{"role": "assistant", "tool_calls": calls}]
    assert talk(thought, role="assistant") == [{"role": "assistant", "content": ""}]
    request = MESSAGE | {"messages": [{"role": "assistant", "content": [thought, text("Well.")]}]}
    made = chat_of_messages(request, "qwen3")
    assert made is not None
    assert made["messages"][0]["content"] == [text("<think>hm\n</think>"), text("Well.")]
    assert chat_of_messages(request, "deepseek-v3") is None


def test_what_else_a_message_asks_for() -> None:
    """Tools of chat's form, a form, and the sampling that it names."""
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
def test_messages_whose_prompt_only_the_engine_knows_pass_through(fields: dict[str, Any]) -> None:
    """So do those that it is to refuse."""
    assert chat_of_messages(MESSAGE | fields, None) is None


def test_items_of_one_answer_are_one_message() -> None:
    """What was said and called; in another phase it is another one."""
    said = {"type": "message", "id": "m1", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "nonsense"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "dust"}]}
    given = [{"role": "user", "content": "hi"}, said, call, output]
    _, answer, result = response(input=given)["messages"]
    calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    assert answer == {"role": "assistant", "content": [text("I look.")], "tool_calls": calls}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "dust"}
    assert len(response(input=[said | {"phase": "commentary"}, call])["messages"]) == 2


def test_what_else_a_response_asks_for() -> None:
    """Two tokens of its limit are not made; its temperature is 0.7 unless it says so; a developer is labelled."""
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
    """It keeps them, does more for them, knows what its template makes of them, or refuses them."""
    assert chat_of_response(RESPONSE | fields, is_storing=True) is None


def test_a_server_that_keeps_nothing_is_asked_for_no_response_later() -> None:
    """Then it matters to nobody what `store` says."""
    for store in ({}, {"store": True}):
        request = {name: value for name, value in RESPONSE.items() if name != "store"} | store
        assert chat_of_response(request, is_storing=False) is not None
        assert chat_of_response(request, is_storing=True) is None
