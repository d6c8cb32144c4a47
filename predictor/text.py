"""Predicts what a trajectory has left from its text (as the Heddle paper's predictor does), beside the tabular
predictor.

The network starts from the tabular prediction if there is one, and learns what the text adds to it. torch is loaded on
first use only. A prediction takes milliseconds, so it is made while the tool runs (`predictor/background.py`), and only
if `predictor/selection.py` finds that it pays.
"""

import math
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from scheduling.types import Prediction
from workloads.importers.records import Record
from workloads.traces import json_lines

_HEAD_CHARACTERS, _TAIL_CHARACTERS = 1_500, 4_000
_WORD = re.compile(r"\w+|[^\w\s]")
_MAX_NUMBER = 10**9  # far above any trajectory's tokens or turns
_P90_OF_NORMAL = 1.2815515655446004
_SAID = ("role", "name", "content", "text", "reasoning_content", "arguments", "input", "output")


@dataclass(frozen=True, slots=True)
class TextExample:
    """A conversation at the start of a turn, and its outcome.

    Args:
        group_id: examples of a group are never split between training and its check.
        total_tokens: output of the whole trajectory; 0 if it is to be predicted.
        base_tokens: the tabular prediction of the total; 0 if there is none. Either all examples have one or none has.
    """

    text: str
    group_id: str
    output_tokens: int
    num_turns: int
    total_tokens: int = 0
    base_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What a predictor was trained on: examples learned from, those of held-out groups, and the seconds it took."""

    num_examples: int
    num_held_out: int
    took_s: float


def conversation_text(messages: object) -> str:
    """The beginning and the end of a conversation's text: the task, and where it stands now. Bounded."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return ""
    head = "\n".join(_taken(_strings(messages), _HEAD_CHARACTERS))[:_HEAD_CHARACTERS]
    tail = "\n".join(reversed(list(_taken(_strings(messages, backwards=True), _TAIL_CHARACTERS))))[-_TAIL_CHARACTERS:]
    return f"{head}\n{tail}"


def read_examples(path: Path) -> list[TextExample]:
    """Examples from JSON lines, gzipped or not, with the fields of `TextExample`; `messages` may replace `text`.

    Raises:
        OSError, ValueError: it cannot be read; the message names line and field.
    """
    return [_example(Record(fields, f"{path}, line {number}")) for number, _, fields in json_lines(path)]


def _example(record: Record) -> TextExample:
    return TextExample(
        _text_of(record),
        record.name("group_id"),
        int(_number(record, "output_tokens")),
        int(_number(record, "num_turns")),
        int(_number(record, "total_tokens")) if "total_tokens" in record.fields else 0,
        float(_number(record, "base_tokens")) if "base_tokens" in record.fields else 0.0,
    )


def _text_of(record: Record) -> str:
    if "text" in record.fields:
        text = record.fields["text"]
        if not isinstance(text, str):
            raise record.error("text", "must be a string")
        return text
    messages = record.fields.get("messages")
    if not isinstance(messages, list):
        raise record.error("messages", "must be a list, unless there is a text")
    return conversation_text(messages)


def _number(record: Record, name: str) -> int | float:
    value = record.fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MAX_NUMBER:
        raise record.error(name, f"must be a number from 0 to {_MAX_NUMBER:,}")
    return value


