"""Whether a text predictor is worth having: trained on most groups, judged on the others beside the tabular
predictor."""

from collections import Counter
from collections.abc import Sequence
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
    trajectories = _trajectories(examples)
    told: dict[int, TextExample] = {}
    for fold in range(NUM_FOLDS):
        predictor = TabularPredictor()
        for name, numbers in trajectories.items():
            if _fold(examples[numbers[0]]) == fold:
                continue
            for number in numbers:
                predictor.predict(_progress(name, examples[number]))
            last = examples[numbers[-1]]
            predictor.ended(replace(_progress(name, last), output_tokens=last.total_tokens))
        for name, numbers in trajectories.items():
            if _fold(examples[numbers[0]]) != fold:
                continue
            for number in numbers:
                said = predictor.predict(_progress(name, examples[number])).total_tokens
                told[number] = replace(examples[number], base_tokens=said)
            predictor.dropped(name)
    return [told[number] for number in range(len(examples))]


def _trajectories(examples: Sequence[TextExample]) -> dict[str, list[int]]:
    """The positions of each trajectory's examples by a name for it, early turns first.

    Siblings differ in their total. Those of the same total, as at a limit of tokens, are told apart by the order of
    their examples: no trajectory has two of one turn.
    """
    found: dict[str, list[int]] = {}
    seen: Counter[tuple[str, int, int]] = Counter()
    for number, example in enumerate(examples):
        turn = example.group_id, example.total_tokens, example.num_turns
        found.setdefault(f"{example.group_id}/{example.total_tokens}/{seen[turn]}", []).append(number)
        seen[turn] += 1
    return {name: sorted(numbers, key=lambda number: examples[number].num_turns) for name, numbers in found.items()}


def _progress(name: str, example: TextExample) -> Progress:
    return Progress(name, example.group_id, output_tokens=example.output_tokens, num_turns=example.num_turns)


def _fold(example: TextExample) -> int:
    return crc32(example.group_id.encode("utf-8", "replace")) % NUM_FOLDS
