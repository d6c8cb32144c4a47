"""A chat answer rewritten as one of Anthropic's messages: whole, and as a stream that is cut anywhere."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.messages.answers import Usage
from gateway.messages.anthropic import SGLANG, VLLM, MessageEvents, Variant, message_of
from gateway.turns.ask import Ask
from gateway.turns.frames import MessageFrame
from tests.api.differential import events_of

HEAD = {"id": "chatcmpl-1", "model": "m"}
USAGE = Usage(10, 3, 4)
TEXTS = st.text(max_size=12)
CALLS = st.lists(
    st.tuples(st.text(min_size=1, max_size=5), st.dictionaries(TEXTS, st.integers(), max_size=2)), max_size=3
)


def stream_events(
    deltas: list[dict[str, Any]], reason: str, stop: Any = None, variant: Variant = VLLM
) -> list[dict[str, Any]]:
    """The events of a message whose chat stream has these deltas."""
    events = MessageEvents(variant)
    stream = events.start(HEAD, Usage(10, 0, 4))
    for number, delta in enumerate(deltas):
        is_last = number == len(deltas) - 1
        stream += events.tell(delta, reason if is_last else None, stop if is_last else None)
    stream += events.end(USAGE)
    return [data for name, data in events_of(stream.decode()) if name == data["type"]]


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a client builds from the events; each must be opened, filled and closed before the next."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]) | {"filled": ""})
                is_open = True
            case "content_block_delta":
                assert is_open and event["index"] == len(blocks) - 1
                delta = event["delta"]
                kind = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
                if delta["type"] == "signature_delta":
                    assert delta["signature"]
                else:
                    blocks[-1]["filled"] += delta[kind[delta["type"]]]
            case "content_block_stop":
                assert is_open and event["index"] == len(blocks) - 1
                is_open = False
    assert not is_open
    for block in blocks:
        filled = block.pop("filled")
        if block["type"] == "tool_use":
            block["input"] = json.loads(filled)
        else:
            block[block["type"]] = filled
    return blocks


@given(TEXTS, TEXTS, CALLS, st.data())
def test_a_stream_builds_the_same_message_as_the_whole_answer(
    reasoning: str, text: str, calls: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    """Thinking, text and calls, cut anywhere, give the same blocks, stop reason and usage."""
    deltas: list[dict[str, Any]] = []
    for name, value in (("reasoning", reasoning), ("content", text)):
        cut = data.draw(st.integers(0, len(value)))
        deltas += [{name: value[:cut]}, {name: value[cut:]}]
    functions = []
    for index, (name, arguments) in enumerate(calls):
        value = json.dumps(arguments)
        cut = data.draw(st.integers(0, len(value)))
        functions.append({"id": f"c{index}", "function": {"name": name, "arguments": value}})
        first = {"index": index, "id": f"c{index}", "function": {"name": name, "arguments": value[:cut]}}
        deltas.append({"tool_calls": [first]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": value[cut:]}}]})
    reason = "tool_calls" if calls else "stop"
    message = {"reasoning": reasoning or None, "content": text or None, "tool_calls": functions}
    whole = message_of(HEAD, {"message": message, "finish_reason": reason}, None, USAGE)
    events = stream_events(deltas, reason)
    blocks = [{key: value for key, value in block.items() if key != "signature"} for block in whole["content"]]
    assert blocks_of(events) == ([] if blocks == [{"type": "text", "text": ""}] else blocks)
    assert events[0]["message"]["usage"] == {"input_tokens": 10, "output_tokens": 0}
    assert events[-2]["usage"] == whole["usage"]
    assert whole["usage"] == {"input_tokens": 6, "output_tokens": 3, "cache_read_input_tokens": 4}
    assert events[-2]["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    assert whole["stop_reason"] == ("tool_use" if calls else "end_turn")


@pytest.mark.parametrize(
    ("arguments", "reason", "stop", "expected"),
    [
        ("{}", "stop", None, ("tool_use", None)),  # as a named call ends
        ("{}", "stop", "x", ("tool_use", None)),
        ('{"a', "stop", "x", ("stop_sequence", "x")),
        ('{"a', "length", None, ("max_tokens", None)),
        (None, "stop", "x", ("stop_sequence", "x")),
        (None, "stop", 7, ("end_turn", None)),
    ],
)
def test_a_stream_reports_its_stop_reason_and_stop_sequence(
    arguments: str | None, reason: str, stop: Any, expected: tuple[Any, Any]
) -> None:
    """A call that was cut short must not run. The token that ended an answer is not a stop sequence."""
    call = {"index": 0, "id": "c", "function": {"name": "run", "arguments": arguments}}
    ended = stream_events([{"content": "Hm."} if arguments is None else {"tool_calls": [call]}], reason, stop)[-2][
        "delta"
    ]
    assert (ended["stop_reason"], ended["stop_sequence"]) == expected


def test_text_during_an_open_call_becomes_a_block_after_it() -> None:
    """A message's blocks follow one another. The content, which the client will send back, has the text too."""
    events = MessageEvents()
    events.tell({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "run", "arguments": "{"}}]}, None, None)
    events.tell({"content": "Now."}, None, None)
    events.tell({"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}, "tool_calls", None)
    events.end(USAGE)
    assert events.content == [
        {"type": "tool_use", "id": "c", "name": "run", "input": {}},
        {"type": "text", "text": "Now."},
    ]


@pytest.mark.parametrize("arguments", ['{"a', "963", "", "[" * 10_000, "1" * 5_000, "null"])
def test_invalid_call_arguments_fail_a_whole_message_but_not_a_stream(arguments: str) -> None:
    """The engine's own route answers with an error. The client of a stream gets what there is."""
    call = {"index": 0, "id": "c", "function": {"name": "run", "arguments": arguments}}
    with pytest.raises(ValueError, match="call of run"):
        message_of(HEAD, {"message": {"tool_calls": [call]}, "finish_reason": "stop"}, None, USAGE)
    stream_events([{"tool_calls": [call]}], "stop")


def test_call_arguments_keep_huge_integers_and_lone_surrogates() -> None:
    """A model may write such JSON."""
    ask = Ask("messages", "", "m", b"", {}, "t", "g", None, 0, False)
    arguments = '{"a": 123456789012345678901234567890, "b": "\\ud83d"}'
    message = {"tool_calls": [{"id": "c", "function": {"name": "run", "arguments": arguments}}]}
    whole = MessageFrame(ask, "t", "stop_reason", VLLM, lambda: Usage(1, 0)).whole(
        [{"message": message, "finish_reason": "stop"}], USAGE
    )
    assert json.loads(whole)["content"][0]["input"] == json.loads(arguments)


def test_sglangs_messages_have_their_own_form() -> None:
    """Usage at the start has prompt and cached tokens; no signature or stop sequence; a cut call has no arguments."""
    deltas = [{"reasoning_content": "hm"}, {"content": "Well."}]
    start, *_, ended, _ = events = stream_events(deltas, "stop", stop="!", variant=SGLANG)
    assert start["message"]["usage"] == {"input_tokens": 6, "output_tokens": 0, "cache_read_input_tokens": 4}
    assert [block["type"] for block in blocks_of(events)] == ["thinking", "text"]
    assert not any("signature" in str(event) for event in events)
    assert (ended["delta"]["stop_reason"], ended["usage"]) == ("end_turn", {"output_tokens": 3})
    call = {"id": "c", "function": {"name": "run", "arguments": '{"a'}}
    whole = message_of(HEAD, {"message": {"tool_calls": [call]}, "finish_reason": "length"}, None, USAGE, SGLANG)
    assert whole["content"] == [{"type": "tool_use", "id": "c", "name": "run", "input": {}}]
    none_cached = message_of(HEAD, {"message": {}, "finish_reason": "stop"}, "!", Usage(10, 3, 0), SGLANG)
    assert none_cached["usage"] == {"input_tokens": 10, "output_tokens": 3}
    assert none_cached["stop_reason"] == "end_turn" and "stop_sequence" not in none_cached
