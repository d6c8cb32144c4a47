"""Which responses run at token level on vLLM, and as which chat requests."""

from typing import Any

import pytest

from engines.vllm_responses import chat_of_response

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
REQUEST: dict[str, Any] = {"model": "m", "input": "hi", "store": False}


def test_tools_lose_a_level_and_only_call_counts_remain() -> None:
    """Tools take the form of a chat request. Of the items, the parser gets only the number of calls."""
    items = [{"type": "function_call", "name": "look"}, {"type": "function_call_output", "output": "dust"}]
    choice = {"type": "function", "name": "look"}
    chat = chat_of_response(REQUEST | {"input": items, "tools": [TOOL], "tool_choice": choice}, is_storing=True)
    assert chat is not None
    function = {"name": "look", "parameters": {"type": "object"}, "strict": True}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert [len(message.get("tool_calls", ())) for message in chat["messages"]] == [0, 1]


@pytest.mark.parametrize(
    "fields",
    [
        {"store": None},
        {"store": True},
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"top_logprobs": 2},
        {"include": ["message.output_text.logprobs"]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [TOOL | {"namespace": "n"}]},
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}},
        {"tools": [TOOL], "tool_choice": "any"},
    ],
    ids=str,
)
def test_responses_that_the_engine_stores_or_serves_pass_through(fields: dict[str, Any]) -> None:
    """Unless `store` is false, the client may ask the engine for the response later."""
    assert chat_of_response(REQUEST, is_storing=True) is not None
    assert chat_of_response(REQUEST | fields, is_storing=True) is None


@pytest.mark.parametrize("store", [{}, {"store": None}, {"store": True}], ids=str)
def test_store_does_not_matter_on_an_engine_that_stores_nothing(store: dict[str, Any]) -> None:
    """An engine that stores responses must see the request, and every engine must see one that names an earlier
    response."""
    request = {name: value for name, value in REQUEST.items() if name != "store"} | store
    assert chat_of_response(request, is_storing=False) is not None
    assert chat_of_response(request, is_storing=True) is None
    assert chat_of_response(request | {"previous_response_id": "resp_1"}, is_storing=False) is None
