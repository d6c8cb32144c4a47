"""Which trajectory a request continues if its client sends no identity: the one whose messages it repeats."""

import tracemalloc

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.messages.conversations import Conversations
from gateway.messages.transcripts import History

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "What is in this directory?"}


def called(call_id: str, arguments: str = '{"cmd":"ls","flags":["-l"]}') -> dict:
    function = {"name": "bash", "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(call_id: str, text: str) -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def chat(*messages: dict) -> dict:
    return {"model": "m", "messages": [SYSTEM, QUESTION, *messages]}


def continued(conversations: Conversations, body: dict, fitting: str = "abcdefgh") -> str | None:
    return conversations.continued(body, History(body), lambda trajectory_id: trajectory_id in fitting)


def remember(conversations: Conversations, trajectory_id: str, body: dict, answer: object) -> None:
    conversations.remember(trajectory_id, body, History(body), answer)


@pytest.fixture
def conversations() -> Conversations:
    return Conversations(limit=100)


def test_a_first_turn_is_always_new(conversations: Conversations) -> None:
    """Siblings share a prompt, so a prompt alone continues nothing, however often it was seen."""
    remember(conversations, "a", chat(), called("c1"))
    assert continued(conversations, chat()) is None


def test_a_conversation_is_recognised_at_every_turn(conversations: Conversations) -> None:
    """A turn that repeats the messages and the answer continues the trajectory."""
    messages: list[dict] = []
    remember(conversations, "a", chat(), called("c0"))
    for turn in range(5):
        messages += [called(f"c{turn}"), result(f"c{turn}", "a.txt")]
        assert continued(conversations, chat(*messages)) == "a"
        remember(conversations, "a", chat(*messages), called(f"c{turn + 1}"))


def test_a_different_conversation_is_new(conversations: Conversations) -> None:
    """One different word before the answer, or in it, makes it a different conversation."""
    remember(conversations, "a", chat(), called("c1"))
    assert continued(conversations, chat(called("c2"), result("c2", "x"))) is None
    other = {"messages": [SYSTEM, {"role": "user", "content": "?"}, called("c1"), result("c1", "x")]}
    assert continued(conversations, other) is None
    examples = chat({"role": "assistant", "content": "an example"}, {"role": "user", "content": "and now"})
    assert continued(conversations, examples) is None


@pytest.mark.parametrize(
    "respelled",
    [
        {"content": ""},
        {"content": []},
        {"content": [{"type": "text", "text": ""}]},
        {"reasoning_content": "thinking aloud", "reasoning": None},
        {"cache_control": {"type": "ephemeral"}},
        {"tool_calls": called("c1", '{ "flags": ["-l"], "cmd": "ls" }')["tool_calls"]},
        {"refusal": None, "audio": None, "name": None},
    ],
)
def test_an_answer_is_recognised_in_another_spelling(conversations: Conversations, respelled: dict) -> None:
    """Clients rebuild messages: None for "", parts for a string, arguments in another order, no reasoning."""
    remember(conversations, "a", chat(), called("c1"))
    assert continued(conversations, chat(called("c1") | respelled, result("c1", "x"))) == "a"


def test_text_matches_with_or_without_parts_and_reasoning(conversations: Conversations) -> None:
    """A string and text parts are one text; surrounding blanks and removed reasoning make no difference."""
    remember(conversations, "a", chat(), {"role": "assistant", "content": "<think>well</think>\n\nIt is empty."})
    parts = {"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "empty."}]}
    assert continued(conversations, chat(parts, QUESTION)) == "a"


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("is_restored", [False, True])
def test_siblings_that_think_differently_and_act_alike_are_not_swapped(
    conversations: Conversations, is_restored: bool, api: str
) -> None:
    """A client that sends its thoughts back continues its own trajectory, also after a restart. One that leaves them
    out takes the next, as siblings with equal answers do."""
    said = {"role": "assistant", "content": "Go north."}
    thoughts = {name: [{"role": "assistant", "content": f"<think>{name}</think>Go north."}] for name in "abc"}
    if api == "responses":
        content = {name: [{"type": "reasoning_text", "text": name}] for name in "abc"}
        thoughts = {name: [{"type": "reasoning", "content": content[name]}, said] for name in "abc"}

    def asked(*items: dict) -> dict:
        return chat(*items) if api == "chat" else {"input": [QUESTION, *items]}

    for name, items in thoughts.items():
        remember(conversations, name, asked(), items[0] if api == "chat" else {"id": name, "output": items})
    if is_restored:
        dumped = {name: conversations.dump(name) for name in thoughts}
        conversations = Conversations(limit=100)
        for name, digests in dumped.items():
            conversations.restore(name, [digests])
    assert continued(conversations, asked(*thoughts["c"], QUESTION)) == "c"
    assert continued(conversations, asked(said, QUESTION)) == "a"
    assert continued(conversations, asked(*thoughts["b"], QUESTION)) == "b"
    assert continued(conversations, asked(*thoughts["c"], QUESTION)) == "c", "a retry"


def test_what_was_stored_before_thoughts_were_told_apart_is_still_found(conversations: Conversations) -> None:
    """By the digest without thoughts, the only one that was stored then."""
    answer = {"role": "assistant", "content": "<think>a</think>Go north."}
    remember(conversations, "a", chat(), answer)
    first, *_ = conversations.dump("a").split()
    restored = Conversations(limit=100)
    restored.restore("a", [first])
    assert continued(restored, chat(answer, QUESTION)) == "a"


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("parts", [False, True])
def test_a_continued_answer_is_recognised_as_one_message(conversations: Conversations, parts: bool, echo: bool) -> None:
    """An answer that its limit cut is continued with `continue_final_message`, here twice, and comes with what it
    continues if the client asks for an echo. Its client goes on with the whole, with its thoughts or without."""
    begun = ""
    for text in ("<think>Hm", "m.</think>Go ", "north."):
        start = (
            [{"role": "assistant", "content": [{"type": "text", "text": begun}] if parts else begun}] if begun else []
        )
        body = {**chat(*start), "continue_final_message": bool(begun), "echo": echo}
        assert continued(conversations, body) == ("a" if begun else None)
        remember(conversations, "a", body, {"role": "assistant", "content": begun + text if echo else text})
        begun += text
    for answer in (begun, "Go north."):
        assert continued(conversations, chat({"role": "assistant", "content": answer}, QUESTION)) == "a"
        conversations.release("a")
    laughing = {**chat({"role": "assistant", "content": "ha"}), "continue_final_message": True, "echo": echo}
    remember(conversations, "c", laughing, {"role": "assistant", "content": "haha"})
    whole = {"role": "assistant", "content": "haha" if echo else "hahaha"}
    assert continued(conversations, chat(whole, QUESTION)) == "c", "it goes on as it began"
    remember(conversations, "b", {**chat(), "continue_final_message": True}, called("c1"))
    assert continued(conversations, chat(called("c1"), result("c1", "x"))) == "b", "there was no answer to continue"


def test_siblings_with_equal_answers_are_assigned_in_turn(conversations: Conversations) -> None:
    """Greedy siblings cannot be told apart, so each continuation takes the next one, and none is assigned twice."""
    for name in ("a", "b", "c"):
        remember(conversations, name, chat(), called("c1"))
    bodies = [chat(called("c1"), result("c1", text)) for text in ("1", "2", "3", "4")]
    assert [continued(conversations, body) for body in bodies] == ["a", "b", "c", None]


def test_a_sibling_that_has_not_continued_comes_first(conversations: Conversations) -> None:
    """Both know the answer, but only one has not continued from it: the continuation is that one's, not a branch."""
    first, second = (chat(called("c1"), result("c1", text)) for text in ("1", "2"))
    for name in ("a", "b"):
        remember(conversations, name, chat(), called("c1"))
    assert continued(conversations, first) == "a"
    remember(conversations, "a", first, called("c2"))
    assert continued(conversations, second) == "b"


def test_siblings_that_fit_come_first(conversations: Conversations) -> None:
    """A sibling that has ended, or is of another rollout, waits behind an equal answer too. It gets a turn only after
    those that fit, and neither their retries nor a question that one of them asked before."""
    for name in ("old", "a", "b"):
        remember(conversations, name, chat(), called("c1"))
    first, second, third, fourth = (chat(called("c1"), result("c1", text)) for text in ("1", "2", "3", "4"))
    assert [continued(conversations, body, "ab") for body in (first, second, second)] == ["a", "b", "b"]
    remember(conversations, "a", first, called("c2"))
    assert continued(conversations, first, "ab") == "a", "its answer was lost"
    assert continued(conversations, third, "ab") == "old"
    assert continued(conversations, fourth, "ab") is None


def test_a_sibling_that_does_not_fit_is_no_reason_to_doubt_a_rewritten_answer(conversations: Conversations) -> None:
    """Of several that asked the same and were answered differently, the one that fits gets the next turn."""
    body = chat(called("c1"), result("c1", "x"))
    for name in ("old", "a"):
        remember(conversations, name, body, called(f"{name}2"))
    rewritten = {"messages": [*body["messages"], {"role": "assistant", "content": "Calling tools"}, QUESTION]}
    assert continued(conversations, rewritten, "a") == "a"


@pytest.mark.parametrize("num_shortened", [1, 2, 3])
def test_a_shortened_history_is_not_of_a_sibling_that_waits(conversations: Conversations, num_shortened: int) -> None:
    """An agent that replaces old results (SWE-agent's observations, screenshots) has given answers since the last one
    that is known. A sibling that waits behind that one gave none of them."""
    messages: list[dict] = []
    remember(conversations, "a", chat(), called("c0"))
    for turn in range(num_shortened):
        messages += [called(f"c{turn}"), result(f"c{turn}", f"{turn}.txt")]
        assert continued(conversations, chat(*messages)) == "a"
        remember(conversations, "a", chat(*messages), called(f"c{turn + 1}"))
    shortened = [
        message | {"content": "(old output)"} if message["role"] == "tool" else message for message in messages
    ]
    body = chat(*shortened, called(f"c{num_shortened}"), result(f"c{num_shortened}", "y"))
    assert continued(conversations, body) == "a", "nobody else had its first answer"
    conversations.release("a")
    remember(conversations, "b", chat(), called("c0"))
    assert continued(conversations, body) is None
    assert continued(conversations, chat(called("c0"), result("c0", "y"))) == "b"


def test_identical_siblings_are_not_joined(conversations: Conversations) -> None:
    """Even with equal tool results, siblings stay apart: joining them would sample once where two samples were
    requested."""
    for name in ("a", "b"):
        remember(conversations, name, chat(), called("c1"))
    body = chat(called("c1"), result("c1", "x"))
    assert [continued(conversations, body) for _ in range(2)] == ["a", "b"]


def test_a_repeated_turn_keeps_its_trajectory(conversations: Conversations) -> None:
    """A client that lost its connection sends the same request again and gets the same trajectory, not a new one."""
    for name in ("a", "b"):
        remember(conversations, name, chat(), called("c1"))
    first, second = (chat(called("c1"), result("c1", text)) for text in ("1", "2"))
    assert [continued(conversations, body) for body in (first, second, second, first)] == ["a", "b", "b", "a"]


def test_a_released_trajectory_accepts_a_different_turn(conversations: Conversations) -> None:
    """A trajectory whose turn failed is released. While it is at work, it is not assigned to another request."""
    remember(conversations, "a", chat(), called("c1"))
    first, second = (chat(called("c1"), result("c1", text)) for text in ("1", "2"))
    assert continued(conversations, first) == "a"
    assert continued(conversations, second) is None
    conversations.release("a")
    assert continued(conversations, second) == "a"


def test_a_branch_from_an_earlier_answer_stays_in_its_trajectory(conversations: Conversations) -> None:
    """Going back to an earlier turn stays where its KV is; a history with changed answers is new."""
    start = chat(called("c1"), result("c1", "x"))
    remember(conversations, "a", chat(), called("c1"))
    continued(conversations, start)
    remember(conversations, "a", start, called("c2"))
    assert continued(conversations, chat(called("c1"), result("c1", "another"))) == "a"
    summary = {"role": "user", "content": "Summary of the above."}
    assert continued(conversations, chat(summary, {"role": "assistant", "content": "Go on."}, QUESTION)) is None


def test_the_longest_known_conversation_wins(conversations: Conversations) -> None:
    """If one trajectory's history begins another's, the one that shares more is continued."""
    start = chat(called("c1"), result("c1", "x"))
    remember(conversations, "short", chat(), called("c1"))
    remember(conversations, "long", start, called("c2"))
    whole = chat(called("c1"), result("c1", "x"), called("c2"), result("c2", "y"))
    assert continued(conversations, whole) == "long"


def test_rewritten_answers_are_recognised_from_the_second_turn_on(conversations: Conversations) -> None:
    """Some frameworks send calls back as text and results as user messages, so no answer equals the one that was given.
    But the question before it equals the one that was asked, and after a tool result only one trajectory asked it."""
    rewritten = {"role": "assistant", "content": [{"type": "text", "text": "Calling tools:\n[{'id': 'c1'}]"}]}
    observations = [
        {"role": "user", "content": [{"type": "text", "text": f"Observation:\n{name}"}]} for name in ("x", "y")
    ]
    remember(conversations, "first", chat(), called("c1"))
    assert continued(conversations, chat(rewritten, observations[0])) is None
    remember(conversations, "a", chat(rewritten, observations[0]), called("c2"))
    remember(conversations, "b", chat(rewritten, observations[1]), called("c3"))
    messages = [rewritten, observations[1]]
    for _ in range(3):
        messages += [rewritten, observations[0]]
        assert continued(conversations, chat(*messages)) == "b"
        remember(conversations, "b", chat(*messages), called("c4"))
    assert continued(conversations, chat(rewritten, observations[0], rewritten, observations[0])) == "a"


@pytest.mark.parametrize(
    "empty", [{"role": "assistant", "content": None}, {"role": "assistant", "content": [{"type": "text", "text": ""}]}]
)
def test_an_empty_first_answer_may_be_left_out(conversations: Conversations, empty: dict) -> None:
    """Some frameworks (pydantic-ai, Google ADK) do so, and add a message. This is no first turn if one sibling alone
    got such an answer; the others, and what adds more, are not mistaken for it."""
    remember(conversations, "other", chat(), {"role": "assistant", "content": "Files."})
    retry = {"role": "user", "content": "Say something."}
    assert continued(conversations, chat(retry)) is None
    remember(conversations, "a", chat(), empty)
    assert continued(conversations, chat()) is None
    assert continued(conversations, chat(retry, retry)) is None
    assert continued(conversations, chat(retry)) == "a"
    remember(conversations, "a", chat(retry), called("c1"))
    assert continued(conversations, chat(retry, called("c1"), result("c1", "x"))) == "a"
    conversations.release("a")
    for name in ("b", "c"):
        remember(conversations, name, chat(), empty)
    assert continued(conversations, chat(retry)) is None, "it may be either's"


def test_an_answer_whose_text_was_left_out_is_recognised_by_its_calls(conversations: Conversations) -> None:
    """Some frameworks (Semantic Kernel) keep only the calls of an answer that says something too. Calls have ids of
    their own, so this tells siblings apart also after their first turn; without such ids, none is preferred."""
    for name in ("a", "b"):
        remember(conversations, name, chat(), called(name) | {"content": f"{name} looks.", "reasoning": "Hm."})
    for name in ("b", "a"):
        body = chat(called(name), result(name, "x"))
        assert continued(conversations, body) == name
        assert continued(conversations, body) == name, "retried"
        remember(conversations, name, body, called(f"{name}2") | {"content": "Again."})
        assert continued(conversations, chat(called(name), result(name, "x"), called(f"{name}2"), QUESTION)) == name
    for name in ("c", "d"):
        remember(conversations, name, chat(), called("0") | {"content": f"{name} looks."})
    assert continued(conversations, chat(called("0"), result("0", "x"))) is None


def test_a_rewritten_answer_is_not_assigned_to_a_sibling(conversations: Conversations) -> None:
    """Siblings with equal first answers are still told apart when a client fills in a later answer (a proxy that adds
    content where there was none): the question before it decides, not the answer that they share."""
    bodies = {name: chat(called("c1"), result("c1", name)) for name in ("a", "b")}
    for name in bodies:
        remember(conversations, name, chat(), called("c1"))
    for name, body in bodies.items():
        remember(conversations, name, body, called(f"{name}2"))
    filled = called("b2") | {"content": "[empty]"}
    assert continued(conversations, chat(called("c1"), result("c1", "b"), filled, result("b2", "x"))) == "b"


def test_a_branch_from_an_answer_that_siblings_share_is_new(conversations: Conversations) -> None:
    """It is unknown which sibling goes back to an answer that all had, unless the question was asked before."""
    bodies = {name: chat(called("c1"), result("c1", name)) for name in ("a", "b")}
    for name in bodies:
        remember(conversations, name, chat(), called("c1"))
    for name, body in bodies.items():
        remember(conversations, name, body, called(f"{name}2"))
    assert continued(conversations, chat(called("c1"), result("c1", "c"))) is None
    assert continued(conversations, bodies["b"]) == "b"


def test_a_rewritten_answer_to_a_question_of_two_siblings_is_new(conversations: Conversations) -> None:
    """Both asked the same and got different answers, so it is unknown whose answer was rewritten."""
    body = chat(called("c1"), result("c1", "x"))
    for name in ("a", "b"):
        remember(conversations, name, body, called(f"{name}2"))
    text_answer = {"role": "assistant", "content": "Calling tools"}
    rewritten, repeated = (
        [*body["messages"], *more] for more in ([text_answer, QUESTION], [called("b2"), result("b2", "x")])
    )
    assert continued(conversations, {"messages": rewritten}) is None
    assert continued(conversations, {"messages": repeated}) == "b"
    remember(conversations, "b", {"messages": repeated}, called("b3"))
    assert continued(conversations, {"messages": rewritten}) == "a", "the other sibling has continued"


def test_a_forgotten_trajectory_is_not_continued(conversations: Conversations) -> None:
    """A finished trajectory is never continued, and forgetting an unknown one is no error."""
    for _ in range(2):  # a repeated turn may get the same answer
        remember(conversations, "a", chat(), called("c1"))
    conversations.forget("a")
    conversations.forget("never seen")
    assert continued(conversations, chat(called("c1"), result("c1", "x"))) is None


def test_the_least_recently_used_trajectory_is_forgotten_first() -> None:
    """Beyond the limit, the oldest is forgotten; each use renews it."""
    conversations = Conversations(limit=2)
    for name in ("a", "b"):
        remember(conversations, name, chat(), called(name))
    assert continued(conversations, chat(called("a"), result("a", "x"))) == "a"
    remember(conversations, "c", chat(), called("c"))
    assert len(conversations) == 2
    assert continued(conversations, chat(called("b"), result("b", "x"))) is None


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_memory_of_dropped_conversations_is_freed(is_forgotten: bool) -> None:
    """Of messages and of texts, whether forgotten or evicted: a gateway sees millions of conversations."""
    conversations = Conversations(limit=20, turns_kept=2)

    def remember_and_drop(numbers: range) -> int:
        for number in numbers:
            for turn in range(3):
                remember(conversations, f"m{number}", chat(called(f"{number}"), result(f"{turn}", "x")), called("c"))
            remember(conversations, f"t{number}", {"prompt": f"{number}" * 400}, "answer")
            if is_forgotten:
                conversations.forget(f"m{number}")
                conversations.forget(f"t{number}")
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = remember_and_drop(range(100_000, 100_100))
        assert remember_and_drop(range(100_100, 100_500)) < before + 20_000
    finally:
        tracemalloc.stop()


def test_only_the_latest_turns_can_be_branched_from() -> None:
    """A trajectory's own history is bounded too: its oldest turns become unknown."""
    conversations = Conversations(limit=2, turns_kept=2)
    messages: list[dict] = []
    for turn in range(4):
        remember(conversations, "a", chat(*messages), called(f"c{turn}"))
        messages += [called(f"c{turn}"), result(f"c{turn}", "x")]
    assert continued(conversations, chat(*messages[:2])) is None
    assert continued(conversations, chat(*messages)) == "a"


def test_an_empty_answer_is_not_remembered(conversations: Conversations) -> None:
    """Without an answer, the prompt alone would be the key, and siblings would be taken for one trajectory."""
    remember(conversations, "a", chat(), None)
    remember(conversations, "b", {"prompt": "p"}, "")
    assert continued(conversations, chat()) is None
    assert continued(conversations, {"prompt": "p"}) is None
    assert len(conversations) == 0


def test_restored_conversations_are_recognised(conversations: Conversations) -> None:
    """What is dumped after each turn is all that another process needs, for every API."""
    start = chat(called("c1"), result("c1", "x"))
    turns = [(chat(), called("c1")), (start, called("c2"))]
    dumps = []
    for body, answer in turns:
        remember(conversations, "a", body, answer)
        dumps.append(conversations.dump("a"))
    remember(conversations, "text", {"prompt": "p" * 3000}, "answer")
    remember(
        conversations,
        "stored",
        {"input": "hello"},
        {"id": "resp_1", "output": [{"role": "assistant", "content": "hi"}]},
    )
    next_turn = chat(called("c1"), result("c1", "x"), called("c2"), result("c2", "y"))
    newest = Conversations(limit=100)
    newest.restore("a", dumps[1:])
    assert continued(newest, next_turn) == "a"
    after = Conversations(limit=100)
    after.restore("a", dumps)
    for name in ("text", "stored"):
        after.restore(name, [conversations.dump(name)])
    assert continued(after, next_turn) == "a"
    assert continued(after, {"prompt": "p" * 3000 + "answer and more"}) == "text"
    assert continued(after, {"input": "more", "previous_response_id": "resp_1"}) == "stored"
    assert conversations.dump("never seen") == ""


@example("", "\x00", "", 0)
@given(st.text(max_size=3000), st.text(min_size=1, max_size=50), st.text(max_size=50), st.integers(0, 3))
def test_a_completion_that_repeats_earlier_text_continues_it(prompt: str, answer: str, more: str, copies: int) -> None:
    """A prompt that begins with an earlier prompt and its answer continues it, whatever their lengths."""
    conversations = Conversations()
    prompt += "x" * 1024 * copies
    remember(conversations, "a", {"prompt": prompt}, answer)
    assert continued(conversations, {"prompt": prompt + answer + more}) == "a"
    conversations.release("a")
    other = "\x00" + prompt + answer + more
    assert continued(conversations, {"prompt": other}) == ("a" if other.startswith(prompt + answer) else None)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("in_list", [False, True])
def test_a_completion_is_recognised_in_each_form(conversations: Conversations, in_list: bool, echo: bool) -> None:
    """Its prompt alone or as a list of one, text or tokens. An echoed answer is the whole text, unless it comes with
    its tokens (vLLM 0.32)."""
    texts, ids = ("once ", "upon ", "a time"), ([300, 301], [302], [303])

    def asked(prompt: object) -> dict:
        return {"prompt": [prompt] if in_list else prompt, "echo": echo}

    remember(conversations, "text", asked(texts[0]), texts[0] + texts[1] if echo else texts[1])
    assert continued(conversations, asked("".join(texts))) == "text"
    remember(conversations, "tokens", asked(ids[0]), {"text": texts[1], "token_ids": ids[1]})
    assert continued(conversations, asked([300, 301, 302, 303])) == "tokens"
    remember(conversations, "both", asked("so "), {"text": texts[1], "token_ids": ids[1]})
    assert continued(conversations, asked("so " + texts[1] + texts[2])) == "both"


def test_stored_responses_are_recognised_by_their_id(conversations: Conversations) -> None:
    """`previous_response_id` names the conversation; an unknown one is new; a full `input` works as well."""
    message = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "hi", "annotations": []}],
    }
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "bash", "arguments": '{"cmd": "ls"}'}
    remember(
        conversations,
        "a",
        {"input": "hello", "instructions": "i"},
        {"id": "resp_1", "output": [reasoning, message, call]},
    )
    assert continued(conversations, {"input": "more", "previous_response_id": "resp_2"}) is None
    assert continued(conversations, {"input": "more", "previous_response_id": "resp_1"}) == "a"
    conversations.release("a")
    output = {"type": "function_call_output", "call_id": "c1", "output": "a.txt"}
    resent = [{"role": "user", "content": "hello"}, message, call | {"id": None, "arguments": '{"cmd":"ls"}'}, output]
    assert continued(conversations, {"instructions": "i", "input": resent}) == "a"
    remember(
        conversations, "a", {"input": "more", "previous_response_id": "resp_1"}, {"id": "resp_3", "output": [message]}
    )
    begun = [{"role": "user", "content": "more"}, message, output]
    assert continued(conversations, {"input": begun}) is None, "the input lacks the earlier turns"


