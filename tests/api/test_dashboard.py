"""The dashboard's page and figures."""

import asyncio
import re
from typing import Any

import httpx
import pytest

from tests.api.conftest import Site, running_site, toy
from tests.support.gateway import eventually

LONG = {"max_tokens": 4000, "ignore_eos": True}
PAGES = ("/dashboard", "/dashboard/page.css", "/dashboard/page.js")


async def overview(site: Site) -> dict[str, Any]:
    answer = await site.client.get("/v1/overview")
    assert answer.status_code == 200, answer.text
    return answer.json()


def doing(**counts: int) -> dict[str, int]:
    names = ("declared", "waiting", "running", "in_tool_call", "finished", "aborted")
    return dict.fromkeys(names, 0) | counts


async def test_nothing_has_happened_yet(site: Site) -> None:
    """Zeros, and no division by them."""
    seen = await overview(site)
    assert seen["num_trajectories"] == doing()
    assert (seen["rollouts"], seen["longest"], seen["num_rollouts"]) == ([], [], 0)
    assert seen["history"]["output_tokens"][-1] == 0


async def test_each_trajectory_is_counted_where_it_is() -> None:
    """Of one slot: one runs, one waits; the others are in a tool call, ended, or only declared."""
    async with running_site(toy(slots=1)) as site:
        of_a = {"x-rollout-id": "a"}
        for name in ("in-tool", "finished", "aborted", "in-tool-2"):
            await site.chat(f"/t/{name}/v1/chat/completions", headers=of_a)
        await site.client.post("/v1/trajectories/finished/finish")
        await site.client.delete("/v1/trajectories/aborted")
        await site.client.post("/v1/trajectories", json={"id": "declared", "rollout_id": "a"})
        await site.chat("/t/alone/v1/chat/completions")
        turns = [
            asyncio.create_task(site.chat(f"/t/long-{number}/v1/chat/completions", headers=of_a, stream=True, **LONG))
            for number in range(2)
        ]
        in_a = doing(declared=1, waiting=1, running=1, in_tool_call=2, finished=1, aborted=1)
        seen: dict[str, Any] = {}

        async def is_shown() -> bool:
            seen.update(await overview(site))
            return any(rollout["num_trajectories"] == in_a for rollout in seen["rollouts"])

        await eventually(is_shown)
        listed = (await site.client.get("/v1/trajectories")).json()["data"]
        engine = (await site.client.get("/v1/engines")).json()["data"][0]
        for turn in turns:
            turn.cancel()
    assert seen["num_trajectories"] == in_a | {"in_tool_call": 3}
    assert (seen["history"]["num_running_turns"][-1], seen["history"]["num_waiting_turns"][-1]) == (1, 1)
    assert (seen["num_rollouts"], [rollout["id"] for rollout in seen["rollouts"]].count(None)) == (2, 1)
    rollout = next(rollout for rollout in seen["rollouts"] if rollout["id"] == "a")
    of_rollout = [one for one in listed if one["rollout_id"] == "a"]
    assert rollout["output_tokens"] == sum(one["output_tokens"] for one in of_rollout) == 4 * 4
    assert rollout["num_turns"] == 4
    assert rollout["num_ended"][-1] == 2 and sorted(rollout["num_ended"]) == rollout["num_ended"]
    assert rollout["began_at"] == min(one["created_at"] for one in of_rollout)
    left = {
        one["id"]: max(one["predicted_tokens"] - one["output_tokens"], 1) for one in listed if one["state"] == "active"
    }
    assert rollout["remaining_tokens"] == pytest.approx(sum(left.values()) - left["alone"], abs=1)
    assert {one["id"]: one["remaining_tokens"] for one in seen["longest"]} == pytest.approx(left, abs=1)
    shown = [one["remaining_tokens"] for one in seen["longest"]]
    assert shown == sorted(shown, reverse=True)
    running = next(one for one in seen["longest"] if one["doing"] == "running")
    assert running["id"].startswith("long-") and running["num_turns"] == 0
    assert engine["num_trajectories"] >= 1 and engine["finish_s"] > 0


async def test_a_finished_rollout_stands_still(site: Site) -> None:
    """Its time is that until its last trajectory, not until now."""
    await site.chat(headers={"x-trajectory-id": "t", "x-rollout-id": "r"})
    await site.client.post("/v1/trajectories/t/finish")
    ended_at = (await site.trajectory("t"))["last_at"]

    async def has_ended() -> bool:
        rollouts = (await overview(site))["rollouts"]
        return bool(rollouts) and rollouts[0]["num_trajectories"]["finished"] == 1

    await eventually(has_ended)
    rollout = (await overview(site))["rollouts"][0]
    assert (rollout["until"], rollout["remaining_tokens"]) == (ended_at, 0)


async def test_many_who_look_share_one_look(site: Site) -> None:
    """All get the figures of the same instant, and newer ones come later."""
    looks = await asyncio.gather(*(overview(site) for _ in range(8)))
    assert len({look["at"] for look in looks}) == 1

    async def is_newer() -> bool:
        return (await overview(site))["at"] > looks[0]["at"]

    await eventually(is_newer)


async def test_the_page_needs_no_key_and_its_figures_do() -> None:
    """Whoever opens the gateway in a browser finds the page."""
    async with running_site(api_keys=["a-key-of-the-dashboard"]) as site:
        first = await site.client.get("/")
        assert (first.status_code, first.headers["location"]) == (307, "dashboard")
        assert (await site.client.post("/")).status_code == 405
        for path in PAGES:
            assert (await site.client.get(path)).status_code == 200
        assert (await site.client.get("/v1/overview")).status_code == 401


async def test_the_page_has_what_it_names_and_runs_nothing_else(site: Site) -> None:
    """No script or style stands in the page itself, so its policy can forbid them: text of clients can never run."""
    page = await site.client.get("/dashboard")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|https?://", page.text)
    for name in re.findall(r'(?:src|href)="([^":]+)"', page.text):
        answer = await site.client.get(str(httpx.URL(site.url + "/dashboard").join(name)))
        assert answer.status_code == 200, name
    script = (await site.client.get("/dashboard/page.js")).text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", script)
