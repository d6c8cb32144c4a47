"""Which conversations count as equal however a client spells them, and which do not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.messages.transcripts import History, beginnings_of, preamble_of, prompt_of, spelled

USER = {"role": "user", "content": "q"}
CALL = {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": '{"a": 1, "b": 2}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "x"}
USE = {"type": "tool_use", "id": "t1", "name": "ls", "input": {"a": 1, "b": 2}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "x"}


def user(*parts: object) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def assistant(*parts: object) -> dict[str, Any]:
    return {"role": "assistant", "content": list(parts)}


def answered(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def called(arguments: object, call_id: str = "c1") -> dict[str, Any]:
    """An answer of the chat API that calls a tool."""
    call = {"id": call_id, "type": "function", "function": {"name": "ls", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def image(url: str, **more: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


SAME = {
    "text of the responses API": (USER, user({"type": "input_text", "text": "q"})),
    "answer of the responses API": (answered("a"), assistant({"type": "output_text", "text": "a", "annotations": []})),
    "blanks around a text": (USER, {"role": "user", "content": " q\n"}),
    "reasoning left in an answer": (answered("a"), answered("<think>because</think>\n\na")),
    "order of a call's arguments": (CALL, CALL | {"arguments": '{"b":2,"a":1}'}),
    "id and status of a call": (CALL, CALL | {"id": "fc_1", "status": "completed"}),
    "id and status of an output": (OUTPUT, OUTPUT | {"id": "fo_1", "status": "completed"}),
    "cache mark of an output": (OUTPUT, OUTPUT | {"cache_control": {"type": "ephemeral"}}),
    "numbers of JavaScript": (
        called('{"s": 1.0, "of": [{"t": -0.0}], "e": 1e3}'),
        called('{"s":1,"of":[{"t":0}],"e":1000}'),
    ),
    "numbers of JavaScript in an input": (assistant(USE | {"input": {"a": 1.0, "b": 2}}), assistant(USE)),
    "no arguments": (called("{}"), called("")),
    "null arguments": (called("{}"), called(None)),
    "thinking beside a call": (assistant(USE), assistant({"type": "thinking", "thinking": "hm"}, USE)),
    "cache mark of a call": (assistant(USE), assistant(USE | {"cache_control": {"type": "ephemeral"}})),
    "cache mark of a result": (user(RESULT), user(RESULT | {"cache_control": {"type": "ephemeral"}})),
    "result as text parts": (user(RESULT), user(RESULT | {"content": [{"type": "text", "text": "x"}]})),
    "cache mark of an image": (user(image("u")), user(image("u", cache_control={"type": "ephemeral"}))),
}
DIFFERENT = {
    "a number": (called('{"s": 1.5}'), called('{"s": 1}')),
    "a number in a text": (called('{"s": "1.0"}'), called('{"s": "1"}')),
    "thinking quoted by a user": ({"role": "user", "content": "a</think>q"}, USER),
    "the call that is answered": (
        {"role": "tool", "content": "x", "tool_call_id": "c1"},
        {"role": "tool", "content": "x", "tool_call_id": "c2"},
    ),
    "id of a call": (called("{}"), called("{}", "c2")),
    "arguments of a call": (CALL, CALL | {"arguments": '{"a": 1}'}),
    "arguments that are not JSON": (called("ls -l"), called("ls -a")),
    "input of a custom tool": (
        {"type": "custom_tool_call", "call_id": "c1", "name": "sh", "input": "ls"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "sh", "input": "pwd"},
    ),
    "input of a tool": (assistant(USE), assistant(USE | {"input": {"a": 2}})),
    "name of a tool": (assistant(USE), assistant(USE | {"name": "cat"})),
    "text of a result": (user(RESULT), user(RESULT | {"content": "y"})),
    "call of a result": (user(RESULT), user(RESULT | {"tool_use_id": "t2"})),
    "output of a call": (OUTPUT, OUTPUT | {"output": "y"}),
    "image": (user(image("u")), user(image("v"))),
    "role": (USER, {"role": "system", "content": "q"}),
    "calls of an unknown form": (
        {"role": "assistant", "content": "", "tool_calls": ["a"]},
        {"role": "assistant", "content": "", "tool_calls": ["b"]},
    ),
}


def digest(message: object) -> str:
    """The digest of a conversation that ends with this message."""
    return History({"messages": [USER, message]}).digest()


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME.keys())
def test_equivalent_spellings_of_a_message_have_one_digest(one: object, other: object) -> None:
    """Clients drop or change these between turns: the conversation is still recognised."""
    assert digest(one) == digest(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_a_message_that_differs_makes_a_different_conversation(one: object, other: object) -> None:
    """Siblings that differ in this are not taken for each other."""
    assert digest(one) != digest(other)


def marked(number: str, system: str = "Be brief.") -> dict[str, Any]:
    """A request of Claude Code, which puts a line with a number of its own before the system prompt of each."""
    mark = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch={number};"
    return {"system": [{"type": "text", "text": text} for text in (mark, system)], "messages": [USER]}


def test_a_mark_that_changes_with_every_request_is_no_part_of_a_conversation() -> None:
    """vLLM does not show it to the model. Each turn of Claude Code continued no other, and no two were siblings."""
    one, other, changed = marked("36ee5"), marked("0aaa9"), marked("36ee5", "Be long.")
    assert History(one).digest() == History(other).digest() != History(changed).digest()
    assert beginnings_of(one) == beginnings_of(other) != beginnings_of(changed)
    assert preamble_of(one) == preamble_of(other) != preamble_of(changed)
    quoted = marked("36ee5") | {"messages": [{"role": "user", "content": one["system"]}]}
    assert History(quoted).digest() != History(quoted | {"messages": [user(*other["system"])]}).digest()


THOUGHT = {
    "in the text": [answered(f"<think>{thought}</think>a") for thought in "xy"],
    "beside the text": [answered("a") | {"reasoning_content": thought} for thought in "xy"],
    "by another name": [answered("a") | {"reasoning": thought} for thought in "xy"],
    "in blocks": [
        assistant({"type": "thinking", "thinking": thought}, {"type": "text", "text": "a"}) for thought in "xy"
    ],
}


@pytest.mark.parametrize(("one", "other"), THOUGHT.values(), ids=THOUGHT.keys())
def test_answers_that_differ_in_their_thoughts_have_a_second_digest(one: Any, other: Any) -> None:
    """The first one is that of the answer without thoughts, which has no second. It is the same in an answer, in a
    request that repeats it, and in one that is read from there on."""
    asked = History({"messages": [USER]})
    keys = [asked.digests_of(answer) for answer in (one, other, answered("a"))]
    assert len({key[0] for key in keys}) == 1 and len({key[1:] for key in keys}) == 3 and keys[2][1:] == ()
    for answer, (digest, *second) in zip((one, other, answered("a")), keys, strict=True):
        repeated = asked.continued([answer])
        assert repeated.with_thoughts == ({digest: second[0]} if second else {})
        assert repeated.continued([USER]).with_thoughts == repeated.with_thoughts
        assert repeated.digest() == digest, "what follows does not depend on the thoughts"


SAME_THOUGHTS = [
    answered("<think>because</think>a"),
    answered("because\n</think>\n\na"),
    answered("a") | {"reasoning": "because"},
    answered("a") | {"reasoning_content": "\nbecause\n"},
    assistant({"type": "thinking", "thinking": "because", "signature": "s"}, {"type": "text", "text": "a"}),
]
NO_THOUGHTS = [
    answered("a"),
    answered("<think>\n\n</think>\n\na"),
    answered("a") | {"reasoning": None, "reasoning_content": ""},
    assistant({"type": "thinking", "thinking": "", "signature": "s"}, {"type": "text", "text": "a"}),
    assistant({"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}),
]


def test_thoughts_are_the_same_however_they_are_spelled() -> None:
    """Blanks around them do not count, nor does the mark that opens them, which may be in the prompt. A signature, or
    thoughts that are encrypted, say nothing."""
    asked = History({"messages": [USER]})
    assert len({asked.digests_of(answer) for answer in SAME_THOUGHTS}) == 1
    assert {asked.digests_of(answer) for answer in NO_THOUGHTS} == {asked.digests_of(SAME_THOUGHTS[0])[:1]}


def reasoning(thought: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": f"rs_{thought}", "content": [{"type": "reasoning_text", "text": thought}]}


@pytest.mark.parametrize(
    "answer",
    [[answered("a")], [CALL, CALL | {"call_id": "c2"}], [CALL, answered("a")]],
    ids=["text", "calls", "call and text"],
)
def test_the_items_of_a_response_are_thought_as_one(answer: list[Any]) -> None:
    """The second digest of the last item covers the thoughts in items before it, as that of the whole response does,
    and no thoughts of an earlier response. A summary counts only without the thoughts themselves; encrypted ones say
    nothing."""
    asked = History({"input": [USER, reasoning("x"), CALL, OUTPUT]})
    keys = {thought: asked.digests_of([reasoning(thought), *answer]) for thought in "yz"}
    keys["encrypted"] = asked.digests_of([{"type": "reasoning", "summary": [], "encrypted_content": "x"}, *answer])
    assert len({key[0] for key in keys.values()}) == 1 and len({key[1:] for key in keys.values()}) == 3
    assert keys["encrypted"][1:] == ()
    summary = [{"type": "summary_text", "text": "y"}]
    assert asked.digests_of([reasoning("z") | {"summary": summary}, *answer]) == keys["z"]
    assert asked.digests_of([{"type": "reasoning", "summary": summary}, *answer]) == keys["y"]
    for thought in "yz":
        items = [USER, reasoning("x"), CALL, OUTPUT, reasoning(thought), *answer]
        digest, second = keys[thought]
        for repeated in (
            History({"input": items}),
            asked.continued(items[4:]),
            asked.continued(items[4:5]).continued(answer),
        ):
            assert repeated.with_thoughts[digest] == second


ROLES = st.lists(st.sampled_from(["user", "assistant", "tool"]), max_size=8)


@given(ROLES, st.sampled_from(["system", "instructions", None]))
def test_a_history_has_a_digest_after_each_answer(roles: list[str], preamble: str | None) -> None:
    """Each is the digest of the conversation up to that answer; a system prompt is no answer, and is part of all
    digests."""
    messages = [{"role": role, "content": f"{number}"} for number, role in enumerate(roles)]
    body = {preamble: "Be brief."} if preamble else {}
    ends = [number + 1 for number, role in enumerate(roles) if role == "assistant"]
    expected = [History({**body, "messages": messages[:end]}).digest() for end in ends]
    assert History({**body, "messages": messages}).digests == expected
    assert preamble is None or not expected or expected[0] != History({"messages": messages[: ends[0]]}).digest()


@given(ROLES)
def test_a_request_has_a_prompt_before_each_run_of_answers(roles: list[str]) -> None:
    """The first prompt, which precedes the first answer, determines the group, whatever comes later."""
    messages = [{"role": role, "content": f"{number}"} for number, role in enumerate(roles)]
    begins = [
        number
        for number, role in enumerate(roles)
        if role == "assistant" and (number == 0 or roles[number - 1] != "assistant")
    ]
    expected = [beginnings_of({"messages": messages[:begin]})[-1] for begin in begins]
    assert beginnings_of({"messages": messages})[:-1] == expected


IDS = st.lists(st.integers(0, 200_000), max_size=6)


@given(IDS, IDS)
def test_spelled_tokens_begin_only_with_their_prefixes(ids: list[int], others: list[int]) -> None:
    """Also as bytes: 1 is no prefix of 12, and no text begins with tokens."""
    encoded, other = spelled(ids), spelled(others)
    assert encoded is not None and other is not None
    assert encoded.startswith(other) is (ids[: len(others)] == others)
    text = spelled(",".join(map(str, ids)))
    assert text is not None and not text.startswith(encoded)


@pytest.mark.parametrize("value", [None, 5, {"a": 1}, [1, "a"], [True], [2**70], [["a"]]])
def test_values_other_than_text_or_tokens_are_not_spelled(value: object) -> None:
    """Such as a list of several prompts, or a number that is no token."""
    assert spelled(value) is None


@pytest.mark.parametrize("name", ["prompt", "token_ids", "input_ids", "text"])
def test_the_prompt_is_found_under_each_routes_field(name: str) -> None:
    """In completions and on the token routes; a request with messages has none."""
    assert prompt_of({name: [1, 2]}) == [1, 2]
    assert prompt_of({name: [[1, 2]]}) == [1, 2] and prompt_of({name: ["q"]}) == "q", "a list of one"
    assert prompt_of({name: [[1], [2]]}) == [[1], [2]] and prompt_of({name: [1]}) == [1]
    assert prompt_of({name: [1, 2], "messages": []}) is None and prompt_of({name: [1, 2], "input": "q"}) is None
    assert prompt_of({name: [1, 2], "messages": None, "input": None}) == [1, 2], "as clients send fields that are unset"
