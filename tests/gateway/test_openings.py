"""The events that open a stream are told from those that have some of its answer."""

from typing import Any

import pytest

from gateway.messages.openings import is_opening


def chat(delta: Any, **more: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 1, "delta": delta, "logprobs": None, "finish_reason": None, **more}]}


def typed(kind: Any, **more: Any) -> dict[str, Any]:
    return {"type": kind, **more}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 0}}


@pytest.mark.parametrize(
    ("api", "event"),
    [
        ("chat", chat({"role": "assistant", "content": ""})),
        ("chat", chat({"role": "assistant", "content": None, "tool_calls": None, "reasoning_content": None})),
        ("chat", chat({}) | {"prompt_token_ids": [1, 2], "usage": USAGE["usage"]}),
        ("chat", USAGE),
        ("completions", USAGE),
        ("completions", {"choices": [{"index": 0, "text": "", "finish_reason": None}]}),
        ("responses", typed("response.created", response={"id": "r", "status": "in_progress"})),
        ("responses", typed("response.in_progress", response={"id": "r", "status": "in_progress"})),
        ("messages", typed("message_start", message={"id": "m", "content": []})),
        ("messages", typed("ping")),
        ("messages", typed("message_delta", delta={"stop_reason": None}, usage={"output_tokens": 0})),
    ],
)
def test_an_event_without_content_is_an_opening(api: Any, event: dict[str, Any]) -> None:
    """Another engine can start the answer over after it."""
    assert is_opening(api, event)


@pytest.mark.parametrize(
    ("api", "event"),
    [
        ("chat", chat({"role": "assistant", "content": "a"})),
        ("chat", chat({"reasoning": "a"})),
        ("chat", chat({"tool_calls": [{"index": 0}]})),
        ("chat", chat({}, finish_reason="stop")),
        ("chat", chat({"content": ""}, token_ids=[5])),
        ("chat", chat([1])),
        ("chat", {"id": "c"}),
        ("completions", {"choices": [{"index": 0, "text": "a"}]}),
        ("generate", {"choices": [{"index": 0, "token_ids": [5]}]}),
        ("generate", {"text": "", "output_ids": [], "meta_info": {}}),
        ("responses", typed("response.output_item.added", item={"type": "message"})),
        ("responses", typed("response.completed", response={"status": "completed"})),
        ("messages", typed("content_block_start", index=0, content_block={"type": "tool_use"})),
        ("messages", typed("message_delta", delta={"stop_reason": "end_turn"})),
        ("messages", typed(["odd"])),
        ("other", {"data": []}),
    ],
)
def test_any_other_event_begins_the_answer(api: Any, event: dict[str, Any]) -> None:
    """What is of unknown form must not be held back."""
    assert not is_opening(api, event)
