"""The text predictor's parts that need no torch: examples, texts, background predictions, selection."""

import gzip
import importlib.util
import json
import math
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.cli import main
from predictor.background import BackgroundPredictions
from predictor.selection import PredictionPair, choose
from predictor.text import TextExample, conversation_text, read_examples, train_text
from predictor.text_trial import beside_tabular
from scheduling.types import Prediction
from tests.predictor.corpus import corpus


def test_the_text_holds_the_task_and_the_latest_result() -> None:
    """The beginning and the end of a long conversation stay, whatever its API's form. Ids and cache marks are left
    out."""
    call = {"id": "call_9", "function": {"name": "bash", "arguments": '{"cmd": "make"}'}}
    cache = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": "Port the parser."},
        *({"role": "assistant", "content": "filler " * 100} for _ in range(200)),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "3 tests fail", **cache}]},
    ]
    text = conversation_text(messages)
    assert text.startswith("user\nPort the parser.") and text.rstrip().endswith("3 tests fail")
    assert "make" in text and not any(mark in text for mark in ("call_9", "ephemeral")) and len(text) < 6_000


def test_messages_keep_their_order() -> None:
    """The tail is read backwards, and still reads forwards."""
    text = conversation_text([{"role": "user", "content": f"word{n}"} for n in range(5)])
    tail = text.split("word4", 1)[1]
    assert [tail.index(f"word{n}") for n in range(5)] == sorted(tail.index(f"word{n}") for n in range(5))


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=9),
        lambda values: (
            st.lists(values, max_size=3)
            | st.dictionaries(st.sampled_from(["role", "content", "text", "tool_calls"]), values, max_size=3)
        ),
    )
)
def test_any_messages_have_a_text(messages: object) -> None:
    """Malformed messages have one, too."""
    assert isinstance(conversation_text(messages), str)


def test_messages_may_take_the_place_of_a_text(tmp_path: Path) -> None:
    """As a turn's request has them."""
    path = tmp_path / "examples.jsonl"
    good = {"messages": [{"role": "user", "content": "hello"}], "group_id": "g", "output_tokens": 3, "num_turns": 1}
    path.write_text(json.dumps(good | {"total_tokens": 9}) + "\n")
    [example] = read_examples(path)
    assert "hello" in example.text and (example.output_tokens, example.total_tokens) == (3, 9)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"output_tokens": ...}, "output_tokens: must be a number from 0 to 1,000,000,000, not None"),
        ({"text": ...}, "messages: must be a list, unless there is a text, not None"),
        ({"text": ..., "messages": "hi"}, "messages: must be a list, unless there is a text, not 'hi'"),
        ({"text": None}, "text: must be a string, not None"),
        ({"group_id": ...}, "group_id: must be a string, not None"),
        ({"group_id": None}, "group_id: must be a string, not None"),
    ],
)
def test_a_wrong_field_of_an_example_is_named(
    change: dict[str, object], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was told in Python's words, or read as the text or the group `None`."""
    path = tmp_path / "examples.jsonl"
    good = {"text": "x", "group_id": "g", "output_tokens": 3, "num_turns": 1, "total_tokens": 9}
    wrong = {name: value for name, value in (good | change).items() if value is not ...}
    path.write_text(json.dumps(good) + "\n" + json.dumps(wrong))
    assert main(["predictor", "train", "--text", str(path), "--out", str(tmp_path / "text.pt")]) == 2
    assert capsys.readouterr().err == f"heddle predictor train: {path}, line 2, {fault}\n"


def test_examples_may_be_gzipped_with_empty_lines(tmp_path: Path) -> None:
    """As every file of JSON lines may be."""
    good = {"text": "x", "group_id": "g", "output_tokens": 3, "num_turns": 1, "total_tokens": 9, "base_tokens": 7.5}
    path = tmp_path / "examples.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" + json.dumps(good).encode() + b"\n\n"))
    assert read_examples(path) == [TextExample("x", "g", 3, 1, 9, 7.5)]


