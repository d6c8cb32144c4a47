"""The text predictor, trained and asked where torch is: the environment that `make real` and `make text` install."""

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


def with_tabular(examples: list[TextExample]) -> list[TextExample]:
    """Each example beside what the prefix tree says, which learns from the trajectories before it."""
    tree = TreePredictor()
    examples_told = []
    for number, example in enumerate(examples):
        name = f"{number // 2}"
        progress = Progress(name, example.group_id, output_tokens=example.output_tokens, num_turns=example.num_turns)
        examples_told.append(replace(example, base_tokens=tree.predict(progress).total_tokens))
        if number % 2:
            tree.ended(replace(progress, output_tokens=example.total_tokens))
    return examples_told


def write(path: Path, examples: list[TextExample]) -> Path:
    path.write_text("\n".join(json.dumps(asdict(example)) for example in examples))
    return path


def torch_python() -> Path:
    python = Path(os.environ.get("VLLM_CPU_VENV", DEFAULT_VENV)) / "bin" / "python"
    if not python.exists():
        pytest.fail(f"no {python}; install torch with: make real", pytrace=False)
    return python.absolute()


@dataclass(frozen=True)
class Trained:
    """A model, what it was asked, and what came of that."""

    model: Path
    questions: list[TextExample]
    came: dict[str, Any]


def trained(tmp_path: Path, has_signal: bool) -> Trained:
    """1,600 examples of 400 groups to learn from, 800 of 200 others to be judged by."""
    examples = with_tabular(corpus(600, has_signal, seed=4))
    files = write(tmp_path / "train.jsonl", examples[:1600]), write(tmp_path / "test.jsonl", examples[1600:])
    model = tmp_path / "model.pt"
    command = (torch_python(), "-m", "tests.predictor.text_worker", *files, model)
    done = subprocess.run(
        [str(part) for part in command], cwd=_CHECKOUT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return Trained(model, examples[1600:], json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Where the text tells it."""
    return trained(tmp_path_factory.mktemp("told"), has_signal=True)


def judged(questions: list[TextExample], said: list[list[float]]) -> list[PredictionPair]:
    return [
        PredictionPair(question.group_id, question.total_tokens, total, question.base_tokens)
        for question, (total, _) in zip(questions, said, strict=True)
    ]


def test_where_the_text_tells_it_is_learned_and_chosen(told: Trained) -> None:
    """In a minute on a CPU; its order beats the prefix tree's, and its 90th percentile keeps its word."""
    questions, came = told.questions, told.came
    choice = choose(judged(questions, came["said"]))
    below = fmean(q.total_tokens <= p90 for q, (_, p90) in zip(questions, came["said"], strict=True))
    print(came["report"], choice, f"under p90: {below:.2f}", f"{came['one_s'] * 1e3:.1f} ms a prediction")
    assert choice.takes_challenger and choice.gain_low > 0.05
    assert 0.8 < below < 0.98
    assert came["report"]["took_s"] < 90
    assert came["single"] == pytest.approx(came["said"][0], rel=1e-3)
    assert "is not a text predictor" in came["refusal"]


@pytest.mark.text
def test_where_the_text_tells_nothing_it_is_not_chosen(tmp_path: Path) -> None:
    """Trained on noise it is no better than the prefix tree that it starts from, and the evaluation says so."""
    noise = trained(tmp_path, has_signal=False)
    choice = choose(judged(noise.questions, noise.came["said"]))
    print(noise.came["report"], choice)
    assert not choice.takes_challenger
    assert choice.gain > -0.1


@pytest.mark.text
@pytest.mark.parametrize("has_signal", [True, False])
def test_the_command_keeps_a_model_only_where_it_pays(tmp_path: Path, has_signal: bool) -> None:
    """Trained and judged in one go, on other groups; where the text tells nothing no model is left behind."""
    conversations = write(tmp_path / "conversations.jsonl", corpus(500, has_signal, seed=4))
    out = tmp_path / "text.pt"
    arguments = ("-m", "heddle", "predictor", "train", "--text", conversations, "--out", out)
    # An environment with torch need not have what Heddle needs: this one's is put beside it.
    beside = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    done = subprocess.run(
        [str(part) for part in (torch_python(), *arguments)],
        cwd=_CHECKOUT,
        env=os.environ | {"PYTHONPATH": beside},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    print(done.stdout, done.stderr[-2000:])
    assert done.returncode == (0 if has_signal else 1)
    assert out.exists() == has_signal
    assert ("Not worth having" in done.stdout) != has_signal


async def test_the_gateway_hears_it_at_the_next_turn(told: Trained) -> None:
    """Asked as a turn ends, whole or streamed; the turn that comes next has its prediction, and the first has not."""
    beside = os.pathsep.join([str(_CHECKOUT), *(path for path in sys.path if path.endswith("site-packages"))])
    settings = {"HEDDLE_TEXT_PREDICTOR": str(told.model), "HEDDLE_STORE": "memory:"}
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=50)) as engine,
        gateway_process("--engine", engine, python=str(torch_python()), PYTHONPATH=beside, **settings) as gateway,
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
            # Nothing tells when it was read: a tool takes longer.
            while number == 0 and await num_read("in_time") == 0:
                probe = dict(body, messages=messages[:1], max_tokens=1, stream=False)
                await client.post("/v1/chat/completions", json=probe, headers={"x-trajectory-id": "probe"})
        turns = (await client.get("/v1/trajectories/t-1")).json()["turns"]
        assert await num_read("failed") == 0
        # One thread reads them in order: when the probe's was heard, the trajectory's was there.
        assert await num_read("in_time") >= 2
        assert turns[0]["predicted_tokens"] != turns[1]["predicted_tokens"]
