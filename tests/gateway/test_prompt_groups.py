"""Which trajectories have the same prompt if no client says so."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.messages.prompt_groups import MAX_BEGINNINGS, PromptGroups
from gateway.messages.transcripts import preamble_of

ASKED = {"role": "user", "content": "Where are we?"}
GREETED = {"role": "assistant", "content": "Got it. Thanks for the context!"}


def test_siblings_share_a_group_and_other_prompts_have_another() -> None:
    """The group is the same for siblings and for each of their turns."""
    groups = PromptGroups()
    first = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]}
    later = {"messages": [*first["messages"], {"role": "assistant", "content": "a"}, {"role": "user", "content": "z"}]}
    parts = {"messages": [first["messages"][0], {"role": "user", "content": [{"type": "text", "text": "q"}]}]}
    other = {"messages": [first["messages"][0], {"role": "user", "content": "r"}]}
    assert groups.of(first) == groups.of(later) == groups.of(parts)
    assert groups.of(first) != groups.of(other)


def test_every_api_has_groups() -> None:
    """Completions by prompt, responses by instructions and input, Anthropic's messages by system and messages."""
    groups = PromptGroups()
    assert groups.of({"prompt": "a"}) != groups.of({"prompt": "b"})
    assert groups.of({"prompt": [1, 2]}) != groups.of({"prompt": [1, 3]})
    assert groups.of({"input": "a", "instructions": "i"}) != groups.of({"input": "a", "instructions": "j"})
    assert groups.of({"input": "a"}) == groups.of({"input": [{"role": "user", "content": "a"}]})
    user = [{"role": "user", "content": "a"}]
    cached = [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]
    assert groups.of({"system": "s", "messages": user}) == groups.of({"system": cached, "messages": user})
    assert groups.of({"system": "s", "messages": user}) != groups.of({"system": "t", "messages": user})


def test_answers_in_a_first_request_do_not_end_its_prompt() -> None:
    """Many tasks begin with examples or an agent's greeting: the question that follows tells them apart."""
    groups = PromptGroups()
    one, other = groups.of(task("one")), groups.of(task("other"))
    assert one != other
    assert one == groups.of(task("one")), "a sibling"
    answered = {"role": "assistant", "content": "a"}
    assert other == groups.of({"messages": [*task("other")["messages"], answered, ASKED]}), "a later turn"


def test_an_unknown_conversation_joins_the_group_of_its_prompt() -> None:
    """Its answers are not those that were given, so its trajectory is unknown; its first prompt was asked before."""
    groups = PromptGroups()
    group = groups.of({"messages": [ASKED]})
    answered = {"role": "assistant", "content": "not what was said"}
    assert groups.of({"messages": [ASKED, answered, {"role": "user", "content": "go on"}]}) == group


@given(
    st.lists(st.sampled_from(["user", "assistant", "tool"]), min_size=1, max_size=9),
    st.integers(0, 9),
    st.sampled_from(["", "s" * 300]),
    st.integers(1, 9_000),
)
def test_parts_of_a_conversation_are_those_of_its_beginning(
    roles: list[str], end: int, system: str, prompt_tokens: int
) -> None:
    """All parts of a conversation that ends before an answer, or what precedes its last answer, are found in a longer
    one. Tokens add up."""
    groups = PromptGroups()
    messages = [{"role": role, "content": f"{number}" * 40} for number, role in enumerate(roles)]
    bodies = [{"messages": messages[:end]}, {"messages": messages}]
    if system:
        bodies = [{"system": system, **body} for body in bodies]
    short, long = (groups.parts(body, len(str(body)), prompt_tokens) for body in bodies)
    for parts in (short, long):
        assert sum(tokens for _, tokens in parts) == prompt_tokens and all(tokens >= 0 for _, tokens in parts)
    if system:
        assert short[0] == (preamble_of(bodies[0])[0], prompt_tokens * preamble_of(bodies[0])[1] // len(str(bodies[0])))
    names = [name for name, _ in short]
    if roles[end : end + 1] == ["assistant"] and roles[max(end - 1, 0) : end] != ["assistant"]:
        assert names == [name for name, _ in long[: len(short)]]
    else:
        assert names[:-1] == [name for name, _ in long[: len(short) - 1]]


def test_parts_beyond_a_system_prompt_are_as_long_as_without_it() -> None:
    """Its tokens are those of the preamble."""
    said, body = "s" * 300, task("one")
    spelled = ({"system": said} | body, {"messages": [{"role": "system", "content": said}, *body["messages"]]})
    for longer in spelled:
        parts = PromptGroups().parts(longer, 2 * preamble_of(longer)[1], 2_000)
        expected = [1_000, *(tokens for _, tokens in PromptGroups().parts(body, 100, 1_000))]
        assert [tokens for _, tokens in parts] == expected


def test_a_long_conversation_has_a_bounded_number_of_parts() -> None:
    """The last one is the rest of it."""
    messages = [ASKED, {"role": "assistant", "content": "a"}] * 200
    parts = PromptGroups().parts({"messages": messages}, 20_000, 5_000)
    assert len(parts) == MAX_BEGINNINGS + 1 and sum(tokens for _, tokens in parts) == 5_000


def test_prompts_of_an_earlier_process_are_known() -> None:
    """A restart does not put ongoing conversations into new groups."""
    group = PromptGroups().of(task("one"))
    later = {"messages": [*task("one")["messages"], {"role": "assistant", "content": "a"}, ASKED]}
    assert PromptGroups([group]).of(later) == group
    assert PromptGroups().of(later) != group


def test_the_least_recently_seen_prompt_is_forgotten() -> None:
    """Memory is bounded, and a prompt that siblings keep asking stays known."""
    groups = PromptGroups(limit=2)
    for name in ("kept", "dropped", "kept", "new"):
        groups.of(task(name))
    later = [{"role": "assistant", "content": "a"}, ASKED]
    known = {name: groups.of(task(name)) for name in ("kept", "new")}
    assert groups.of({"messages": [*task("kept")["messages"], *later]}) == known["kept"]
    gone = groups.of({"messages": [*task("dropped")["messages"], *later]})
    assert gone != groups.of(task("dropped"))


def task(text: str) -> dict[str, Any]:
    """A first request with an answer in it."""
    return {"messages": [ASKED, GREETED, {"role": "user", "content": text}]}


@pytest.mark.parametrize("name", ["image_data", "video_data", "audio_data", "content_parts", "prompt_embeds"])
def test_images_beside_a_prompt_are_part_of_it(name: str) -> None:
    """On the token routes they stand in a field of their own: tasks with the same words ("How many are there?") and
    other images are no siblings."""
    groups = PromptGroups()
    one, other = ({"input_ids": [1, 2], name: [image]} for image in ("a", "b"))
    assert groups.of(one) == groups.of(dict(one)) != groups.of(other)
    assert groups.of({"input_ids": [1, 2], name: None}) == groups.of({"input_ids": [1, 2]})


def test_vllms_features_are_told_apart_by_their_hashes() -> None:
    """The data itself is left out once the engine has it, so that siblings may differ in it."""
    groups = PromptGroups()

    def asked(image: str, data: object) -> dict[str, Any]:
        return {"token_ids": [1, 2], "features": {"mm_hashes": {"image": [image]}, "kwargs_data": data}}

    assert groups.of(asked("a", {"image": ["AAAA"]})) == groups.of(asked("a", None)) != groups.of(asked("b", None))
