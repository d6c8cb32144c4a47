"""Predictors by name, for settings and commands."""

from collections.abc import Callable

from predictor.prefix_tree import TreePredictor
from predictor.progress import Predictor
from predictor.siblings import SiblingPredictor
from predictor.tabular import TabularPredictor, TabularSettings

PREDICTORS: dict[str, Callable[[], Predictor]] = {
    "tabular": TabularPredictor,
    "siblings": SiblingPredictor,
    "tree": TreePredictor,
    # The tabular predictor without one of its parts, to see what that part is worth.
    "progress-only": lambda: TabularPredictor(TabularSettings(uses_siblings=False)),
    "siblings-only": lambda: TabularPredictor(TabularSettings(uses_pace=False)),
}


def predictor_named(name: str, model: bytes | None = None) -> Predictor:
    """A new predictor.

    Args:
        model: what `heddle predictor train` wrote, to start from.

    Raises:
        ValueError: there is no predictor of that name, or the model is of another kind.
    """
    if name not in PREDICTORS:
        raise ValueError(f"no predictor {name!r}: choose {', '.join(PREDICTORS)}")
    predictor = PREDICTORS[name]()
    if model is not None:
        predictor.restore(model)
    return predictor
