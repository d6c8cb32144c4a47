"""The agent without a network: prompts of the wanted size, valid conversations, answers checked against the request."""

from typing import Any

import pytest

from loadtest.agent import Answer, Conversation, Writer, address_of, chat_body, mismatch
from workloads.trajectories import Trajectory, Turn


def answer(turn: Turn, prompt_tokens: int = 100, **changes: Any) -> Answer:
    fields: dict[str, Any] = {
        "content": "ok",
        "tool_calls": (),
        "finish_reason": "length",
        "prompt_tokens": prompt_tokens,
        "cached_tokens": 0,
        "output_tokens": turn.output_tokens,
    }
    return Answer(**(fields | changes))


@pytest.mark.parametrize(("chars_per_token", "template_tokens"), [(4.0, 0), (5.5, 25), (1.0, 9), (2.3, 300)])
def test_the_writer_learns_the_models_tokenisation(chars_per_token: float, template_tokens: int) -> None:
    """After two prompts of different sizes, it separates the template from the text and hits a wanted size within 2
    %."""
    writer = Writer()

    def count(text: str) -> int:
        return template_tokens + round(len(text) / chars_per_token)

    for size in (16, 256):
        text = writer.first_prompt(Trajectory("p", f"probe-{size}", size, ()))
        writer.learn(len(text), count(text))
    wanted = 1_000
    text = writer.first_prompt(Trajectory("t", "g", wanted, ()))
    assert count(text) == pytest.approx(wanted, rel=0.02)


def test_siblings_share_their_first_prompt_and_other_groups_do_not() -> None:
    """Siblings' prompts are equal to the letter, even if the writer has learned in between."""
    writer = Writer()
    first = writer.first_prompt(Trajectory("a-0", "a", 200, ()))
    writer.learn(1_000, 100)
    assert writer.first_prompt(Trajectory("a-1", "a", 200, ())) == first
    assert writer.first_prompt(Trajectory("b-0", "b", 200, ()))[:40] != first[:40]


def test_a_conversation_keeps_to_its_planned_length() -> None:
    """A template that the writer does not know adds tokens to the prompt at each turn; later messages make up for
    it."""
    turns = tuple(Turn(100 if index else 0, 50, 0.0) for index in range(10))
    trajectory = Trajectory("t", "g", 500, turns)
    conversation = Conversation(trajectory, Writer())
    for turn in turns:
        messages = conversation.ask()
        # Every answer is written as 50 tokens and every message costs 8 more.
        prompt_tokens = sum(
            8 + (50 if message["role"] == "assistant" else len(message["content"]) // 4) for message in messages
        )
        assert conversation.hear(answer(turn, prompt_tokens)) is None
    assert prompt_tokens + 50 == pytest.approx(trajectory.total_tokens, abs=20)


def test_roles_follow_the_answer() -> None:
    """Each tool call gets a tool message with its id; an answer without one is followed by the user."""
    turns = (Turn(0, 5, 0.0), Turn(40, 5, 0.0), Turn(40, 5, 0.0))
    conversation = Conversation(Trajectory("t", "g", 50, turns), Writer())
    conversation.ask()
    calls = tuple({"id": f"call_{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in (1, 2))
    conversation.hear(answer(turns[0], tool_calls=calls, finish_reason="tool_calls"))
    messages = conversation.ask()
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool"]
    assert [m["tool_call_id"] for m in messages[2:]] == ["call_1", "call_2"]
    assert messages[1]["tool_calls"] == list(calls)
    conversation.hear(answer(turns[1]))
    assert [m["role"] for m in conversation.ask()][4:] == ["assistant", "user"]


def test_an_answer_that_differs_from_the_request_is_explained() -> None:
    """Too few tokens, too many, and an end that the model chose each have their message."""
    turn = Turn(0, 20, 0.0)
    assert mismatch(turn, answer(turn)) is None
    assert mismatch(turn, answer(turn, finish_reason="tool_calls")) is None
    assert "asked for 20 tokens, got 12" in str(mismatch(turn, answer(turn, output_tokens=12)))
    assert "asked for 20 tokens, got 21" in str(mismatch(turn, answer(turn, output_tokens=21)))
    assert "'stop'" in str(mismatch(turn, answer(turn, finish_reason="stop")))


def test_each_identity_form_puts_the_id_in_one_place() -> None:
    """Header, path and body carry the id where the gateway looks for it; `none` carries nothing at all."""
    header = address_of("header", "t", "g", "r")
    assert header.headers == {"X-Trajectory-Id": "t", "X-Group-Id": "g", "X-Rollout-Id": "r"}
    assert (header.path_prefix, header.body) == ("", {})
    path = address_of("path", "t", "g", "r")
    assert (path.path_prefix, dict(path.headers)) == ("/t/t", {"X-Group-Id": "g", "X-Rollout-Id": "r"})
    body = address_of("body", "t", "g", "r")
    assert body.body == {"metadata": {"trajectory_id": "t", "group_id": "g", "rollout_id": "r"}}
    assert (body.path_prefix, body.headers) == ("", {})
    nothing = address_of("none", "t", "g", "r")
    assert (nothing.path_prefix, nothing.headers, nothing.body) == ("", {}, {})


def test_an_answer_of_exact_length_has_no_end_in_its_middle() -> None:
    """An end-of-turn token within an answer is missing in its text, and the next prompt would not find the answer's KV:
    on real vLLM, 41,536 tokens of a rollout were computed again."""
    body = chat_body("tiny", [], 20, True)
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (20, 20, True)