@pytest.mark.parametrize("name", ["output_tokens", "num_turns", "total_tokens", "base_tokens"])
@pytest.mark.parametrize("wrong", ["5", None, -1, True, 1e300, []])
def test_a_wrong_number_in_an_example_is_named(tmp_path: Path, name: str, wrong: object) -> None:
    """Training would end in a traceback, or learn nonsense."""
    good = {"text": "x", "group_id": "g", "output_tokens": 3, "num_turns": 1, "total_tokens": 9, "base_tokens": 7.5}
    path = tmp_path / "examples.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | {name: wrong}))
    with pytest.raises(ValueError, match=rf"examples\.jsonl, line 2, {name}: must be a number from 0"):
        read_examples(path)


def test_too_few_examples_train_nothing(tmp_path: Path) -> None:
    """A model trained on too little would be believed. Training is refused before torch is even loaded."""
    with pytest.raises(ValueError, match="too few"):
        train_text([TextExample("a", "g", 0, 0, 9)] * 60, tmp_path / "model.pt")
    assert "torch" not in sys.modules


class Gate:
    """A predictor that answers once its gate is open."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()

    def predict(self, tokens: int) -> Prediction:
        self.entered.set()
        assert self.open.wait(20)
        if tokens < 0:
            raise RuntimeError("a broken model")
        return Prediction(tokens, tokens)


def finish(executor: ThreadPoolExecutor) -> None:
    """Wait until everything submitted so far is done: one thread takes its work in order."""
    executor.submit(int).result(20)


def test_a_prediction_in_time_is_used_once() -> None:
    """The turn after the tool gets it; the turn after that does not get it again."""
    gate = Gate()
    with ThreadPoolExecutor(1) as executor:
        background = BackgroundPredictions(gate.predict, executor)
        background.begin("a", 500)
        gate.open.set()
        finish(executor)
        assert background.take("a") == Prediction(500, 500)
        assert background.take("a") is None
    assert background.counts.num_in_time == 1


def test_a_late_prediction_is_not_waited_for() -> None:
    """If the tool returns first, its turn continues without it, and no later turn gets the late prediction."""
    gate = Gate()
    with ThreadPoolExecutor(1) as executor:
        background = BackgroundPredictions(gate.predict, executor)
        background.begin("a", 500)
        assert gate.entered.wait(20)
        assert background.take("a") is None
        gate.open.set()
        finish(executor)
        assert background.take("a") is None
    assert (background.counts.num_late, background.counts.num_in_time) == (1, 0)


def test_a_new_text_replaces_the_old_one() -> None:
    """The prediction is for the latest turn's text."""
    gate = Gate()
    with ThreadPoolExecutor(1) as executor:
        background = BackgroundPredictions(gate.predict, executor)
        for tokens in (100, 200, 300):
            background.begin("a", tokens)
        gate.open.set()
        finish(executor)
        assert background.take("a") == Prediction(300, 300)


def test_a_failed_prediction_is_counted_and_raises_nothing() -> None:
    """The turn continues without it, as after a late one."""
    gate = Gate()
    gate.open.set()
    with ThreadPoolExecutor(1) as executor:
        background = BackgroundPredictions(gate.predict, executor)
        background.begin("a", -1)
        finish(executor)
        assert background.take("a") is None
    assert background.counts.num_failed == 1


def test_open_predictions_are_bounded() -> None:
    """Beyond the limit, new ones are refused until there is room. Ended trajectories make room."""
    gate = Gate()
    with ThreadPoolExecutor(1) as executor:
        background = BackgroundPredictions(gate.predict, executor, max_open=2)
        for name in ("a", "b", "c"):
            background.begin(name, 1)
        assert background.counts.num_refused == 1
        background.dropped("b")
        background.begin("d", 4)
        gate.open.set()
        finish(executor)
        assert [background.take(name) for name in "abcd"] == [Prediction(1, 1), None, None, Prediction(4, 4)]


def prediction_pairs(challenger_noise: float, incumbent_noise: float, num_groups: int = 60) -> list[PredictionPair]:
    rng = random.Random(2)
    rows = []
    for n in range(num_groups):
        for _ in range(3):
            log = rng.gauss(8, 1)
            predicted = [math.exp(log + rng.gauss(0, noise)) for noise in (challenger_noise, incumbent_noise)]
            rows.append(PredictionPair(f"g{n}", math.exp(log), *predicted))
    return rows


