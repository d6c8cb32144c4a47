"""Command-line coding agents, by what they send: recorded with the programs in docs/frameworks.md."""

from typing import Any

import pytest

from tests.api.conftest import Site

pytestmark = pytest.mark.usefixtures("token_legs")

SYSTEM = {"role": "system", "content": "You are an interactive agent."}
CONTEXT = {"role": "user", "content": [{"type": "text", "text": "We are setting up the context. You are in /testbed."}]}
GREETED = {"role": "assistant", "content": "Got it. Thanks for the context!"}


@pytest.mark.parametrize("prefix", ["", "/t/{name}"], ids=["no id", "path"])
async def test_an_agent_that_starts_with_an_answer_has_a_group_per_task(site: Site, prefix: str) -> None:
    """Qwen Code greets itself and aider shows examples before they state the task; siblings share their task."""
    groups: dict[str, set[str]] = {}
    for name, task in (("a", "Mend it."), ("b", "Mend it."), ("c", "Write a test.")):
        messages: list[Any] = [SYSTEM, CONTEXT, GREETED, {"role": "user", "content": task}]
        ids = []
        for turn in range(3):
            answer = await site.chat(f"{prefix.format(name=name)}/v1/chat/completions", messages=messages)
            ids.append(answer.headers["x-trajectory-id"])
            reply = answer.json()["choices"][0]["message"]
            messages += [reply, {"role": "user", "content": [{"type": "text", "text": f"{name} saw {turn}"}]}]
        assert len(set(ids)) == 1
        shown = await site.trajectory(ids[0])
        assert shown["num_turns"] == 3
        groups.setdefault(task, set()).add(shown["group_id"])
    assert {task: len(found) for task, found in groups.items()} == {"Mend it.": 1, "Write a test.": 1}
    assert groups["Mend it."] != groups["Write a test."]
