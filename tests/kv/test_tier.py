"""Engines that share a KV tier find there what the others computed, even if those are gone. They compute what is
missing, and that is counted."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engines.kv_connectors import KvWays, kv_connectors, kv_transfer_config, ways_told
from engines.simulated.settings import SimulatedEngineSettings
from tests.kv.kv_fleet import Fleet, engine, first_messages, id_of, running_fleet, undisturbed_answers
from tests.support.gateway import ADMIN, eventually

TOKEN_LEGS = pytest.mark.parametrize("token_legs", ["off", "auto"])


def tiered(folder: Path, **settings: Any) -> SimulatedEngineSettings:
    """An engine without NIXL that shares its KV in this folder."""
    return engine(kv_transfer=False, kv_tier=folder, **settings)


@TOKEN_LEGS
async def test_the_new_home_loads_the_kv_in_a_tool_call(tmp_path: Path, token_legs: str) -> None:
    """From the tier, before the next turn arrives: at least 90 % of its context is there, and its answers stay the
    same."""
    expected = await undisturbed_answers(3)
    async with running_fleet(tiered(tmp_path), tiered(tmp_path), token_legs=token_legs) as fleet:
        messages = first_messages()
        answers = [await fleet.turn("t", messages) for _ in range(2)]
        home = (await fleet.last("t"))["engine"]
        assert {one["kv_tier"] for one in (await fleet.engines()).values()} == {str(tmp_path)}
        evacuated = await fleet.act(home, "evacuate")
        assert evacuated["is_evacuated"] and await fleet.moves() == {"loaded": 1}
        answers.append(await fleet.turn("t", messages))
        last = await fleet.last("t")
        assert last["engine"] != home and last["kv_by"] == "loaded" and await fleet.cached_share("t") >= 0.9
        assert await fleet.moves() == {"loaded": 1}, "the turn found all that it needs"
        answers.append(await fleet.turn("t", messages))
        assert (await fleet.last("t"))["kv_by"] is None, "it stayed"
    assert answers[:3] == expected


@TOKEN_LEGS
async def test_a_turn_that_arrives_first_loads_its_kv_itself(tmp_path: Path, token_legs: str) -> None:
    """There was no time to move it, and its old home need not be asked."""
    async with running_fleet(tiered(tmp_path), tiered(tmp_path), token_legs=token_legs) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        await fleet.act((await fleet.last("t"))["engine"], "cordon")
        await fleet.turn("t", messages)
        assert (await fleet.last("t"))["kv_by"] == "loaded" and await fleet.cached_share("t") >= 0.9
        assert await fleet.moves() == {"loaded": 1}


async def test_kv_in_the_tier_outlives_its_engine(tmp_path: Path) -> None:
    """The home is gone when the turn arrives, as when two engines become one on their own GPUs."""
    async with running_fleet(tiered(tmp_path), tiered(tmp_path), token_legs="auto") as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        home = (await fleet.last("t"))["engine"]
        assert (await fleet.client.delete(f"/v1/engines/{home}", headers=ADMIN)).status_code == 200
        await fleet.turn("t", messages)
        last = await fleet.last("t")
        assert last["engine"] != home and last["kv_by"] == "loaded" and await fleet.cached_share("t") >= 0.9


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("arrives_first", [False, True])
async def test_kv_lost_from_the_tier_costs_a_prefill_that_is_counted(
    tmp_path: Path, arrives_first: bool, seed: int
) -> None:
    """All of it or most of it is lost, and the move or the turn finds out. The answers stay the same."""
    expected = await undisturbed_answers(2)
    async with running_fleet(tiered(tmp_path), tiered(tmp_path)) as fleet:
        messages = first_messages()
        answers = [await fleet.turn("t", messages)]
        home = (await fleet.last("t"))["engine"]
        lose_most(tmp_path, random.Random(seed))
        await fleet.act(home, "cordon" if arrives_first else "evacuate")
        answers.append(await fleet.turn("t", messages))
        expected_moves = {"failed": 1} if arrives_first else {"failed": 1, "prefilled": 1}
        last, moves = await fleet.last("t"), await fleet.moves()
        assert moves == expected_moves and last["kv_by"] == (None if arrives_first else "prefilled")
    assert answers == expected


def lose_most(folder: Path, dice: random.Random) -> None:
    """Delete at least 90 % of the files that hold KV."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in dice.sample(files, k=dice.randint(len(files) * 9 // 10, len(files))):
        path.unlink()


async def test_nixl_is_preferred_to_the_tier_and_the_tier_to_a_prefill(tmp_path: Path) -> None:
    """If both engines have both ways, KV is fetched; if only one of them has NIXL, it is loaded from the tier."""
    both = {"kv_tier": tmp_path, "kv_transfer": True}
    async with running_fleet(engine(**both), engine(**both)) as fleet:
        assert all(one["moves_kv"] and one["kv_tier"] for one in (await fleet.engines()).values())
        messages = first_messages()
        await fleet.turn("t", messages)
        await fleet.act((await fleet.last("t"))["engine"], "evacuate")
        await fleet.turn("t", messages)
        assert await fleet.moves() == {"fetched": 1} and (await fleet.last("t"))["kv_by"] == "fetched"
    other = tmp_path / "other"
    async with running_fleet(engine(kv_tier=other), tiered(other), kv_move_min_tokens=100) as fleet:
        await fleet.act(fleet.urls[1].removeprefix("http://"), "cordon")
        messages = first_messages()
        await fleet.turn("t", messages)
        await fleet.act(fleet.urls[1].removeprefix("http://"), "uncordon")
        await fleet.act(fleet.urls[0].removeprefix("http://"), "evacuate")
        assert await fleet.moves() == {"loaded": 1}


