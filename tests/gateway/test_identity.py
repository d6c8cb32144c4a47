"""The forms in which a client may name its trajectory, and which wins."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.messages.identity import (
    MAX_ID_LENGTH,
    Hints,
    Identity,
    IdentityError,
    identify,
    strip_identity_path,
)
from gateway.messages.transcripts import preamble_of

CHAT = "/v1/chat/completions"

# (how the id is sent, the name of this source), in order of precedence.
FORMS: list[tuple[dict, str]] = [
    ({"path": "/t/ID/v1/chat/completions"}, "path"),
    ({"headers": {"x-trajectory-id": "ID"}}, "x-trajectory-id"),
    ({"headers": {"x-session-id": "ID"}}, "x-session-id"),
    ({"headers": {"x-smg-routing-key": "ID"}}, "x-smg-routing-key"),
    ({"headers": {"x-dynamo-session-id": "ID"}}, "x-dynamo-session-id"),
    ({"headers": {"x-claude-code-session-id": "ID"}}, "x-claude-code-session-id"),
    ({"headers": {"session-id": "ID"}}, "session-id"),
    ({"headers": {"x-correlation-id": "ID"}}, "x-correlation-id"),
    ({"body": {"metadata": {"trajectory_id": "ID"}}}, "metadata.trajectory_id"),
    ({"body": {"vllm_xargs": {"agentic_context": {"program_id": "ID"}}}}, "vllm_xargs.agentic_context.program_id"),
    ({"body": {"program_id": "ID"}}, "program_id"),
    ({"body": {"session_params": {"session_id": "ID"}}}, "session_params.session_id"),
    ({"body": {"session_params": {"id": "ID"}}}, "session_params.id"),
    ({"body": {"session_id": "ID"}}, "session_id"),
    ({"body": {"metadata": {"session_id": "ID"}}}, "metadata.session_id"),
    ({"body": {"user": "ID"}}, "user"),
    ({"body": {"metadata": {"user_id": "ID"}}}, "metadata.user_id"),
]


def identity(path: str = CHAT, headers: dict | None = None, body: dict | None = None) -> Identity:
    pairs = [(b"host", b"gateway"), (b"content-type", b"application/json")]
    pairs += [(name.encode(), value.encode("utf-8")) for name, value in (headers or {}).items()]
    return identify(path, dict(pairs), body or {})


def merged(first: dict, second: dict) -> dict:
    """Both forms in one request; if both set a value, the first one's stands."""
    both = dict(second)
    for key, value in first.items():
        both[key] = merged(value, both[key]) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
    return both


def renamed(form: dict, trajectory_id: str) -> dict:
    return orjson.loads(orjson.dumps(form).replace(b"ID", trajectory_id.encode()))


@pytest.mark.parametrize(("form", "source"), FORMS, ids=[source for _, source in FORMS])
def test_every_form_names_the_trajectory(form: dict, source: str) -> None:
    """A client can name its trajectory with whatever it can set; only `user` may stand for several at once."""
    found = identity(**renamed(form, "traj-7"))
    assert found.trajectory_id == "traj-7"
    assert found.strong is (source not in ("user", "metadata.user_id"))


@pytest.mark.parametrize("place", range(len(FORMS) - 1))
def test_each_form_wins_over_every_later_one(place: int) -> None:
    """The order of precedence is total: a request with two forms has the id of the earlier one."""
    for later, _ in FORMS[place + 1 :]:
        found = identity(**merged(renamed(FORMS[place][0], "first"), renamed(later, "second")))
        assert found.trajectory_id == "first"


@pytest.mark.parametrize("place", range(len(FORMS) - 1))
def test_a_blank_form_gives_way_to_a_later_one(place: int) -> None:
    """An unset template variable sends blanks: they are no id, and hide none."""
    form = renamed(FORMS[place][0], "%20" if place == 0 else "  ")
    found = identity(**merged(form, renamed(FORMS[-1][0], "fallback")))
    assert found.trajectory_id == "fallback"


