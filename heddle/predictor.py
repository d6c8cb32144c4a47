"""`heddle predictor`: train a predictor on what was, and see how good predictors are."""

import argparse
import sys
from pathlib import Path

from predictor.evaluation import Split, evaluate, folds, markdown
from predictor.named import PREDICTORS, predictor_named
from predictor.training import learn_events, learn_trajectories
from workloads.laws import draw, law_named
from workloads.traces import load_trace
from workloads.trajectories import Trajectory

_EPILOG = """examples:
  heddle predictor train --events events.jsonl --out model.json
  heddle predictor train --trace trace.jsonl.gz --law coding --out model.json
  heddle predictor evaluate --law coding --law math-heavy
  heddle predictor evaluate --trace trace.jsonl.gz --arrival chained --markdown
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What one sets of both."""
    parser.epilog = _EPILOG
    verbs = parser.add_subparsers(dest="deed", required=True, metavar="VERB")
    train = verbs.add_parser("train", help="learn from traces, laws and event logs, one after the other")
    train.add_argument("--events", action="append", default=[], type=Path, metavar="FILE", help="a gateway's event log")
    train.add_argument("--out", required=True, type=Path, metavar="MODEL")
    train.add_argument("--predictor", choices=tuple(PREDICTORS), default="tabular")
    evaluated = verbs.add_parser("evaluate", help="compare predictors, and each with single features")
    evaluated.add_argument("--predictor", action="append", choices=tuple(PREDICTORS), help="default: all")
    evaluated.add_argument(
        "--arrival",
        choices=("together", "chained"),
        default="together",
        help="all trajectories start at once, or each sibling when the one before it has ended",
    )
    evaluated.add_argument("--folds", type=int, default=5, help="of a trace, split by group")
    evaluated.add_argument("--cold", action="store_true", help="learn nothing before")
    evaluated.add_argument("--markdown", action="store_true", help="leave out what is for a terminal only")
    for one in (train, evaluated):
        one.add_argument("--trace", action="append", default=[], type=Path, metavar="FILE")
        one.add_argument("--law", action="append", default=[], metavar="LAW", help="coding, search, math-heavy, ...")
        one.add_argument("--trajectories", type=int, default=1_600, help="drawn of a law")
        one.add_argument("--seed", type=int, default=1)


def run(parsed: argparse.Namespace) -> int:
    """Train or evaluate."""
    try:
        return _train(parsed) if parsed.deed == "train" else _evaluate(parsed)
    except (ValueError, OSError) as error:
        print(f"heddle predictor {parsed.deed}: {error}", file=sys.stderr)
        return 2


def _train(parsed: argparse.Namespace) -> int:
    predictor = predictor_named(parsed.predictor)
    num = sum(learn_trajectories(predictor, load_trace(path).trajectories) for path in parsed.trace)
    num += sum(learn_trajectories(predictor, _drawn(parsed, law, parsed.seed)) for law in parsed.law)
    for path in parsed.events:
        with path.open("rb") as lines:
            num += learn_events(predictor, lines)
    if not num:
        raise ValueError("no trajectory ended in what was given")
    parsed.out.write_bytes(predictor.dump())
    print(f"{parsed.out}: a {parsed.predictor} predictor that has seen {num:,} trajectories")
    return 0


def _evaluate(parsed: argparse.Namespace) -> int:
    sources: list[tuple[str, list[Split]]] = [
        (path.name, folds(load_trace(path).trajectories, parsed.folds)) for path in parsed.trace
    ]
    # Of a law another seed's draw is learned from before, as a rollout before this one.
    sources += [
        (law, [(_drawn(parsed, law, parsed.seed + 1_000), _drawn(parsed, law, parsed.seed))]) for law in parsed.law
    ]
    if not sources:
        raise ValueError("give --trace or --law")
    for name, splits in sources:
        splits = [((), asked) for _, asked in splits] if parsed.cold else splits
        rows = evaluate(splits, parsed.arrival, parsed.predictor or tuple(PREDICTORS))
        learned = "nothing learned before" if parsed.cold else "other groups learned before"
        print(f"### {name}: {parsed.arrival}, {learned}\n\n{markdown(rows)}")
        if not parsed.markdown:
            print("Singles are in *italics*; 'of remaining' is the log-Pearson of what was still to come.\n")
    return 0


def _drawn(parsed: argparse.Namespace, law: str, seed: int) -> tuple[Trajectory, ...]:
    return draw(law_named(law), parsed.trajectories, seed).trajectories