def test_a_better_challenger_is_chosen() -> None:
    """Clearly better order and recall decide, and the figures state by how much."""
    choice = choose(prediction_pairs(0.3, 1.5))
    assert choice.takes_challenger and choice.gain > choice.gain_low > 0.1 and choice.recall_gain > 0


@pytest.mark.parametrize(("challenger", "incumbent"), [(1.5, 0.3), (0.7, 0.7)], ids=["worse", "equal"])
def test_a_challenger_that_is_not_better_is_not_chosen(challenger: float, incumbent: float) -> None:
    """If it is worse, or equal up to chance, the cheap predictor stays."""
    assert not choose(prediction_pairs(challenger, incumbent)).takes_challenger


def test_few_groups_never_choose_the_challenger() -> None:
    """A handful of prompts is not enough, however good it looks on them."""
    assert not choose(prediction_pairs(0.1, 3.0, num_groups=10)).takes_challenger


def test_an_examples_tabular_prediction_ignores_its_own_group() -> None:
    """A group's totals change the predictions for other groups, and none of its own."""
    examples = corpus(60, has_signal=True, seed=3)
    before = beside_tabular(examples)
    own = examples[0].group_id
    longer = [replace(one, total_tokens=one.total_tokens * (50 if one.group_id == own else 1)) for one in examples]
    after = beside_tabular(longer)
    totals = [(one.group_id, one.base_tokens, other.base_tokens) for one, other in zip(before, after, strict=True)]
    assert all(was == now > 0 for group_id, was, now in totals if group_id == own)
    assert any(was != now for group_id, was, now in totals if group_id != own)


def test_siblings_of_equal_length_count_one_by_one() -> None:
    """Of each prompt, 15 of 16 agents reach the limit of tokens. They counted as one, so half of all seemed short: the
    prediction was two fifths lower than where the same lengths differ by a token.
    """
    at_limit, nearly = (
        [
            TextExample(f"task {group}", f"g{group}", made, turns, 4_000 + step * member if member else 100)
            for group in range(40)
            for member in range(16)
            for turns, made in enumerate((0, 50))
        ]
        for step in (0, 1)
    )
    predictions = [beside_tabular(examples)[0].base_tokens for examples in (at_limit, nearly)]
    assert predictions[0] == pytest.approx(predictions[1], rel=0.02)


def test_a_recorded_prediction_is_kept() -> None:
    """A gateway's own predictor knew the siblings, which is better than any prediction computed afterwards."""
    examples = [replace(one, base_tokens=77.0) for one in corpus(8, has_signal=True, seed=3)]
    assert beside_tabular(examples) == examples


@pytest.mark.parametrize(
    ("lines", "more", "complaint"),
    [
        (["{}"], [], "conversations.jsonl, line 1, messages: must be a list"),
        ([json.dumps({"text": "x", "group_id": "g", "output_tokens": 1, "num_turns": 0})], [], "has no total_tokens"),
        (
            [json.dumps({"text": "x", "group_id": "g", "output_tokens": 1, "num_turns": 0, "total_tokens": 9})],
            [],
            "too few",
        ),
        ([], ["--law", "coding"], "--text cannot be combined with --events, --trace or --law"),
    ],
)
def test_unusable_conversations_are_refused_in_one_line(
    lines: list[str], more: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 2, and no model is written."""
    path, out = tmp_path / "conversations.jsonl", tmp_path / "text.pt"
    path.write_text("\n".join(lines))
    assert main(["predictor", "train", "--text", str(path), "--out", str(out), *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("heddle predictor train: ") and complaint in error and error.count("\n") == 1
    assert not out.exists()


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is here")
def test_without_torch_the_package_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the package to install."""
    path = tmp_path / "conversations.jsonl"
    path.write_text("\n".join(json.dumps(asdict(example)) for example in corpus(60, has_signal=True, seed=3)))
    assert main(["predictor", "train", "--text", str(path), "--out", str(tmp_path / "text.pt")]) == 2
    assert capsys.readouterr().err == "heddle predictor train: torch is not installed: pip install torch\n"
