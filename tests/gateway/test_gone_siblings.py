"""A trajectory that is gone does not hold back what the predictor learns from its siblings."""

from pathlib import Path

import httpx
import orjson
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from tests.faults.asking import ask, body_of
from tests.support.gateway import ADMIN, running_gateway
from tests.support.learned import learned_by

CHAT = body_of("chat", text="what siblings are asked")


@pytest.mark.parametrize("gone_by", ["aborted", "refused"])
async def test_a_group_does_not_wait_for_a_sibling_that_is_gone(tmp_path: Path, gone_by: str) -> None:
    """The last sibling to end completes the group; then later rollouts know what became of its prompt."""
    store = f"sqlite:{tmp_path}/store.db"
    limit = 0 if gone_by == "refused" else 1
    async with (
        serve_engine(SimulatedEngineSettings()) as engine,
        running_gateway(engine, store=store, max_waiting_turns=limit) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as client,
    ):
        [engine_id] = [known["id"] for known in (await client.get("/v1/engines")).json()["data"]]
        gone = {"x-trajectory-id": "gone"}
        if gone_by == "refused":
            await client.post(f"/v1/engines/{engine_id}/cordon", headers=ADMIN)
            assert (await ask(client, gateway.url, "chat", CHAT, gone)).status == 429
            await client.post(f"/v1/engines/{engine_id}/uncordon", headers=ADMIN)
        else:
            assert (await ask(client, gateway.url, "chat", CHAT, gone)).status == 200
            assert (await client.delete("/v1/trajectories/gone")).status_code == 200
            assert (await ask(client, gateway.url, "chat", CHAT, gone)).status == 409
        assert (await ask(client, gateway.url, "chat", CHAT, {"x-trajectory-id": "t"})).status == 200
        assert (await client.post("/v1/trajectories/t/finish")).status_code == 200
    prompts = orjson.loads(await learned_by(store))["groups"]["prompts"]
    assert len(prompts) == 1, "the prompt's outcome"
