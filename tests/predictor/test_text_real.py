"""The text predictor, trained and used with torch: the environment that `make real` and `make text` install."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest

from engines.local_vllm import DEFAULT_VENV
from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from predictor.prefix_tree import TreePredictor
from predictor.progress import Progress
from predictor.selection import PredictionPair, choose
from predictor.text import TextExample
from tests.faults.gateway_process import gateway_process
from tests.predictor.corpus import corpus
from tests.support.gateway import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
_CHECKOUT = Path(__file__).parents[2]


def with_tree_predictions(examples: list[TextExample]) -> list[TextExample]:
    """Each example with the prediction of a prefix tree that learns from the trajectories before it."""
    tree = TreePredictor()
    predicted = []
    for number, example in enumerate(examples):
        name = f"{number // 2}"
        progress = Progress(name, example.group_id, output_tokens=example.output_tokens, num_turns=example.num_turns)
        predicted.append(replace(example, base_tokens=tree.predict(progress).total_tokens))
        if number % 2:
            tree.ended(replace(progress, output_tokens=example.total_tokens))
    return predicted


def write(path: Path, examples: list[TextExample]) -> Path:
    path.write_text("\n".join(json.dumps(asdict(example)) for example in examples))
    return path


def torch_python() -> Path:
    python = Path(os.environ.get("VLLM_CPU_VENV", DEFAULT_VENV)) / "bin" / "python"
    if not python.exists():
        pytest.fail(f"no {python}; install torch with: make real", pytrace=False)
    return python.absolute()


def dependencies() -> str:
    """Heddle's dependencies as PYTHONPATH: an environment with torch may lack them."""
    return os.pathsep.join([str(_CHECKOUT), *(path for path in sys.path if path.endswith("site-packages"))])


def run_with_torch(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in (torch_python(), *arguments)],
        cwd=_CHECKOUT,
        env=os.environ | {"PYTHONPATH": dependencies()},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@dataclass(frozen=True)
class Trained:
    """A model, the questions it was asked, and what the worker reported."""

    model: Path
    questions: list[TextExample]
    reply: dict[str, Any]


