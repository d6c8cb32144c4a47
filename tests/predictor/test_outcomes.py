"""Tool outcomes, read from conversations as common agent frameworks write them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.outcomes import outcomes

Message = dict[str, Any]


def chat_call(*calls: tuple[str, str]) -> Message:
    functions = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}} for call_id, name in calls
    ]
    return {"role": "assistant", "content": None, "tool_calls": functions}


def chat_result(call_id: str, content: object) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


CHAT = [
    {"role": "system", "content": "You are a coding agent."},
    {"role": "user", "content": "Fix the bug."},
    chat_call(("c1", "bash"), ("c2", "read_file")),
    chat_result("c1", "<returncode>1</returncode>\n<output>make: no rule</output>"),
    chat_result("c2", [{"type": "text", "text": "x = 1\n" * 200}]),
    chat_call(("c3", "browser")),
    chat_result("c3", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]),
    {"role": "assistant", "content": "Done."},
]
RESPONSES = [
    {"role": "user", "content": [{"type": "input_text", "text": "Fix the bug."}]},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "shell", "arguments": "{}"},
    {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c2", "name": "apply_patch", "input": "*** Begin Patch"},
    {
        "type": "function_call_output",
        "call_id": "c1",
        "output": json.dumps({"output": "y" * 6_000, "metadata": {"exit_code": 124}}),
    },
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Success."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Now the tests."}]},
    {"type": "shell_call", "call_id": "c3", "action": {"commands": ["pytest"]}},
    {
        "type": "shell_call_output",
        "call_id": "c3",
        "output": [{"stdout": "F", "stderr": "", "outcome": {"type": "exit", "exit_code": 1}}],
    },
]
ANTHROPIC = [
    {"role": "user", "content": "Fix the bug."},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "Read", "input": {}},
            {"type": "tool_use", "id": "t2", "name": "Bash", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "     1\tError: in a file\n" * 40},
            {"type": "tool_result", "tool_use_id": "t2", "content": "Error: Exit code 1\nno", "is_error": True},
            {"type": "text", "text": "<system-reminder>Error: none of your business</system-reminder>"},
        ],
    },
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t3", "name": "Bash", "input": {}}]},
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "t3",
                "is_error": True,
                "content": [{"type": "text", "text": "Command timed out after 2m 0.0s"}],
            }
        ],
    },
]
PLAIN = [
    {"role": "system", "content": "Answer with one command."},
    {"role": "user", "content": "Error: my program fails"},
    {"role": "assistant", "content": "```bash\nmake\n```"},
    {"role": "user", "content": "<returncode>2</returncode>\n<output>make: *** no rule</output>"},
    {"role": "assistant", "content": "```bash\nls\n```"},
    {"role": "user", "content": "<returncode>0</returncode>\n<output>a.c</output>"},
]
CONVERSATIONS = {"chat": CHAT, "responses": RESPONSES, "anthropic": ANTHROPIC, "plain": PLAIN}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (CHAT, ("bash:small:failure", "read_file:medium:success", "browser:medium:success")),
        (RESPONSES, ("shell:large:timeout", "apply_patch:small:success", "shell:small:failure")),
        (ANTHROPIC, ("Read:medium:success", "Bash:small:failure", "Bash:small:timeout")),
        (PLAIN, ("user:small:failure", "user:small:success")),
    ],
    ids=CONVERSATIONS,
)
def test_tool_size_and_status_are_read_from_every_api_form(messages: list[Message], expected: tuple[str, ...]) -> None:
    """Each of several parallel calls counts, in order. The question itself and reminders beside results do not."""
    assert outcomes(messages) == expected


def test_results_without_their_calls_count_as_an_unknown_tool() -> None:
    """A request that continues a stored response contains outputs only; a compacted history has lost its calls."""
    assert outcomes([{"type": "function_call_output", "call_id": "c9", "output": "fine"}]) == ("?:small:success",)
    assert outcomes([chat_result("c9", "fine")]) == ("?:small:success",)


def test_a_tools_name_cannot_break_the_format() -> None:
    """There are three fields whatever the name: colons are replaced and the length is cut."""
    [found] = outcomes([chat_call(("c1", "a:b" * 100)), chat_result("c1", "x")])
    assert found.count(":") == 2 and len(found) < 70


@pytest.mark.parametrize(("num", "size"), [(499, "small"), (500, "medium"), (4_999, "medium"), (5_000, "large")])
def test_a_size_class_begins_with_its_lower_limit(num: int, size: str) -> None:
    """A text exactly as long as a class's lower limit belongs to that class."""
    assert outcomes([chat_call(("c", "t")), chat_result("c", "y" * num)]) == (f"t:{size}:success",)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "type",
                    "content",
                    "tool_calls",
                    "call_id",
                    "id",
                    "output",
                    "function",
                    "name",
                    "text",
                    "is_error",
                ]
            ),
            values | st.sampled_from(["assistant", "tool", "user", "tool_result", "tool_use", "function_call_output"]),
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(junk | st.lists(junk, max_size=6))
def test_malformed_messages_never_raise(messages: object) -> None:
    """Whatever a client sends, each outcome found has its three parts."""
    for found in outcomes(messages):
        tool, size, status = found.split(":")
        assert tool and size in ("small", "medium", "large") and status in ("success", "failure", "timeout")