def test_a_request_without_any_form_has_no_identity() -> None:
    """No header of an ordinary client is taken for an id."""
    assert identity() == Identity(None, False, None, None, Hints())


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/t/a/v1/chat/completions", ("a", "/v1/chat/completions")),
        ("/sessions/a/v1/models", ("a", "/v1/models")),
        ("/t/a/v1", ("a", "/v1")),
        ("/t/a%2Fb%20c/v1/x", ("a/b c", "/v1/x")),
        ("/t//v1/x", (None, "/v1/x")),
        ("/v1/chat/completions", (None, "/v1/chat/completions")),
        ("/t/a/v2/x", (None, "/t/a/v2/x")),
        ("/t/a/v10/x", (None, "/t/a/v10/x")),
        ("/t/a", (None, "/t/a")),
        ("/t/", (None, "/t/")),
        ("/sessions/a", (None, "/sessions/a")),
        ("/v1/t/a/v1/x", (None, "/v1/t/a/v1/x")),
    ],
)
def test_only_the_path_form_is_stripped_from_a_path(path: str, expected: tuple) -> None:
    """A client that can set only its base URL names its trajectory there; an escaped slash stays in the id."""
    assert strip_identity_path(path) == expected


@given(st.text(min_size=1, max_size=100).filter(lambda text: text.isascii() and text.isprintable() and text.strip()))
def test_any_printable_id_survives_the_path(trajectory_id: str) -> None:
    """Percent-encoding an id into the path and reading it back gives the id."""
    from urllib.parse import quote

    path = f"/t/{quote(trajectory_id, safe='')}/v1/x"
    assert strip_identity_path(path) == (trajectory_id.strip(), "/v1/x")


@pytest.mark.parametrize("bad", ["x" * (MAX_ID_LENGTH + 1), "a\x00b", "a\nb", "tr\u00e4jektorie"])
@pytest.mark.parametrize("place", range(len(FORMS)))
def test_an_invalid_id_is_refused_except_in_user(place: int, bad: str) -> None:
    """A strong id that cannot be kept is an error that names the form, never another trajectory; a user name is
    ignored instead."""
    from urllib.parse import quote

    form = orjson.loads(orjson.dumps(FORMS[place][0]))
    text = orjson.dumps(quote(bad) if place == 0 else bad)[1:-1]
    form = orjson.loads(orjson.dumps(form).replace(b"ID", text))
    if FORMS[place][1] in ("user", "metadata.user_id"):
        assert identity(**form).trajectory_id is None
    else:
        with pytest.raises(IdentityError, match=rf"\b{FORMS[place][1]} "):
            identity(**form)


def test_an_id_of_the_maximum_length_is_accepted() -> None:
    """The limit of 256 characters is inclusive."""
    longest = "x" * MAX_ID_LENGTH
    assert identity(headers={"x-trajectory-id": longest}).trajectory_id == longest


@pytest.mark.parametrize("value", [7, [1], {"a": 1}, True, 1.5])
def test_an_integer_is_an_id_and_no_other_type_is(value: object) -> None:
    """Ids are often row numbers; a list or a fraction is a mistake that is reported to the client."""
    if value == 7:
        assert identity(body={"session_id": value}).trajectory_id == "7"
    else:
        with pytest.raises(IdentityError):
            identity(body={"session_id": value})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "metadata", "vllm_xargs", "program_id", "session_params", "session_id", "user", "nvext", "agentic_context",
    "agent_hints", "priority", "strict_priority", "user_id", "group_id",
]  # fmt: skip


@given(
    st.recursive(
        st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6),
        lambda inner: st.dictionaries(st.sampled_from(FIELDS), inner | JSON, max_size=6),
        max_leaves=8,
    )
)
def test_a_body_of_any_shape_gives_an_identity_or_its_error(body: dict) -> None:
    """Wrong types in any field never end in a 500."""
    try:
        found = identity(body=body)
    except IdentityError:
        return
    assert found.trajectory_id is None or found.trajectory_id.isprintable()