def test_anthropic_messages_are_recognised_without_their_thinking(conversations: Conversations) -> None:
    """Thinking blocks and cache marks come and go; tool uses, their input and their results count."""
    body = {"system": "s", "messages": [QUESTION]}
    use = {"type": "tool_use", "id": "t1", "name": "bash", "input": {"b": 1, "a": 2}}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    text = {"type": "text", "text": "Looking."}
    remember(conversations, "a", body, {"role": "assistant", "content": [thinking, text, use]})
    marked = use | {"input": {"a": 2, "b": 1}, "cache_control": {"type": "ephemeral"}}
    answer = {"role": "assistant", "content": [text, marked]}
    done = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "a.txt"}]}
    cached = [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]
    assert continued(conversations, {"system": cached, "messages": [QUESTION, answer, done]}) == "a"


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=4) | st.just("assistant"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "type", "text", "function", "id"]), inner)
    ),
    max_leaves=12,
)


@given(ODD, ODD, st.sampled_from(["messages", "input", "prompt", "system", "previous_response_id"]))
def test_no_shape_of_body_or_answer_raises(value: object, answer: object, field: str) -> None:
    """Refusing an invalid body is left to the engine."""
    conversations = Conversations()
    continued(conversations, {field: value})
    remember(conversations, "a", {field: value}, answer)
    continued(conversations, {field: value})


def test_text_is_not_mistaken_for_structure(conversations: Conversations) -> None:
    """Two messages differ from one message that contains their encoding."""
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    one = [{"role": "user", "content": "a4:user1:b"}]
    answer = {"role": "assistant", "content": "x"}
    remember(conversations, "a", {"messages": two}, answer)
    assert continued(conversations, {"messages": [*one, answer, QUESTION]}) is None


def test_deeply_nested_content_is_read(conversations: Conversations) -> None:
    """JSON as deep as the parser allows does not exceed the recursion limit."""
    deep = orjson.loads(b'{"a":' * 900 + b"1" + b"}" * 900)
    message = {"role": "assistant", "content": [deep], "tool_calls": [deep]}
    remember(conversations, "a", chat(), message)
    assert continued(conversations, chat(message, QUESTION)) == "a"
