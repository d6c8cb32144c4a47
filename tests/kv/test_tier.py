"""Engines that share a KV tier find there what the others computed, also when those are gone; what is absent they
compute, and that is counted."""

import random
from pathlib import Path
from typing import Any

import pytest

from engines.kv_connectors import KvWays, kv_transfer_config, nixl_connector, tier_connector, ways_told
from engines.simulated.settings import SimulatedEngineSettings
from tests.kv.site import Site, engine, first_messages, site
from tests.support.gateway import ADMIN, eventually

TOKEN_LEGS = pytest.mark.parametrize("token_legs", ["off", "auto"])


def tiered(folder: Path, **settings: Any) -> SimulatedEngineSettings:
    """An engine without NIXL that shares its KV in this folder."""
    return engine(kv_transfer=False, kv_tier=folder, **settings)


async def answers_at_rest(num_turns: int) -> list[str]:
    """What the turns of a trajectory say where nothing moves."""
    async with site(engine()) as alone:
        messages = first_messages()
        return [await alone.turn("t", messages) for _ in range(num_turns)]


@TOKEN_LEGS
async def test_in_a_tool_call_the_new_home_loads_the_kv(tmp_path: Path, token_legs: str) -> None:
    """From the tier, before the next turn comes: at least 90 % of its context are there, and its answers the same."""
    expected = await answers_at_rest(3)
    async with site(tiered(tmp_path), tiered(tmp_path), token_legs=token_legs) as fleet:
        messages = first_messages()
        said = [await fleet.turn("t", messages) for _ in range(2)]
        home = (await fleet.last("t"))["engine"]
        assert {one["kv_tier"] for one in (await fleet.engines()).values()} == {str(tmp_path)}
        told = await fleet.act(home, "evacuate")
        assert told["is_evacuated"] and await fleet.moves() == {"loaded": 1}
        said.append(await fleet.turn("t", messages))
        last = await fleet.last("t")
        assert last["engine"] != home and last["kv_by"] == "loaded" and await fleet.cached_share("t") >= 0.9
        assert await fleet.moves() == {"loaded": 1}, "the turn found all that it needs"
        said.append(await fleet.turn("t", messages))
        assert (await fleet.last("t"))["kv_by"] is None, "it stayed"
    assert said[:3] == expected


@TOKEN_LEGS
async def test_a_turn_that_comes_first_loads_its_kv_by_itself(tmp_path: Path, token_legs: str) -> None:
    """Nobody had the time to move it, and nothing need be asked of its old home."""
    async with site(tiered(tmp_path), tiered(tmp_path), token_legs=token_legs) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        await fleet.act((await fleet.last("t"))["engine"], "cordon")
        await fleet.turn("t", messages)
        assert (await fleet.last("t"))["kv_by"] == "loaded" and await fleet.cached_share("t") >= 0.9
        assert await fleet.moves() == {"loaded": 1}


async def test_kv_outlives_its_engine_in_the_tier(tmp_path: Path) -> None:
    """The home is gone when the turn comes, as where two engines become one on their own GPUs."""
    async with site(tiered(tmp_path), tiered(tmp_path), token_legs="auto") as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        home = (await fleet.last("t"))["engine"]
        assert (await fleet.client.delete(f"/v1/engines/{home}", headers=ADMIN)).status_code == 200
        await fleet.turn("t", messages)
        last = await fleet.last("t")
        assert last["engine"] != home and last["kv_by"] == "loaded" and await fleet.cached_share("t") >= 0.9


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("comes_first", [False, True])
async def test_a_tier_that_has_lost_it_costs_a_prefill_that_is_counted(
    tmp_path: Path, comes_first: bool, seed: int
) -> None:
    """All of it, or most; whether the move or the turn finds that out. The answers stay the same."""
    expected = await answers_at_rest(2)
    async with site(tiered(tmp_path), tiered(tmp_path)) as fleet:
        messages = first_messages()
        said = [await fleet.turn("t", messages)]
        home = (await fleet.last("t"))["engine"]
        lose_most(tmp_path, random.Random(seed))
        await fleet.act(home, "cordon" if comes_first else "evacuate")
        said.append(await fleet.turn("t", messages))
        expected_moves = {"failed": 1} if comes_first else {"failed": 1, "prefilled": 1}
        last, moves = await fleet.last("t"), await fleet.moves()
        assert moves == expected_moves and last["kv_by"] == (None if comes_first else "prefilled")
    assert said == expected