async def test_engines_of_different_tiers_share_nothing(tmp_path: Path) -> None:
    """No KV is expected there, and no failure is counted."""
    async with running_fleet(tiered(tmp_path / "a"), tiered(tmp_path / "b")) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        await fleet.act((await fleet.last("t"))["engine"], "evacuate")
        assert await fleet.moves() == {"prefilled": 1}
        await fleet.turn("t", messages)
        assert (await fleet.last("t"))["kv_by"] == "prefilled"


async def test_kv_of_other_weights_is_not_sought_in_the_tier(tmp_path: Path) -> None:
    """An engine with other weights computes it again, which is not a failure of the tier."""
    async with running_fleet(tiered(tmp_path), tiered(tmp_path, weight_version="other")) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        await fleet.act((await fleet.last("t"))["engine"], "cordon")
        await fleet.turn("t", messages)
        assert await fleet.moves() == {}


async def test_a_later_run_reuses_no_kv_of_an_earlier_runs_weights(tmp_path: Path) -> None:
    """The folder outlives engines, gateways and their stores, and both runs number their weights from 1."""
    for version in ("one/step-1", "another/step-1"):
        async with running_fleet(tiered(tmp_path)) as fleet:
            weights = {"version": version, "path": f"/weights/{version}", "mode": "restart"}
            answer = await fleet.client.post("/v1/weights", json=weights, headers=ADMIN)
            assert answer.json()["status"] == "done", answer.text
            await fleet.turn("t", first_messages())
            assert (await fleet.last("t"))["cached_tokens"] == 0


async def test_a_declared_tier_is_used_if_the_engine_reports_none(tmp_path: Path) -> None:
    """SGLang does not report its tier; here two engines are declared to share one."""
    settings = [tiered(tmp_path, dialect="sglang") for _ in range(2)]
    async with running_fleet(*settings) as fleet:
        for url in fleet.urls:
            await fleet.client.delete(f"/v1/engines/{url.removeprefix('http://')}", headers=ADMIN)
            declared = {"url": url, "kv_tier": "shared"}
            assert (await fleet.client.post("/v1/engines", json=declared, headers=ADMIN)).status_code == 201
        await eventually(lambda: all_ready(fleet), 60)
        assert {one["kv_tier"] for one in (await fleet.engines()).values()} == {"shared"}
        messages = first_messages()
        await fleet.turn("t", messages)
        await fleet.act((await fleet.last("t"))["engine"], "evacuate")
        await fleet.turn("t", messages)
        assert await fleet.moves() == {"loaded": 1} and await fleet.cached_share("t") >= 0.9


def test_a_servers_kv_ways_are_read_from_its_configuration() -> None:
    """A tier without the canonical layout is shared only by engines of the same TP size. Prefill/decode roles are not
    used."""
    nixl, tier = kv_connectors(True, Path("/mnt/kv"), 2**30, has_gpu=True)
    assert ways_told(kv_transfer_config([nixl]) or {}, 2) == KvWays(fetches=True)
    assert ways_told(kv_transfer_config([tier]) or {}, 2) == KvWays(tier="/mnt/kv")
    assert ways_told(kv_transfer_config([nixl, tier]) or {}, 2) == KvWays(True, "/mnt/kv")
    assert ways_told(kv_transfer_config([]) or {}, 2) == KvWays()
    del tier["kv_connector_extra_config"]["canonical_layout"]
    assert ways_told(tier, 2) == KvWays(tier="/mnt/kv:tp2")
    del tier["kv_connector_extra_config"]["secondary_tiers"]
    assert ways_told(tier, 2) == KvWays()
    assert ways_told(nixl | {"kv_role": "kv_producer"}, 2) == KvWays()
    assert ways_told({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}, 2) == KvWays()


async def all_ready(fleet: Fleet) -> bool:
    return all(one["state"] == "ready" for one in (await fleet.engines()).values())


async def test_kv_that_was_fetched_before_a_turn_is_not_counted_as_loaded(tmp_path: Path) -> None:
    """The engines share a tier, too; the turn finds its context, but not because of the tier."""
    both = {"kv_tier": tmp_path, "kv_transfer": True}
    async with running_fleet(engine(**both), engine(**both)) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        await fleet.act((await fleet.last("t"))["engine"], "cordon")
        await fleet.turn("t", messages)
        assert await fleet.moves() == {"fetched": 1} and (await fleet.last("t"))["kv_by"] == "fetched"


async def test_kv_that_was_prefilled_at_a_home_with_a_tier_is_loaded_from_there(tmp_path: Path) -> None:
    """The trajectory moves twice in one tool call: from a home without a tier to one whose tier the third shares."""
    async with running_fleet(engine(kv_transfer=False), tiered(tmp_path), tiered(tmp_path)) as fleet:
        messages = await fleet.begin_at_first()
        for home, target in pairwise(map(id_of, fleet.urls)):
            await fleet.act(target, "uncordon")
            await fleet.act(home, "evacuate")
        assert await fleet.moves() == {"prefilled": 1, "loaded": 1}
        await fleet.turn("t", messages)
        assert (await fleet.last("t"))["kv_by"] == "loaded" and await fleet.cached_share("t") >= 0.9
