"""Which responses run at token level, and as which chat."""

from typing import Any

import pytest

from engines.vllm_responses import chat_of_response

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
ASKED: dict[str, Any] = {"model": "m", "input": "hi", "store": False}


def test_its_tools_are_chats_without_a_level() -> None:
    """And of what was said only the number of calls is left."""
    items = [{"type": "function_call", "name": "look"}, {"type": "function_call_output", "output": "dust"}]
    choice = {"type": "function", "name": "look"}
    chat = chat_of_response(ASKED | {"input": items, "tools": [TOOL], "tool_choice": choice}, is_storing=True)
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
def test_what_the_engine_keeps_or_does_itself_passes_through(fields: dict[str, Any]) -> None:
    """Unless its client says so, an engine may be asked for the response later."""
    assert chat_of_response(ASKED, is_storing=True) is not None
    assert chat_of_response(ASKED | fields, is_storing=True) is None


@pytest.mark.parametrize("store", [{}, {"store": None}, {"store": True}], ids=str)
def test_an_engine_that_keeps_nothing_need_not_see_it(store: dict[str, Any]) -> None:
    """What `store` says is nothing to it; one that keeps responses must see all others."""
    request = {name: value for name, value in ASKED.items() if name != "store"} | store
    assert chat_of_response(request, is_storing=False) is not None
    assert chat_of_response(request, is_storing=True) is None
    assert chat_of_response(request | {"previous_response_id": "resp_1"}, is_storing=False) is None