def trained(tmp_path: Path, has_signal: bool) -> Trained:
    """Trained on 1,600 examples of 400 groups, then asked about 800 examples of 200 other groups."""
    examples = with_tree_predictions(corpus(600, has_signal, seed=4))
    files = write(tmp_path / "train.jsonl", examples[:1600]), write(tmp_path / "test.jsonl", examples[1600:])
    model = tmp_path / "model.pt"
    done = run_with_torch("-m", "tests.predictor.text_worker", *files, model)
    assert done.returncode == 0, done.stderr[-2000:]
    return Trained(model, examples[1600:], json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def with_signal(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trained on texts that tell the length."""
    return trained(tmp_path_factory.mktemp("with_signal"), has_signal=True)


def prediction_pairs(questions: list[TextExample], predictions: list[list[float]]) -> list[PredictionPair]:
    return [
        PredictionPair(question.group_id, question.total_tokens, total, question.base_tokens)
        for question, (total, _) in zip(questions, predictions, strict=True)
    ]


def test_a_text_that_tells_the_length_is_learned_and_chosen(with_signal: Trained) -> None:
    """It takes under 90 s on a CPU. Its order beats the prefix tree's, and its 90th percentile is calibrated."""
    questions, reply = with_signal.questions, with_signal.reply
    choice = choose(prediction_pairs(questions, reply["predictions"]))
    below = fmean(q.total_tokens <= p90 for q, (_, p90) in zip(questions, reply["predictions"], strict=True))
    print(reply["report"], choice, f"under p90: {below:.2f}", f"{reply['one_s'] * 1e3:.1f} ms a prediction")
    assert choice.takes_challenger and choice.gain_low > 0.05
    assert 0.8 < below < 0.98
    assert reply["report"]["took_s"] < 90
    assert reply["single"] == pytest.approx(reply["predictions"][0], rel=1e-3)
    assert "is not a text predictor" in reply["refusal"]


@pytest.mark.text
def test_a_predictor_trained_on_noise_is_not_chosen(tmp_path: Path) -> None:
    """It is no better than the prefix tree that it starts from, and the evaluation shows that."""
    noise = trained(tmp_path, has_signal=False)
    choice = choose(prediction_pairs(noise.questions, noise.reply["predictions"]))
    print(noise.reply["report"], choice)
    assert not choice.takes_challenger
    assert choice.gain > -0.1


@pytest.mark.text
@pytest.mark.parametrize("has_signal", [True, False])
def test_the_command_keeps_a_model_only_if_it_pays(tmp_path: Path, has_signal: bool) -> None:
    """It is trained and judged in one run, on different groups. If the text tells nothing, no model is left behind."""
    conversations = write(tmp_path / "conversations.jsonl", corpus(500, has_signal, seed=4))
    out = tmp_path / "text.pt"
    done = run_with_torch("-m", "heddle", "predictor", "train", "--text", conversations, "--out", out)
    print(done.stdout, done.stderr[-2000:])
    assert done.returncode == (0 if has_signal else 1)
    assert out.exists() == has_signal
    assert ("Not worth having" in done.stdout) != has_signal


@pytest.mark.text
def test_a_model_that_is_there_stays_if_a_new_one_does_not_pay(tmp_path: Path) -> None:
    """A gateway may be using it. It was overwritten by the new one, and deleted with it."""
    conversations = write(tmp_path / "conversations.jsonl", corpus(500, has_signal=False, seed=4))
    out = tmp_path / "text.pt"
    out.write_bytes(b"the model of last week")
    done = run_with_torch("-m", "heddle", "predictor", "train", "--text", conversations, "--out", out)
    assert done.returncode == 1 and "Not worth having" in done.stdout, done.stderr[-2000:]
    assert out.read_bytes() == b"the model of last week"


async def test_the_gateway_uses_the_text_prediction_at_the_next_turn(with_signal: Trained) -> None:
    """The predictor is asked when a turn ends, whole or streamed. The next turn has its prediction, and the first has
    none."""
    settings = {"HEDDLE_TEXT_PREDICTOR": str(with_signal.model), "HEDDLE_STORE": "memory:"}
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=50)) as engine,
        gateway_process(
            "--engine", engine, python=str(torch_python()), PYTHONPATH=dependencies(), **settings
        ) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
    ):

        async def is_ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        async def num_read(outcome: str) -> int:
            page = (await client.get("/metrics")).text
            return int(float(page.split(f'heddle_text_predictions_total{{outcome="{outcome}"}} ')[1].split()[0]))

        await eventually(is_ready, 60)
        messages = [{"role": "user", "content": "rewrite the whole module, please"}]
        for number, is_stream in enumerate((False, True, False)):
            body = {"model": "simulated", "messages": messages, "max_tokens": 20, "stream": is_stream}
            headers = {"x-trajectory-id": "t-1"}
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            messages += [
                {"role": "assistant", "content": "I did."},
                {"role": "user", "content": f"tests failed {number}"},
            ]

            async def is_answered() -> bool:
                return (await client.get("/v1/trajectories/t-1")).json()["num_turns"] == number + 1  # noqa: B023

            await eventually(is_answered, 60)
            # Nothing reports when the text was read (a tool takes longer): probes ask until one of theirs was.
            while number == 0 and await num_read("in_time") == 0:
                probe = dict(body, messages=messages[:1], max_tokens=1, stream=False)
                await client.post("/v1/chat/completions", json=probe, headers={"x-trajectory-id": "probe"})
        turns = (await client.get("/v1/trajectories/t-1")).json()["turns"]
        assert await num_read("failed") == 0
        # One thread reads texts in order: when the probe's prediction was ready, so was the trajectory's.
        assert await num_read("in_time") >= 2
        assert turns[0]["predicted_tokens"] != turns[1]["predicted_tokens"]
