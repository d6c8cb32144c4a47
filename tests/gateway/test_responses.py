"""A chat answer rewritten as one of OpenAI's responses."""

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.messages.answers import Usage
from gateway.messages.responses import (
    SGLANG,
    VLLM,
    ResponseEvents,
    Variant,
    echo,
    echo_of_sglang,
    response_of,
)

HEAD: dict[str, Any] = {"id": "resp_1", "object": "response", "created_at": 7, "model": "m"}
USAGE = Usage(9, 3, 4)


def call_of(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"index": index, "function": function} | ({"id": f"c{index}"} if name else {})


def stream_events(
    deltas: list[dict[str, Any]], reason: str = "stop", head: dict[str, Any] = HEAD, variant: Variant = VLLM
) -> list[dict[str, Any]]:
    """The events of a stream with these deltas."""
    events = ResponseEvents(head, variant)
    stream = events.start()
    for delta in deltas[:-1]:
        stream += events.tell(delta, None)
    stream += events.tell(deltas[-1], reason) + events.end(USAGE)
    found = []
    for block in stream.split(b"\n\n")[:-1]:
        name, _, data = block.partition(b"\n")
        found.append(orjson.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
    return found


def test_text_and_calls_become_consecutive_items() -> None:
    """Each item is opened, filled and closed; events are numbered; the last one has all items."""
    events = stream_events([
        {"content": "I lo"},
        {"content": "ok."},
        {"tool_calls": [call_of(0, "", "look")]},
        {"tool_calls": [call_of(0, '{"a"')]},
        {"tool_calls": [call_of(0, ": 1}"), call_of(1, "{}", "run")]},
    ])  # fmt: skip
    message, call = ["output_text.delta"], ["function_call_arguments.delta"]
    assert [event["type"].removeprefix("response.") for event in events] == [
        *["created", "in_progress", "output_item.added", "content_part.added", *message * 2],
        *["output_text.done", "content_part.done", "output_item.done"],
        *["output_item.added", *call * 2, "function_call_arguments.done", "output_item.done"],
        *["output_item.added", *call, "function_call_arguments.done", "output_item.done", "completed"],
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert response["output"] == [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in response["output"]] == ["message", "function_call", "function_call"]
    assert response["output"][0]["content"][0]["text"] == "I look."
    assert [item.get("arguments") for item in response["output"][1:]] == ['{"a": 1}', "{}"]
    assert (response["status"], response["incomplete_details"]) == ("completed", None)
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 4


def test_an_answer_cut_by_its_token_limit_is_incomplete() -> None:
    """Whole or streamed. The stream still ends with `response.completed`, and its items are complete, as with vLLM."""
    [*_, done, last] = stream_events([{"content": "I lo"}], "length")
    choice = {"message": {"content": "I lo"}, "finish_reason": "length"}
    for response in (last["response"], response_of(HEAD, choice, USAGE)):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "completed"
    assert (done["type"], last["type"]) == ("response.output_item.done", "response.completed")


def test_an_empty_stream_has_no_items() -> None:
    """It only begins and ends."""
    assert [event["type"] for event in stream_events([{}])] == [
        *["response.created", "response.in_progress", "response.completed"]
    ]


@given(st.text(), st.lists(st.tuples(st.sampled_from(["look", "run"]), st.text()), max_size=3), st.randoms())
def test_a_stream_ends_in_the_same_response_as_the_whole_answer(
    text: str, calls: list[tuple[str, str]], dice: Any
) -> None:
    """However it is cut into deltas."""
    deltas: list[dict[str, Any]] = [{"content": piece} for piece in cut(text, dice)]
    for index, (name, arguments) in enumerate(calls):
        deltas.append({"tool_calls": [call_of(index, "", name)]})
        deltas += [{"tool_calls": [call_of(index, piece)]} for piece in cut(arguments, dice)]
    made = [
        {"id": f"c{index}", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    choice = {"message": {"content": text, "tool_calls": made}, "finish_reason": "stop"}
    streamed, whole = stream_events([*deltas, {}])[-1]["response"], response_of(HEAD, choice, USAGE)
    for response in (streamed, whole):
        for item in response["output"]:
            assert item.pop("id").startswith(("msg_", "fc_"))
    assert streamed == whole


def cut(text: str, dice: Any) -> list[str]:
    ends = sorted(dice.randint(0, len(text)) for _ in range(2))
    return [text[: ends[0]], text[ends[0] : ends[1]], text[ends[1] :]]


def test_a_response_repeats_its_request_and_sampling_parameters() -> None:
    """Fields that were not requested have vLLM's values: no tools, no tool choice."""
    repeated = echo({"temperature": 9, "metadata": {"a": "b"}}, {"temperature": 0.5, "max_tokens": 7})
    assert (repeated["temperature"], repeated["max_output_tokens"], repeated["metadata"]) == (0.5, 7, {"a": "b"})
    assert (repeated["tool_choice"], repeated["tools"], repeated["top_p"]) == ("none", [], 1.0)
    assert echo({"tools": [{}]}, {"max_tokens": 7})["tool_choice"] == "auto"


def test_sglang_marks_text_that_precedes_a_call() -> None:
    """If tools may be called, the text waits until that is known. Events are numbered as they leave."""
    tool = {"type": "function", "name": "look", "description": "Look.", "parameters": {}}
    for tools, calls in (([], []), ([tool], []), ([tool], [call_of(0, "{}", "look")])):
        head = HEAD | echo_of_sglang({"input": "hi", "tools": tools})
        events = ResponseEvents(head, SGLANG)
        events.start()
        assert bool(events.tell({"content": "Well."}, None)) is not bool(tools)
        ended = stream_events([{"content": "Well."}, {"tool_calls": calls}], "stop", head, SGLANG)
        assert [event["sequence_number"] for event in ended] == list(range(len(ended)))
        phase = "commentary" if calls else "final_answer"
        response = ended[-1]["response"]
        assert {e["item"]["phase"] for e in ended if e.get("item", {}).get("type") == "message"} == {phase}
        assert response["output"][0]["phase"] == phase
        assert response["text"] == (None if calls else {"format": {"type": "text"}})
        message = {"content": "Well.", "tool_calls": calls}
        whole = response_of(head, {"message": message | {"tool_calls": []}, "finish_reason": "stop"}, USAGE, SGLANG)
        assert whole["output"][0]["phase"] == "final_answer"


def test_the_last_event_of_an_sglang_stream_has_its_status() -> None:
    """vLLM's last event is `response.completed` whatever the status."""
    head = HEAD | echo_of_sglang({"input": "hi"})
    for variant, last in ((VLLM, "response.completed"), (SGLANG, "response.incomplete")):
        assert stream_events([{"content": "We"}, {}], "length", head, variant)[-1]["type"] == last
    assert head["store"] is True and head["temperature"] is None and head["metadata"] == {}