def train_text(
    examples: Sequence[TextExample], out: Path, *, seed: int = 0, max_epochs: int = 20, max_s: float = 60.0
) -> TrainingReport:
    """Train on examples and write the predictor to `out`. A seventh of the groups decides when to stop.

    Raises:
        ValueError: fewer than 50 examples, or fewer than 5 groups.
        ImportError: torch is not installed.
    """
    group_ids = sorted({example.group_id for example in examples})
    if len(examples) < 50 or len(group_ids) < 5:
        raise ValueError(
            f"{len(examples)} examples of {len(group_ids)} groups are too few: at least 50 of 5 groups are needed"
        )
    from predictor import text_model

    started = time.monotonic()
    typical_log = math.fsum(_log_left(example) for example in examples) / len(examples)
    random.Random(seed).shuffle(group_ids)
    held_out_ids = set(group_ids[: max(1, len(group_ids) // 7)])
    rows: dict[bool, list[text_model.Row]] = {True: [], False: []}
    for example in examples:
        rows[example.group_id in held_out_ids].append(_row(example, typical_log))
    modules = text_model.new_modules(seed)
    text_model.train(modules, rows[False], rows[True], max_epochs, lambda: time.monotonic() - started > max_s)
    text_model.save(modules, {"typical_log": typical_log}, out)
    return TrainingReport(len(rows[False]), len(rows[True]), time.monotonic() - started)


class TextPredictor:
    """A trained predictor. Thread-safe: it only reads."""

    def __init__(self, modules: Any, typical_log: float) -> None:
        self._modules = modules
        self._typical_log = typical_log

    @classmethod
    def load(cls, path: Path) -> "TextPredictor":
        """The predictor that `train_text` wrote. Raises OSError, ValueError or ImportError (torch is not installed)."""
        from predictor import text_model

        modules, about = text_model.load(path)
        if "typical_log" not in about:
            raise ValueError(f"{path} is not a text predictor: typical_log is absent")
        return cls(modules, about["typical_log"])

    def predict(self, example: TextExample) -> Prediction:
        """Total output, given the conversation's text. Cost: some milliseconds of one core."""
        return self.predict_all([example])[0]

    def predict_all(self, examples: Sequence[TextExample]) -> list[Prediction]:
        """The same for many, in their order."""
        from predictor import text_model

        predictions = []
        for start in range(0, len(examples), 256):
            batch = examples[start : start + 256]
            laws = text_model.laws(self._modules, [_row(example, self._typical_log) for example in batch])
            predictions += [_prediction(example, *law) for example, law in zip(batch, laws, strict=True)]
        return predictions


def _prediction(example: TextExample, mean_log: float, spread: float) -> Prediction:
    left = max(math.exp(min(mean_log + spread**2 / 2, 30.0)), 1.0)
    p90 = math.exp(min(mean_log + _P90_OF_NORMAL * spread, 30.0))
    return Prediction(example.output_tokens + left, example.output_tokens + max(p90, left))


def _row(example: TextExample, typical_log: float) -> Any:
    from predictor.text_model import HEAD_WORDS, TAIL_WORDS, Row, hash_of

    head = _WORD.findall(example.text[:_HEAD_CHARACTERS])[:HEAD_WORDS]
    tail = _WORD.findall(example.text[-_TAIL_CHARACTERS:])[-TAIL_WORDS:]
    padded = [*head, *[""] * (HEAD_WORDS - len(head)), *[""] * (TAIL_WORDS - len(tail)), *tail]
    words = [hash_of(crc32(word.lower().encode("utf-8", "replace"))) if word else 0 for word in padded]
    base_log = typical_log
    if example.base_tokens > 0:
        base_log = math.log(max(example.base_tokens - example.output_tokens, 1.0))
    numbers = [
        (math.log1p(example.output_tokens) - 6.0) / 3.0,
        math.log1p(example.num_turns) / 2.0,
        float(example.num_turns == 0),
        (base_log - typical_log) / 2.0,
    ]
    return Row(words, numbers, base_log, _log_left(example))


def _log_left(example: TextExample) -> float:
    return math.log(max(example.total_tokens - example.output_tokens, 1))


def _strings(value: object, backwards: bool = False, depth: int = 6) -> Iterator[str]:
    """The text in a value, in order; other fields of a message hold none."""
    if isinstance(value, str):
        yield value
    elif depth and isinstance(value, list | tuple):
        for item in reversed(value) if backwards else value:
            yield from _strings(item, backwards, depth - 1)
    elif depth and isinstance(value, Mapping):
        keys = (*_SAID, "tool_calls", "function")
        for key in reversed(keys) if backwards else keys:
            yield from _strings(value.get(key), backwards, depth - 1)


def _taken(strings: Iterator[str], characters: int) -> Iterator[str]:
    """Strings until they have `characters` characters."""
    for string in strings:
        yield string
        characters -= len(string)
        if characters <= 0:
            return
