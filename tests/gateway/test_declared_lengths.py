"""What the predictor learns from trajectories whose length is declared."""

from pathlib import Path

import httpx
import orjson

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from predictor.tabular import TabularPredictor
from predictor.training import learn_events
from tests.faults.asking import ask, body_of
from tests.support.gateway import running_gateway
from tests.support.learned import learned_by

CHAT = body_of("chat", text="what a declared trajectory is asked")


async def test_a_trajectory_of_declared_length_teaches_its_pace(tmp_path: Path) -> None:
    """The gateway learns from it as from its event log: how it looked at each stage, not only its length."""
    store, log = f"sqlite:{tmp_path}/store.db", tmp_path / "events.jsonl"
    async with (
        serve_engine(SimulatedEngineSettings()) as engine,
        running_gateway(engine, store=store, event_log=str(log)) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as client,
    ):
        declared = {"id": "t", "group_id": "g", "expected_output_tokens": 9_000}
        assert (await client.post("/v1/trajectories", json=declared)).status_code == 201
        for _ in range(3):
            assert (await ask(client, gateway.url, "chat", CHAT, {"x-trajectory-id": "t"})).status == 200
        turns = (await client.get("/v1/trajectories/t")).json()["turns"]
        assert [turn["predicted_tokens"] for turn in turns] == [9_000] * 3
        assert (await client.post("/v1/trajectories/t/finish")).status_code == 200
    served, read = TabularPredictor(), TabularPredictor()
    served.restore(await learned_by(store))
    assert learn_events(read, log) == (1, 0)
    assert orjson.loads(served.dump())["looks"] == orjson.loads(read.dump())["looks"]
