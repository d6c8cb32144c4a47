"""Whether a text predictor is worth having: trained on most groups, judged on the others beside the tabular
predictor."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

from predictor.progress import Progress
from predictor.selection import Choice, PredictionPair, choose
from predictor.tabular import TabularPredictor
from predictor.text import TextExample, TextPredictor, TrainingReport, train_text
from workloads.result_files import write_whole

NUM_FOLDS = 5
"""Parts into which groups are dealt; one fifth of the groups judges. No group is in two parts."""


def try_text(examples: Sequence[TextExample], out: Path, *, seed: int = 0) -> tuple[TrainingReport, Choice]:
    """Train on four fifths of the groups, judge on the rest; `out` is written only if the model was chosen.

    Raises:
        ValueError: too few examples, or one of unknown length.
        ImportError: torch is not installed.
        OSError: `out` cannot be written.
    """
    if any(example.total_tokens <= 0 for example in examples):
        raise ValueError("an example has no total_tokens: what a trajectory came to is what is learned")
    examples = beside_tabular(examples)
    asked = [example for example in examples if _fold(example) == 0]
    with TemporaryDirectory() as folder:
        draft = Path(folder) / "text.pt"
        report = train_text([example for example in examples if _fold(example)], draft, seed=seed)
        said = TextPredictor.load(draft).predict_all(asked)
        judged = [
            PredictionPair(example.group_id, example.total_tokens, prediction.total_tokens, example.base_tokens)
            for example, prediction in zip(asked, said, strict=True)
        ]
        choice = choose(judged, seed=seed)
        if choice.takes_challenger:
            write_whole(out, draft.read_bytes())
    return report, choice


def beside_tabular(examples: Sequence[TextExample]) -> list[TextExample]:
    """Each example with the prediction of a tabular predictor that has learned only from groups of other parts.

    If all examples have a `base_tokens` of their own, as a gateway's predictor gave them, they are returned as they
    are.
    """
    if all(example.base_tokens > 0 for example in examples):
        return list(examples)
    told: dict[int, TextExample] = {}
    for fold in range(NUM_FOLDS):
        predictor = TabularPredictor()
        for numbers in _trajectories(examples):
            if _fold(examples[numbers[0]]) == fold:
                continue
            for number in numbers:
                predictor.predict(_progress(examples[number]))
            last = examples[numbers[-1]]
            predictor.ended(replace(_progress(last), output_tokens=last.total_tokens))
        for numbers in _trajectories(examples):
            if _fold(examples[numbers[0]]) != fold:
                continue
            for number in numbers:
                said = predictor.predict(_progress(examples[number])).total_tokens
                told[number] = replace(examples[number], base_tokens=said)
            predictor.dropped(_name(examples[numbers[0]]))
    return [told[number] for number in range(len(examples))]


def _trajectories(examples: Sequence[TextExample]) -> Iterator[list[int]]:
    """The positions of each trajectory's examples, early turns first."""
    found: dict[str, list[int]] = {}
    for number, example in enumerate(examples):
        found.setdefault(_name(example), []).append(number)
    for numbers in found.values():
        yield sorted(numbers, key=lambda number: examples[number].num_turns)


def _name(example: TextExample) -> str:
    """A name for the trajectory: siblings differ in their total."""
    return f"{example.group_id}/{example.total_tokens}"


def _progress(example: TextExample) -> Progress:
    return Progress(_name(example), example.group_id, output_tokens=example.output_tokens, num_turns=example.num_turns)


def _fold(example: TextExample) -> int:
    return crc32(example.group_id.encode("utf-8", "replace")) % NUM_FOLDS
