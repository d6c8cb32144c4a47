"""Compares predictors on the same trajectories: each learns from some groups and predicts others."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from predictor.named import PREDICTORS
from predictor.progress import Predictor, Progress
from predictor.replay import STEPS, Arrival, ReplayedPrediction, play
from predictor.scoring import Score, score
from predictor.single_features import FEATURES, SingleFeature
from predictor.tabular import TabularPredictor
from workloads.trajectories import Trajectory

Split = tuple[Sequence[Trajectory], Sequence[Trajectory]]
"""Trajectories to learn from first, and trajectories to predict; no group is in both."""

MIN_TRAJECTORIES = 20
"""A row over fewer trajectories means nothing."""

_LEAST_FOR_A_HUNDREDTH = 100
"""Of fewer trajectories, the longest 1 % is a single one."""

_COLUMNS = ("pearson", "remaining_pearson", "kendall", "recall_20", "recall_1", "in_top_10", "under_p50", "under_p90")
_HEADS = ("log-Pearson", "of remaining", "Kendall", "top 20 %", "top 1 %", "1 % in 10 %", "<= p50", "<= p90")
_OF_A_HUNDREDTH = ("recall_1", "in_top_10")


@dataclass(frozen=True, slots=True)
class Row:
    """How good one predictor was after a number of turns."""

    predictor: str
    is_single: bool
    step: int
    score: Score


def folds(trajectories: Sequence[Trajectory], num: int) -> list[Split]:
    """Splits in which each group is predicted exactly once, by a predictor that has learned from other groups only:
    `num`, or one for each group if there are fewer. The predictor of a single group has nothing to learn from.
    """

    def shuffled(group_id: str) -> tuple[int, str]:
        return zlib.crc32(group_id.encode()), group_id

    group_ids = sorted({t.group_id for t in trajectories}, key=shuffled)
    fold_of = {group_id: index % num for index, group_id in enumerate(group_ids)}
    return [
        (
            [t for t in trajectories if fold_of[t.group_id] != index],
            [t for t in trajectories if fold_of[t.group_id] == index],
        )
        for index in range(min(num, len(group_ids)))
    ]


def evaluate(
    splits: Sequence[Split],
    arrival: Arrival,
    names: Sequence[str] = tuple(PREDICTORS),
    on_begin: Callable[[str, int, int], None] = lambda name, num_before, num: None,
) -> list[Row]:
    """A row per step for each predictor and each single feature; predictors first.

    Args:
        on_begin: called before each of them with its name, the number of those before it, and the number of all.
    """
    makers: dict[str, Callable[[], Predictor]] = {name: PREDICTORS[name] for name in names}
    makers |= {name: partial(SingleFeature, feature) for name, feature in FEATURES.items()}
    rows: list[Row] = []
    for index, (name, make) in enumerate(makers.items()):
        on_begin(name, index, len(makers))
        rows += _rows(name, make, name in FEATURES, splits, arrival)
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """A table per step, with the first predictor's gain over the best single feature of that step."""
    parts = []
    for step in sorted({row.step for row in rows}):
        here = [row for row in rows if row.step == step]
        head = "before the first turn" if step == 0 else f"after {step} turn{'s' if step > 1 else ''}"
        parts.append(f"**{head.capitalize()}** ({here[0].score.num} trajectories)\n")
        parts.append("| predictor | " + " | ".join(_HEADS) + " |")
        parts.append("|---|" + "---|" * len(_HEADS))
        parts += ["| " + " | ".join(_cells(row)) + " |" for row in here]
        parts.append(_gain(here))
    return "\n".join(parts)


def _rows(
    name: str, make: Callable[[], Predictor], is_single: bool, splits: Sequence[Split], arrival: Arrival
) -> list[Row]:
    said: list[ReplayedPrediction] = []
    for before, asked in splits:
        predictor = make()
        for _ in play(before, predictor, _ask(predictor), arrival):
            pass
        if not is_single:
            # As the next rollout starts with it: all ends count, including those after which no report came.
            learned, predictor = predictor.dump(), make()
            predictor.restore(learned)
        said += play(asked, predictor, _ask(predictor), arrival)
    by_step: Mapping[int, list[ReplayedPrediction]] = {
        step: [one for one in said if one.step == step] for step in STEPS
    }
    return [
        Row(name, is_single, step, score(ones, is_total=not is_single))
        for step, ones in by_step.items()
        if len(ones) >= MIN_TRAJECTORIES
    ]


def _ask(predictor: Predictor) -> Callable[[Progress], tuple[float, tuple[float, float] | None]]:
    def law(progress: Progress) -> tuple[float, tuple[float, float] | None]:
        assert isinstance(predictor, TabularPredictor)
        forecast = predictor.forecast(progress)
        return forecast.mean(), (forecast.quantile(0.5), forecast.quantile(0.9))

    def numbers(progress: Progress) -> tuple[float, tuple[float, float] | None]:
        return predictor.predict(progress).total_tokens, None

    return law if isinstance(predictor, TabularPredictor) else numbers


def _cells(row: Row) -> list[str]:
    values = asdict(row.score)
    name = f"*{row.predictor}*" if row.is_single else row.predictor
    shown = {column for column in _COLUMNS if values[column] is not None and _means_something(column, row)}
    return [name, *(f"{values[column]:.2f}" if column in shown else "" for column in _COLUMNS)]


def _means_something(column: str, row: Row) -> bool:
    return column not in _OF_A_HUNDREDTH or row.score.num >= _LEAST_FOR_A_HUNDREDTH


def _gain(rows: Sequence[Row]) -> str:
    """One line: the first predictor against the best single feature, which may differ from figure to figure.

    A feature that falls as length rises is as good as one that rises.
    """
    first, singles = rows[0], [row for row in rows if row.is_single]
    gains = []
    for column, head in zip(_COLUMNS[:6], _HEADS, strict=False):
        if not _means_something(column, first):
            continue
        best = max(singles, key=lambda row: abs(getattr(row.score, column)))
        gain = getattr(first.score, column) - abs(getattr(best.score, column))
        gains.append(f"{head} {gain:+.2f} ({best.predictor})")
    return f"\n{first.predictor} against the best single feature: {', '.join(gains)}\n"