def test_each_claude_code_agent_is_its_own_trajectory() -> None:
    """A session's agents run side by side: agent ids tell them apart."""
    session = {"x-claude-code-session-id": "s"}
    main = identity(headers=session)
    sub = identity(headers=session | {"x-claude-code-agent-id": "a1"})
    nested = identity(headers=session | {"x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"})
    blank = identity(headers=session | {"x-claude-code-agent-id": " "})
    named = identity("/t/own/v1/messages", headers=session | {"x-claude-code-agent-id": "a1"})
    found = [each.trajectory_id for each in (main, sub, nested, blank, named)]
    assert found == ["s", "s:a1", "s:a2", "s", "own"]


def test_threads_of_one_session_are_distinct_trajectories() -> None:
    """Codex and OpenCode send session-id and thread-id; a thread alone names nothing."""
    assert identity(headers={"session-id": "s", "thread-id": "t"}).trajectory_id == "s:t"
    assert identity(headers={"thread-id": "t"}).trajectory_id is None


@pytest.mark.parametrize(
    "user_id",
    [
        "user_0f3a_account__session_57a121ec-f78c-48c3-a745-e3036a3ecc33",
        '{"device_id":"d","account_uuid":"","session_id":"57a121ec-f78c-48c3-a745-e3036a3ecc33"}',
    ],
)
def test_a_claude_code_session_is_found_in_the_user_id(user_id: str) -> None:
    """Before it had its own header, Claude Code put the session into metadata.user_id, since 2.1.78 as JSON."""
    found = identity("/v1/messages", body={"metadata": {"user_id": user_id}})
    assert (found.trajectory_id, found.strong) == ("57a121ec-f78c-48c3-a745-e3036a3ecc33", False)


def test_agentic_context_may_be_a_json_string() -> None:
    """vLLM's vllm_xargs takes no objects, so its clients send this one as a string; invalid JSON is ignored."""
    context = {"program_id": "p", "priority": 4}
    as_object = identity(body={"vllm_xargs": {"agentic_context": context}})
    as_string = identity(body={"vllm_xargs": {"agentic_context": orjson.dumps(context).decode()}})
    assert as_object == as_string
    assert (as_object.trajectory_id, as_object.hints.priority) == ("p", 4)
    assert identity(body={"vllm_xargs": {"agentic_context": "{nonsense"}}).trajectory_id is None


def test_group_and_rollout_come_from_header_then_metadata() -> None:
    """The header wins, as with ids."""
    metadata = {"metadata": {"group_id": "g2", "rollout_id": "r2"}}
    in_body = identity(body=metadata)
    assert (in_body.group_id, in_body.rollout_id) == ("g2", "r2")
    found = identity(headers={"x-group-id": "g1", "x-rollout-id": "r1"}, body=metadata)
    assert (found.group_id, found.rollout_id) == ("g1", "r1")


def test_hints_come_from_headers_then_nvext_then_agentic_context() -> None:
    """Dynamo's headers override nvext (Dynamo, priority scheduling); each hint is resolved by itself."""
    body = {
        "nvext": {"agent_hints": {"priority": 5, "strict_priority": 1}},
        "vllm_xargs": {"agentic_context": {"priority": 9}},
    }
    assert identity(body=body).hints == Hints(5, 1)
    headers = {"x-dynamo-request-priority": "-3", "x-dynamo-request-strict-priority": "2"}
    assert identity(headers=headers, body=body).hints == Hints(-3, 2)
    assert identity(body={"nvext": body["nvext"]}).hints == Hints(5, 1)
    assert identity(body={"vllm_xargs": body["vllm_xargs"]}).hints == Hints(9)
    for name, hints in zip(headers, (Hints(priority=-3), Hints(strict_priority=2)), strict=True):
        assert identity(headers={name: headers[name]}).hints == hints


