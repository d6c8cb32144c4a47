"""The dashboard in a browser, or what comes closest on a machine without one."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Site, running_site, toy
from tests.support.gateway import eventually

pytestmark = pytest.mark.npm
KEY = "a-key-of-the-dashboard"
# A trajectory may have any name: this one must be shown, not run.
EVIL = "<script>alert(1)</script>/%2F?#"


async def read_by(script: str, *arguments: Path | str) -> dict[str, Any]:
    """What a script beside this file reads in the dashboard."""
    pipe = asyncio.subprocess.PIPE
    command = ("node", str(Path(__file__).with_name(script)), *map(str, arguments))
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, errors = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode == 0, errors.decode()
    read: dict[str, Any] = json.loads(out)
    return read


@pytest.mark.parametrize("link", ["", "#50%"], ids=["", "with the link to a trajectory"])
async def test_a_person_reads_the_dashboard(node_clients: Path, link: str) -> None:
    """It asks for a key, refuses a wrong one and an agent's, and shows turns, rollouts, engines and one trajectory;
    names of clients are text, and so is an id in its address that nobody encoded.
    """
    async with running_site(toy(), api_keys=[KEY], agent_keys=["a-key-of-agents"]) as site:
        site.client.headers["authorization"] = f"Bearer {KEY}"
        await site.client.post("/v1/trajectories", json={"id": "one", "expected_output_tokens": 999_704})
        for name in ("one", EVIL):
            answer = await site.chat(headers={"x-trajectory-id": name, "x-rollout-id": "<b>step</b>"})
            assert answer.status_code == 200, answer.text
        await site.chat("/t/done/v1/chat/completions")
        await site.client.post("/v1/trajectories/done/finish")
        seen = await read_by("dashboard_page.mjs", node_clients, site.url, KEY, link)
        engine_id = (await site.client.get("/v1/engines")).json()["data"][0]["id"]
    assert seen["faults"] == []
    assert (seen["url"].partition("#")[0], seen["styles"]) == (f"{site.url}/dashboard", 1)
    assert seen["linked"].partition(":")[0] == ("No trajectory '50%'" if link else "")
    assert seen["isHiddenWithoutKey"]
    assert seen["status"] == "1 of 1 engines ready; policy heddle"
    assert seen["now"] == {
        "running": "0", "waiting": "0", "in a tool call": "2", "declared": "0", "finished": "1", "aborted": "0"
    }  # fmt: skip
    assert seen["lately"][0].startswith("Turns: 0 running 0 waiting")
    assert seen["numLines"] == 4
    assert [row[:1] + row[2:3] for row in seen["rollouts"]] == [
        ["without a rollout", "1 of 1"],
        ["<b>step</b>", "0 of 2"],
    ]
    assert seen["engines"][0][:5] == [engine_id, "ready", "1", "0 of 8", "2"]
    assert {row[0] for row in seen["longest"]} == {"one", EVIL}
    assert next(row[7] for row in seen["longest"] if row[0] == "one") == "1.00 M", "999,700 tokens to come"
    assert all(row[1:5] == ["<b>step</b>", "in a tool call", engine_id, "1"] for row in seen["longest"])
    assert seen["one"]["about"].startswith("active, rollout <b>step</b>, home ")
    assert seen["one"]["turns"][0][:3] == ["1", "finished", engine_id]
    assert seen["one"]["spans"] == ["waiting", "running"]
    assert "no/such one" in seen["unknown"]
    assert seen["injected"] == 1


async def test_a_person_reads_turns_beside_each_other_and_one_that_was_refused(site: Site, node_clients: Path) -> None:
    """Finished turns are numbered from 1, others not at all; and a turn is drawn to the right of the engines' names,
    also if it began before the first one to end.
    """

    async def runs() -> bool:
        shown = await site.client.get("/v1/trajectories/agents")
        return shown.status_code == 200 and any(turn["state"] == "running" for turn in shown.json()["live_turns"])

    path = "/t/agents/v1/chat/completions"
    older = asyncio.create_task(site.chat(path, max_tokens=500, ignore_eos=True))
    await eventually(runs)
    newer = await site.chat(path, messages=[{"role": "user", "content": "Something else"}])
    assert (newer.status_code, (await older).status_code) == (200, 200)
    await site.client.delete("/v1/trajectories/agents")
    assert (await site.chat(path)).status_code == 409
    turns = (await site.trajectory("agents"))["turns"]
    assert turns[0]["arrived_at"] > turns[1]["arrived_at"], "the newer one ends first"
    seen = await read_by("dashboard_trajectory.mjs", node_clients, site.url, "agents")
    assert seen["faults"] == []
    assert [turn[:2] for turn in seen["turns"]] == [["1", "finished"], ["2", "finished"], ["", "refused"]]
    assert len(seen["spans"]) == 6
    for x, width in seen["spans"]:
        assert x >= 20 and x + width <= 95.2, seen["spans"]


async def test_another_link_opened_in_the_dashboards_tab_shows_its_trajectory(site: Site, node_clients: Path) -> None:
    """Then only the end of the address changes, and the browser loads no page anew."""
    for name in ("one", "two", "two"):
        assert (await site.chat(f"/t/{name}/v1/chat/completions")).status_code == 200
    seen = await read_by("dashboard_trajectory.mjs", node_clients, site.url, "one", "two", "2")
    assert seen["faults"] == []
    assert [turn[:2] for turn in seen["turns"]] == [["1", "finished"], ["2", "finished"]]
