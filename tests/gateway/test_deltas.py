"""What is still told of a message after another kind of engine has read it again from its beginning."""

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
def test_a_different_message_diverges(delta: dict[str, Any]) -> None:
    """The client cannot be made to forget what it was told."""
    with pytest.raises(Diverged):
        rest_of(delta, TOLD)


def test_reasoning_continues_under_its_first_name() -> None:
    """vLLM and SGLang name it differently."""
    assert rest_of({"reasoning_content": "hm, so"}, {"reasoning": "hm"}) == {"reasoning": ", so"}
    assert rest_of({"reasoning": "hm, so"}, {"reasoning_content": "hm"}) == {"reasoning_content": ", so"}


SPACED = r'{"a b": "c \" :  d\\", "e": [1, 2], "f": {}}'
TIGHT = r'{"a b":"c \" :  d\\","e":[1,2],"f":{}}'


@pytest.mark.parametrize(("written", "told"), [(SPACED, TIGHT), (TIGHT, SPACED), (SPACED, SPACED)])
def test_arguments_that_differ_only_in_whitespace_match(written: str, told: str) -> None:
    """One kind of engine tells arguments as the model wrote them, the other rewrites them; any cut is possible."""
    for length in range(len(told) + 1):
        begun = {"tool_calls": [call(told[:length])]}
        rest = rest_of({"tool_calls": [call(written)]}, begun, is_whole=True)
        more = rest["tool_calls"][0]["function"]["arguments"] if rest else ""
        assert json.loads(told[:length] + more) == json.loads(written)


def test_whitespace_within_a_string_argument_must_match() -> None:
    """Within a string, whitespace is content."""
    with pytest.raises(Diverged):
        rest_of({"tool_calls": [call('{"a": "b c"}')]}, {"tool_calls": [call('{"a": "b  c')]})


@pytest.mark.parametrize(
    "whole", [{"content": "Let me"}, {"content": "Let me", "tool_calls": [call("{")]}, {"tool_calls": [call('{"a"')]}]
)
def test_a_whole_message_must_contain_all_that_was_told(whole: dict[str, Any]) -> None:
    """A reader that omits some of it cannot end what another reader began; an incomplete one may still get there."""
    assert rest_of(whole, TOLD) == {}
    with pytest.raises(Diverged):
        rest_of(whole, TOLD, is_whole=True)


def test_trailing_whitespace_may_be_missing() -> None:
    """SGLang removes it before a call."""
    told = {"content": "Let me\n\n", "tool_calls": [call('{"a": 1}\n')]}
    assert rest_of({"content": "Let me", "tool_calls": [call('{"a": 1}')]}, told, is_whole=True) == {}
