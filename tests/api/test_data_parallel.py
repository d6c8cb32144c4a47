"""A server with data-parallel ranks: each rank is an engine, and what concerns their process concerns all of them."""

import asyncio
from collections import defaultdict
from typing import Any

import httpx
import orjson
import pytest

from controller.gateway_client import GatewayClient
from engines.dialect import ObservationError
from engines.http import HttpClient
from engines.sglang import Sglang
from engines.upstream import RANK_HEADER
from tests.api.conftest import GENERATE, HELLO, MODEL, Site, running_site, toy
from tests.support.engine import Asked, fixed
from tests.support.gateway import ADMIN, ADMIN_KEY, eventually, running_gateway
from tests.weights.gateway_client import update
from tests.weights.relaunched import server

KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])
QUICK = {"observe_interval_s": 0.05}


async def engines_of(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = (await client.get("/v1/engines")).json()["data"]
    return listed


def rank_of(asked: Asked) -> int:
    """Which rank a request is for, by its header and, where the engine does not read that, by its body."""
    if asked.path == "/generate":
        assert asked.json["routed_dp_rank"] == int(asked.headers[RANK_HEADER])
    return int(asked.headers[RANK_HEADER])


async def played(site: Site, name: str, num_turns: int) -> list[int]:
    """Play a trajectory whose context grows; returns how many tokens of each turn's prompt were cached."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{name} begins like no other. " * 20}]
    cached = []
    for _ in range(num_turns):
        answer = await site.chat(f"/t/{name}/v1/chat/completions", messages=messages)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        cached.append((told["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        messages += [told["choices"][0]["message"], {"role": "user", "content": "Go on. " * 20}]
    return cached


@KINDS
async def test_each_rank_is_an_engine_with_slots_and_kv_of_its_own(kind: str) -> None:
    """It took such a server for one engine with the KV of all ranks, and, of vLLM, the slots of one."""
    async with running_site(toy(kind, slots=8, data_parallel_size=3)) as site:
        engines = await engines_of(site.client)
        address = site.engine.url.removeprefix("http://")
        assert [engine["id"] for engine in engines] == [address, f"{address}@1", f"{address}@2"]
        assert [engine["data_parallel_rank"] for engine in engines] == [0, 1, 2]
        assert {engine["slots"] for engine in engines} == {8}
        assert {engine["kv_capacity_tokens"] for engine in engines} == {toy().profile.kv_capacity_tokens}
        assert (await site.client.get(f"/v1/engines/{address}@2")).json() == engines[2]


@KINDS
@pytest.mark.parametrize("token_legs", ["off", "auto"])
async def test_trajectories_spread_over_the_ranks_and_each_stays_where_its_kv_is(kind: str, token_legs: str) -> None:
    """A server that is not told the rank gives each turn to any of them, whose cache does not have the context."""
    async with running_site(toy(kind, data_parallel_size=2), token_legs=token_legs) as site:
        names = [f"trajectory-{number}" for number in range(6)]
        cached = await asyncio.gather(*(played(site, name, 3) for name in names))
        assert all(min(later) > 100 for _, *later in cached), cached
        sent = [asked for asked in site.engine.turns if asked.path in ("/v1/chat/completions", GENERATE, "/generate")]
        assert len(sent) == 18
        ranks = defaultdict(set)
        for asked in sent:
            of = asked.json.get("routing_key") or asked.headers.get("x-session-id")
            ranks[of or asked.headers["x-smg-routing-key"]].add(rank_of(asked))
        assert set(ranks) == set(names) and all(len(where) == 1 for where in ranks.values())
        assert set().union(*ranks.values()) == {0, 1}


async def test_a_server_without_ranks_is_asked_for_none() -> None:
    """Not every version of every engine knows the header."""
    async with running_site(toy()) as site:
        assert (await site.chat()).status_code == 200
        assert RANK_HEADER not in site.engine.turns[-1].headers
        [engine] = await engines_of(site.client)
        assert engine["data_parallel_rank"] is None


async def test_a_native_request_of_sglang_names_the_rank_in_its_body() -> None:
    """This route does not read the header; a client cannot choose the rank."""
    async with running_site(toy("sglang", data_parallel_size=2)) as site:
        for rank in (0, 1, 5):
            body = {"model": MODEL, "text": "Hello", "sampling_params": {"max_new_tokens": 4}, "routed_dp_rank": rank}
            assert (await site.client.post("/generate", json=body)).status_code == 200
        assert {rank_of(asked) for asked in site.engine.turns} <= {0, 1}


async def test_ranks_are_cordoned_drained_and_removed_together() -> None:
    """They are one process: whoever takes one away takes all."""
    async with running_site(toy(data_parallel_size=2), **QUICK) as site:
        first, second = [engine["id"] for engine in await engines_of(site.client)]
        for engine_id, order, is_cordoned in ((second, "cordon", True), (first, "uncordon", False)):
            answer = await site.client.post(f"/v1/engines/{engine_id}/{order}", headers=ADMIN)
            assert answer.json()["id"] == engine_id
            assert [engine["is_cordoned"] for engine in await engines_of(site.client)] == [is_cordoned] * 2
        long = {"model": MODEL, "messages": HELLO, "max_tokens": 8000, "ignore_eos": True}
        turns = [
            asyncio.create_task(site.client.post(f"/t/{name}/v1/chat/completions", json=long)) for name in ("a", "b")
        ]

        async def both_run() -> bool:
            return [engine["num_legs"] for engine in await engines_of(site.client)] == [1, 1]

        await eventually(both_run)
        answer = await site.client.post(f"/v1/engines/{first}/drain?timeout_s=0", headers=ADMIN)
        assert not answer.json()["is_drained"]
        answer = await site.client.delete(f"/v1/engines/{second}", headers=ADMIN)
        assert answer.status_code == 200 and await engines_of(site.client) == []
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)


@KINDS
async def test_a_server_gets_new_weights_once(kind: str) -> None:
    """By the id of any of its ranks; then all of them have these weights."""
    load = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}[kind]
    async with running_site(toy(kind, data_parallel_size=2)) as site:
        first, second = [engine["id"] for engine in await engines_of(site.client)]
        for number, order in enumerate(({}, {"engines": [second]}, {"engines": [first, second]}), 1):
            told = (await update(site.client, f"v{number}", **order)).json()
            assert told["status"] == "done" and list(told["engines"]) == [first]
            assert sum(asked.path == load for asked in site.engine.turns) == number
            versions = [engine["weight_version"] for engine in await engines_of(site.client)]
            assert versions == [f"v{number}"] * 2
        assert len({(await site.chat(f"/t/{name}/v1/chat/completions")).status_code for name in "abcd"}) == 1


async def test_fields_of_two_ranks_of_one_server_are_refused() -> None:
    """A transfer goes to their server once, and would have the fields of one of them."""
    async with running_site(toy(data_parallel_size=2)) as site:
        first, second = [engine["id"] for engine in await engines_of(site.client)]
        order = {"transfer": {"update_info": {}}, "transfer_of": {first: {"rank": 1}, second: {"rank": 2}}}
        answer = await update(site.client, "v1", **order)
        assert answer.status_code == 400 and "ranks of one server" in answer.text
        assert {engine["weight_version"] for engine in await engines_of(site.client)} == {"default"}


async def test_a_controller_sees_one_server_with_the_turns_of_all_its_ranks() -> None:
    """It ends a server once nothing runs there, not once nothing runs at one of its ranks."""
    long = {"model": MODEL, "messages": HELLO, "max_tokens": 8000, "ignore_eos": True}
    async with running_site(toy(data_parallel_size=2), **QUICK) as site:
        gateway = GatewayClient(site.url, ADMIN_KEY)
        turns = [
            asyncio.create_task(site.client.post(f"/t/{name}/v1/chat/completions", json=long)) for name in ("a", "b")
        ]
        try:

            async def both_run() -> bool:
                [one] = await gateway.engines()
                return one.num_turns == 2

            await eventually(both_run)
            [one] = await gateway.engines()
            assert (one.url, one.is_ready) == (site.engine.url, True)
            await gateway.remove(one.engine_id)
            assert await gateway.engines() == []
        finally:
            gateway.close()
            for turn in turns:
                turn.cancel()
            await asyncio.gather(*turns, return_exceptions=True)


async def test_a_server_that_comes_back_with_other_ranks_has_other_engines() -> None:
    """Turns go to those that it has now."""
    async with (
        server(toy(data_parallel_size=3)) as one,
        running_gateway(one.url, **QUICK) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
    ):
        address = one.url.removeprefix("http://")
        assert len(await engines_of(client)) == 3
        for generation, num_ranks in ((2, 1), (3, 2)):
            await one.end()

            async def are_lost() -> bool:
                return {engine["state"] for engine in await engines_of(client)} == {"lost"}

            await eventually(are_lost)
            await one.start(toy(data_parallel_size=num_ranks))
            names = [f"{address}~{generation}" + (f"@{rank}" if rank else "") for rank in range(num_ranks)]

            async def are_ready(names: list[str] = names) -> bool:
                seen = [(engine["id"], engine["state"]) for engine in await engines_of(client)]
                return seen == [(name, "ready") for name in names]

            await eventually(are_ready)
            turns = [
                client.post(f"/t/{name}/v1/chat/completions", json={"model": MODEL, "messages": HELLO})
                for name in "abcd"
            ]
            answers = await asyncio.gather(*turns)
            assert [answer.status_code for answer in answers] == [200] * 4
            assert {answer.headers["x-heddle-engine"] for answer in answers} == set(names)


async def test_a_look_that_lacks_a_rank_is_no_good_look() -> None:
    """The turns of a rank that one page left out would be sent away. If it stays away, the server is looked at anew."""
    async with running_site(toy(data_parallel_size=2), faults_to_open=3, **QUICK) as site:
        page = (await site.client.get(f"{site.engine.url}/metrics")).text
        partial = "".join(line + "\n" for line in page.splitlines() if 'engine="1"' not in line)
        seen = []
        site.engine.scripts["/metrics"] = fixed(200, partial.encode(), b"text/plain")

        async def has_one_rank() -> bool:
            seen.append([engine["state"] for engine in await engines_of(site.client)])
            return seen[-1] == ["ready"]

        await eventually(has_one_rank)
        assert all(states in (["ready"] * 2, ["lost"] * 2, ["lost"], ["ready"]) for states in seen)
        assert (await site.chat()).status_code == 200
        del site.engine.scripts["/metrics"]

        async def has_both() -> bool:
            return [engine["state"] for engine in await engines_of(site.client)] == ["ready"] * 2

        await eventually(has_both)


async def test_sglang_ranks_are_told_by_their_numbers() -> None:
    """Loads in any order; a list that lacks one is no good look."""
    async with running_site(toy("sglang", data_parallel_size=3)) as site:
        loads = (await site.client.get(f"{site.engine.url}/v1/loads")).json()
        for order, found in (([2, 0, 1], [0, 10, 20]), ([1, 2], None), ([], None)):
            listed = [loads["loads"][rank] | {"num_running_reqs": 10 * rank} for rank in order]
            site.engine.scripts["/v1/loads"] = fixed(200, orjson.dumps(loads | {"loads": listed}))
            http = HttpClient(site.engine.url)
            try:
                if found is None:
                    with pytest.raises(ObservationError):
                        await Sglang().observe(http, 5.0)
                else:
                    assert [seen.num_running for seen in await Sglang().observe(http, 5.0)] == found
            finally:
                http.close()
