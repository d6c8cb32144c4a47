"""How long a prediction takes: the tabular predictor in the middle of a rollout of 10,000 trajectories, one core.

Run as a script it prints the figures:

    python -m tests.bench.test_predictor_speed
"""

from collections.abc import Callable
from time import process_time

import pytest

from predictor.named import predictor_named
from predictor.progress import Progress
from predictor.replay import play
from workloads.laws import CODING, draw

# The promise is 100 us. Machines that run tests are shared and slow, so only a tenfold slowdown is caught.
CEILING_S = 1e-3
NUM_TRAJECTORIES = 10_000


def measure(name: str, num_trajectories: int) -> dict[str, float]:
    """CPU seconds per call of each kind, and the bytes of a dump, once a rollout is half done."""
    predictor = predictor_named(name)
    calls: list[Progress] = []

    def note(progress: Progress) -> tuple[float, None]:
        calls.append(progress)
        return predictor.predict(progress).total_tokens, None

    for _ in play(draw(CODING, num_trajectories, 1).trajectories, predictor, note, "together"):
        if len(calls) >= num_trajectories * 5 // 2:
            break
    sample = calls[-2_000:]
    predicting = _per_call(predictor.predict, sample)
    dumping_from = process_time()
    dumped = predictor.dump()
    dumping = process_time() - dumping_from
    return {
        "predict_s": predicting,
        "ended_s": _per_call(predictor.ended, sample),
        "dump_s": dumping,
        "dump_bytes": len(dumped),
    }


def _per_call(call: Callable[[Progress], object], sample: list[Progress]) -> float:
    began = process_time()
    for progress in sample:
        call(progress)
    return (process_time() - began) / len(sample)


@pytest.mark.parametrize("name", ["tabular", "siblings"])
def test_a_prediction_takes_less_than_a_millisecond(name: str) -> None:
    """In the middle of a rollout of 1,000 trajectories; a turn takes far longer."""
    assert measure(name, 1_000)["predict_s"] < CEILING_S


def main() -> None:
    """Print the figures."""
    for name in ("tabular", "siblings", "tree"):
        figures = measure(name, NUM_TRAJECTORIES)
        print(
            f"{name}: {figures['predict_s'] * 1e6:.0f} us a prediction, {figures['ended_s'] * 1e6:.0f} us an end, "
            f"dump of {figures['dump_bytes'] / 1e6:.2f} MB in {figures['dump_s'] * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main()
