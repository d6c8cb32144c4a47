"""What is told of a message that another kind of engine reads from its beginning once more."""

import json
from typing import Any

import pytest

from gateway.turns.chain import Diverged
from gateway.turns.deltas import rest_of


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
        ({"tool_calls": [call("")]}, {}),
        ({"tool_calls": [call('{ "a": 1}')]}, {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}),
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


def test_reasoning_goes_on_under_the_name_it_began_with() -> None:
    """vLLM and SGLang call it differently."""
    assert rest_of({"reasoning_content": "hm, so"}, {"reasoning": "hm"}) == {"reasoning": ", so"}
    assert rest_of({"reasoning": "hm, so"}, {"reasoning_content": "hm"}) == {"reasoning_content": ", so"}


SPACED = r'{"a b": "c \" :  d\\", "e": [1, 2], "f": {}}'
TIGHT = r'{"a b":"c \" :  d\\","e":[1,2],"f":{}}'


@pytest.mark.parametrize(("written", "told"), [(SPACED, TIGHT), (TIGHT, SPACED), (SPACED, SPACED)])
def test_arguments_with_other_blanks_are_the_same(written: str, told: str) -> None:
    """One kind of engine tells them as the model wrote them, another writes them anew; wherever the first ended."""
    for length in range(len(told) + 1):
        begun = {"tool_calls": [call(told[:length])]}
        rest = rest_of({"tool_calls": [call(written)]}, begun, is_whole=True)
        behind = rest["tool_calls"][0]["function"]["arguments"] if rest else ""
        assert json.loads(told[:length] + behind) == json.loads(written)


def test_arguments_with_other_blanks_within_a_string_are_others() -> None:
    """There they mean something."""
    with pytest.raises(Diverged):
        rest_of({"tool_calls": [call('{"a": "b c"}')]}, {"tool_calls": [call('{"a": "b  c')]})


@pytest.mark.parametrize(
    "whole", [{"content": "Let me"}, {"content": "Let me", "tool_calls": [call("{")]}, {"tool_calls": [call('{"a"')]}]
)
def test_a_whole_message_has_all_that_was_told(whole: dict[str, Any]) -> None:
    """A reader that leaves some of it out cannot end what another began, though it may have been on its way there."""
    assert rest_of(whole, TOLD) == {}
    with pytest.raises(Diverged):
        rest_of(whole, TOLD, is_whole=True)


def test_blanks_at_the_end_may_be_left_out() -> None:
    """SGLang takes them away before a call."""
    told = {"content": "Let me\n\n", "tool_calls": [call('{"a": 1}\n')]}
    assert rest_of({"content": "Let me", "tool_calls": [call('{"a": 1}')]}, told, is_whole=True) == {}
