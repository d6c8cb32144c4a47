"""What is told of a message that another kind of engine reads from its beginning once more."""

from typing import Any

import pytest

from gateway.turns.chain import Diverged
from gateway.turns.retold import rest_of


def call(arguments: str, index: int = 0, name: str = "run") -> dict[str, Any]:
    return {
        "index": index,
        "id": f"call-{index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


TOLD = {"role": "assistant", "content": "Let me", "tool_calls": [call('{"a"')]}


@pytest.mark.parametrize(
    ("delta", "rest"),
    [
        ({"role": "assistant", "content": "Let me see."}, {"content": " see."}),
        ({"role": "assistant", "content": "Let"}, {}),
        ({"content": "Let me", "reasoning_content": "hm"}, {"reasoning_content": "hm"}),
        ({"tool_calls": [call('{"a": 1}')]}, {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}),
        ({"tool_calls": [call('{"a"'), call("{}", 1)]}, {"tool_calls": [call("{}", 1)]}),
        ({"tool_calls": []}, {}),
    ],
)
def test_only_what_is_new_is_told(delta: dict[str, Any], rest: dict[str, Any]) -> None:
    """One reader may hold back more than the other did."""
    assert rest_of(delta, TOLD) == rest


@pytest.mark.parametrize(
    "delta",
    [{"content": "Let us"}, {"tool_calls": [call('{"b"')]}, {"tool_calls": [call("{}", name="walk")]}],
)
def test_another_message_is_no_continuation(delta: dict[str, Any]) -> None:
    """The client cannot be told to forget."""
    with pytest.raises(Diverged):
        rest_of(delta, TOLD)