def lose_most(folder: Path, dice: random.Random) -> None:
    """Of the files that hold KV, the first half of a context's among them or not."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in dice.sample(files, k=dice.randint(len(files) * 9 // 10, len(files))):
        path.unlink()


async def test_nixl_is_chosen_before_the_tier_and_the_tier_before_a_prefill(tmp_path: Path) -> None:
    """With both ways what lives is fetched; where that fails the tier has it."""
    both = {"kv_tier": tmp_path, "kv_transfer": True}
    async with site(engine(**both), engine(**both)) as fleet:
        assert all(one["moves_kv"] and one["kv_tier"] for one in (await fleet.engines()).values())
        messages = first_messages()
        await fleet.turn("t", messages)
        await fleet.act((await fleet.last("t"))["engine"], "evacuate")
        await fleet.turn("t", messages)
        assert await fleet.moves() == {"fetched": 1} and (await fleet.last("t"))["kv_by"] == "fetched"
    other = tmp_path / "other"
    async with site(engine(kv_tier=other), tiered(other), kv_move_min_tokens=100) as fleet:
        await fleet.act(fleet.urls[1].removeprefix("http://"), "cordon")
        messages = first_messages()
        await fleet.turn("t", messages)
        await fleet.act(fleet.urls[1].removeprefix("http://"), "uncordon")
        await fleet.act(fleet.urls[0].removeprefix("http://"), "evacuate")
        assert await fleet.moves() == {"loaded": 1}


async def test_engines_of_different_tiers_share_nothing(tmp_path: Path) -> None:
    """Nothing is expected there, and nothing counted as failed."""
    async with site(tiered(tmp_path / "a"), tiered(tmp_path / "b")) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        await fleet.act((await fleet.last("t"))["engine"], "evacuate")
        assert await fleet.moves() == {"prefilled": 1}
        await fleet.turn("t", messages)
        assert (await fleet.last("t"))["kv_by"] == "prefilled"


async def test_kv_of_other_weights_is_not_looked_for_in_the_tier(tmp_path: Path) -> None:
    """An engine that holds other weights computes anew, and that is no failure of the tier."""
    async with site(tiered(tmp_path), tiered(tmp_path, weight_version="other")) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        await fleet.act((await fleet.last("t"))["engine"], "cordon")
        await fleet.turn("t", messages)
        assert await fleet.moves() == {}


async def test_a_later_run_meets_no_kv_of_an_earlier_ones_weights(tmp_path: Path) -> None:
    """The folder outlives engines, gateways and their stores; both runs count their weights from 1."""
    for version in ("one/step-1", "another/step-1"):
        async with site(tiered(tmp_path)) as fleet:
            weights = {"version": version, "path": f"/weights/{version}", "mode": "restart"}
            answer = await fleet.client.post("/v1/weights", json=weights, headers=ADMIN)
            assert answer.json()["status"] == "done", answer.text
            await fleet.turn("t", first_messages())
            assert (await fleet.last("t"))["cached_tokens"] == 0


async def test_what_is_said_of_an_engine_outranks_what_it_tells(tmp_path: Path) -> None:
    """SGLang tells nothing of its tier; and one may be told to be of another, or of none."""
    settings = [tiered(tmp_path, dialect="sglang") for _ in range(2)]
    async with site(*settings) as fleet:
        for url in fleet.urls:
            await fleet.client.delete(f"/v1/engines/{url.removeprefix('http://')}", headers=ADMIN)
            said = {"url": url, "kv_tier": "shared"}
            assert (await fleet.client.post("/v1/engines", json=said, headers=ADMIN)).status_code == 201
        await eventually(lambda: all_ready(fleet), 60)
        assert {one["kv_tier"] for one in (await fleet.engines()).values()} == {"shared"}
        messages = first_messages()
        await fleet.turn("t", messages)
        await fleet.act((await fleet.last("t"))["engine"], "evacuate")
        await fleet.turn("t", messages)
        assert await fleet.moves() == {"loaded": 1} and await fleet.cached_share("t") >= 0.9


def test_a_server_tells_its_ways() -> None:
    """A tier without the layout that all TP sizes have is shared by like ones only; PD roles are none of our ways."""
    folder, nixl = Path("/mnt/kv"), nixl_connector(has_gpu=True)
    tier = tier_connector(folder, 2**30, has_gpu=True)
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


async def all_ready(fleet: Site) -> bool:
    return all(one["state"] == "ready" for one in (await fleet.engines()).values())