@pytest.mark.parametrize("bad", ["high", None, [], {}, True, 10**30, 1.5, -(10**12)])
def test_an_invalid_hint_is_ignored(bad: object) -> None:
    """A hint is never a reason to refuse a turn."""
    hints = identity(body={"nvext": {"agent_hints": {"priority": bad, "strict_priority": bad}}}).hints
    assert hints == Hints()
    assert identity(body={"nvext": bad}).hints == Hints()
    for value in ("urgent", "--5", "5-", "-", "1_0", "9" * 30):
        assert identity(headers={"x-dynamo-request-priority": value}).hints == Hints()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [(5, 5), (5.0, 5), (-(2**31) + 1, -(2**31) + 1), (2**31 - 1, 2**31 - 1), (2**31, None), (-(2**31), None), (0, 0)],
)
def test_a_priority_is_a_whole_number_of_32_bits(sent: float, expected: int | None) -> None:
    """However it is written: engines take no other."""
    priority = identity(body={"nvext": {"agent_hints": {"priority": sent}}}).hints.priority
    assert (priority, type(priority)) == (expected, type(expected))


@pytest.mark.parametrize("number", [0, -5, 2**63, 2**64 - 1])
def test_any_64_bit_integer_is_an_id(number: int) -> None:
    """Hashes have 64 bits."""
    assert identity(body={"program_id": number}).trajectory_id == str(number)


@pytest.mark.parametrize("parent", ["x" * (MAX_ID_LENGTH + 1), "sp\xe4t"])
def test_a_parent_that_cannot_be_an_id_refuses_no_turn(parent: str) -> None:
    """The gateway does not use parents; a turn whose client named an invalid one used to be a 400."""
    headers = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}
    for name in ("x-claude-code-parent-agent-id", "x-dynamo-parent-session-id"):
        assert identity(headers=headers | {name: parent}).trajectory_id == "s:a"
    context = {"program_id": "p", "parent_program_id": parent}
    assert identity(body={"vllm_xargs": {"agentic_context": context}}).trajectory_id == "p"


def test_agents_of_one_kind_have_one_preamble() -> None:
    """It is the tools and the system prompt, in every API's form, whatever the task is."""
    system, tools = {"role": "system", "content": "s" * 100}, [{"type": "function", "function": {"name": "run"}}]
    chat = {"messages": [system, {"role": "user", "content": "q"}], "tools": tools}
    other_task = {"messages": [system, {"role": "user", "content": "z"}], "tools": tools}
    later = {"messages": [*chat["messages"], {"role": "assistant", "content": "a"}, system], "tools": tools}
    assert preamble_of(chat) == preamble_of(other_task) == preamble_of(later)
    name, num_bytes = preamble_of(chat)
    assert name and 100 < num_bytes < len(orjson.dumps(chat))
    forms = [
        chat,
        chat | {"tools": []},
        chat | {"messages": [{"role": "developer", "content": "s"}]},
        {"system": "s", "messages": [{"role": "user", "content": "q"}]},
        {"instructions": "s", "input": "q"},
        {"input": [system, {"role": "user", "content": "q"}]},
    ]
    assert all(preamble_of(form)[0] for form in forms)
    assert len({preamble_of(form)[0] for form in forms[:3]}) == 3, "other tools, another system prompt"


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": "p"}, {"messages": [{"role": "user", "content": "q"}]}, {"messages": 3}, {"input": ["x"]}],
)
def test_a_prompt_may_have_no_preamble(body: dict[str, object]) -> None:
    """Such prompts have nothing in common."""
    assert preamble_of(body) == ("", 0)


def test_a_preamble_too_deep_to_encode_is_none() -> None:
    """An engine cannot use a body of this depth either."""
    deep: list[object] = []
    for _ in range(300):
        deep = [deep]
    assert preamble_of({"system": deep, "messages": []}) == ("", 0)
