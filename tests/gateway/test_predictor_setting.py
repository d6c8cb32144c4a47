"""Which predictor the gateway runs, and what it begins with."""

from pathlib import Path

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from gateway.config import ConfigError, load_settings
from heddle.cli import main
from predictor.named import predictor_named
from predictor.progress import Progress
from store.factory import open_store
from tests.faults.gateway_process import refused_start
from tests.support.gateway import running_gateway


async def test_a_trained_model_is_where_the_gateway_begins(tmp_path: Path) -> None:
    """What it says of the first trajectory is what the model of `heddle predictor train` says."""
    model = tmp_path / "model.json"
    main(["predictor", "train", "--law", "math", "--trajectories", "32", "--out", str(model)])
    settings = {"predictor": "tabular", "predictor_model": str(model)}
    async with running_gateway(**settings) as listening, httpx.AsyncClient() as client:
        answer = await client.post(f"{listening.url}/v1/trajectories", json={"id": "t", "group_id": "g"})
    said = predictor_named("tabular", model.read_bytes()).predict(Progress("t", "g")).total_tokens
    assert answer.json()["predicted_tokens"] == pytest.approx(said)
    assert said != pytest.approx(predictor_named("tabular").predict(Progress("t", "g")).total_tokens, rel=0.02)


@pytest.mark.parametrize(("content", "told"), [(None, "cannot read"), (b"nonsense", "is not a model of the predictor")])
async def test_a_model_that_cannot_be_used_stops_the_start(content: bytes | None, told: str, tmp_path: Path) -> None:
    """One clear line names the file, whether it is not there or holds something else."""
    model = tmp_path / "model.json"
    if content is not None:
        model.write_bytes(content)
    store = f"sqlite:{tmp_path}/store.db"
    with pytest.raises(ConfigError, match=told) as refused:
        async with running_gateway(predictor_model=str(model), store=store):
            pass
    async with running_gateway(store=store):  # which the first has let go, though its fault is still at hand
        assert refused.tb is not None


def test_an_unknown_predictor_stops_the_start() -> None:
    """The message lists those that there are."""
    with pytest.raises(ConfigError, match="siblings"):
        load_settings(predictor="no-such")


def test_buckets_go_by_trees_of_outcomes_unless_told() -> None:
    """Libra's policy gets Libra's predictor; whoever names another one gets that."""
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


async def test_the_tree_hears_what_tools_gave_back(tmp_path: Path) -> None:
    """Read from the messages of the second turn; what it learned of that chain is in the store afterwards."""
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
    store = open_store(url)
    await store.open()
    learned = await store.get_state("predictor")
    await store.close()
    assert learned is not None and b"bash:small:success" in learned


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_text_predictor_that_cannot_be_had_is_refused_at_the_start(is_there: bool, tmp_path: Path) -> None:
    """In one line that says what is wrong: no torch, no such file, or no text predictor."""
    path = tmp_path / "text.pt"
    if is_there:
        path.write_bytes(b"no model")
    status, said = await refused_start("--port", "0", HEDDLE_TEXT_PREDICTOR=str(path), HEDDLE_STORE="memory:")
    assert status == 2
    last = said.strip().splitlines()[-1]
    assert "text_predictor needs torch: pip install 'heddle[text]'" in last or str(path) in last
