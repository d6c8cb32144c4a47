"""Which predictor the gateway runs, and what it starts from."""

from pathlib import Path

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from gateway.config import ConfigError, load_settings
from heddle.cli import main
from predictor.named import predictor_named
from predictor.progress import Progress
from store import StoreSettings, open_store
from tests.faults.gateway_process import refused_start
from tests.support.gateway import running_gateway
from tests.support.learned import learned_by
from tests.support.redis_server import PATIENT, RedisServer, redis_server

__all__ = ["redis_server"]


async def test_the_gateway_starts_from_a_trained_model(tmp_path: Path) -> None:
    """Its prediction for the first trajectory is that of the model that `heddle predictor train` wrote."""
    model = tmp_path / "model.json"
    main(["predictor", "train", "--law", "math", "--trajectories", "32", "--out", str(model)])
    settings = {"predictor": "tabular", "predictor_model": str(model)}
    async with running_gateway(**settings) as listening, httpx.AsyncClient() as client:
        answer = await client.post(f"{listening.url}/v1/trajectories", json={"id": "t", "group_id": "g"})
    predicted = predictor_named("tabular", model.read_bytes()).predict(Progress("t", "g")).total_tokens
    assert answer.json()["predicted_tokens"] == pytest.approx(predicted)
    assert predicted != pytest.approx(predictor_named("tabular").predict(Progress("t", "g")).total_tokens, rel=0.02)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot read"), (b"nonsense", "is not a model of the predictor")]
)
async def test_an_unusable_model_stops_the_start(content: bytes | None, message: str, tmp_path: Path) -> None:
    """Whether the file is missing or holds something else. The store is free again afterwards."""
    model = tmp_path / "model.json"
    if content is not None:
        model.write_bytes(content)
    store = f"sqlite:{tmp_path}/store.db"
    with pytest.raises(ConfigError, match=message) as refused:
        async with running_gateway(predictor_model=str(model), store=store):
            pass
    async with running_gateway(store=store):  # the failed start released it, although its exception is still referenced
        assert refused.tb is not None


@pytest.mark.parametrize("setting", ["predictor_model", "text_predictor"])
async def test_a_start_that_fails_by_its_settings_takes_the_store_from_nobody(
    setting: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    """A Redis belongs to whoever opened it last: the gateway that runs wrote no more after such a start."""
    running = open_store(redis_server.url(12), StoreSettings(**PATIENT))
    await running.open()
    with pytest.raises(ConfigError):
        async with running_gateway(store=redis_server.url(12), **{setting: str(tmp_path / "missing")}):
            pass
    running.put_trajectory("t", {})
    assert await running.settle(60.0), running.health()
    await running.close()


def test_an_unknown_predictor_stops_the_start() -> None:
    """The message lists the known ones."""
    with pytest.raises(ConfigError, match="siblings"):
        load_settings(predictor="no-such")


def test_the_cmlfq_policy_uses_the_tree_predictor_by_default() -> None:
    """Libra's policy gets Libra's predictor, unless another one is configured."""
    assert load_settings(policy="cmlfq").predictor_name == "tree"
    assert load_settings(policy="cmlfq", predictor="tabular").predictor_name == "tabular"
    assert load_settings().predictor_name == "tabular"


TOOL_TURN = [
    {"role": "user", "content": "do"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "ok"},
]


async def test_the_tree_predictor_learns_from_tool_results(tmp_path: Path) -> None:
    """They are read from the messages of the second turn; what it learned is in the store afterwards."""
    url = f"sqlite:{tmp_path}/store.sqlite3"
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=1_000)) as engine,
        running_gateway(engine, policy="cmlfq", store=url) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60, headers={"x-trajectory-id": "t"}) as client,
    ):
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        for messages in (TOOL_TURN[:1], TOOL_TURN):
            body = {"model": model, "messages": messages, "max_tokens": 4}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert (await client.post("/v1/trajectories/t/finish")).status_code == 200
    assert b"bash:small:success" in await learned_by(url)


@pytest.mark.parametrize("is_there", [True, False])
async def test_an_unusable_text_predictor_stops_the_start(is_there: bool, tmp_path: Path) -> None:
    """The last line states the reason: no torch, or the path of a file that is missing or no text predictor."""
    path = tmp_path / "text.pt"
    if is_there:
        path.write_bytes(b"no model")
    status, output = await refused_start("--port", "0", HEDDLE_TEXT_PREDICTOR=str(path), HEDDLE_STORE="memory:")
    assert status == 2
    last = output.strip().splitlines()[-1]
    assert "text_predictor needs torch: pip install torch" in last or str(path) in last
