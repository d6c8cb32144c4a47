"""`heddle predictor`: trains a predictor on past trajectories, and shows how good predictors are."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from heddle.arguments import Help, count, out_file, seed, why
from predictor.evaluation import MIN_TRAJECTORIES, Row, Split, evaluate, folds, markdown
from predictor.named import PREDICTORS, predictor_named
from predictor.replay import Arrival
from predictor.text import read_examples
from predictor.text_trial import try_text
from predictor.training import learn_events, learn_trajectories
from workloads.laws import draw, law_named
from workloads.result_files import write_whole
from workloads.traces import load_trace
from workloads.trajectories import Trajectory

_TRAINED = """examples:
  heddle predictor train --events events.jsonl --out model
  heddle predictor train --trace trace.jsonl.gz --law coding --out model
  heddle serve --config heddle.toml     # with predictor_model = "model" in it
  heddle predictor train --text conversations.jsonl --out text.pt     # does reading conversations pay?

--text takes JSON lines, one for each turn of a conversation that has ended, and needs torch (the extra `text`):
  {"group_id": "a", "messages": [...], "num_turns": 3, "output_tokens": 812, "total_tokens": 4100}
messages: the turn's request (or "text"); output_tokens: generated before it; base_tokens (optional): the total that
another predictor gave. The model is kept only if it beats the tabular predictor on other groups.
"""
_EVALUATED = """examples:
  heddle predictor evaluate --law coding --law math-heavy
  heddle predictor evaluate --trace trace.jsonl.gz --arrival chained --markdown
"""

_ROTATED = "whose first turns are not in it; if the log was rotated, the older file's lines must come before it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of both verbs."""
    parser.epilog = "`heddle predictor VERB --help` has examples."
    verbs = parser.add_subparsers(dest="deed", required=True, metavar="VERB")
    train = _verb(verbs, "train", "learn from traces, laws and event logs, in this order", _TRAINED)
    train.add_argument("--events", action="append", default=[], type=Path, metavar="FILE", help="a gateway's event log")
    train.add_argument(
        "--text",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="conversations, to train a text predictor",
    )
    train.add_argument("--out", required=True, type=out_file, metavar="MODEL", help="model to write")
    train.add_argument("--predictor", choices=tuple(PREDICTORS), default="tabular", help="default: %(default)s")
    evaluated = _verb(verbs, "evaluate", "compare predictors with each other and with single features", _EVALUATED)
    evaluated.add_argument("--predictor", action="append", choices=tuple(PREDICTORS), help="default: all")
    evaluated.add_argument(
        "--arrival",
        choices=("together", "chained"),
        default="together",
        help="all trajectories start together, or each sibling when the previous one has ended",
    )
    evaluated.add_argument("--folds", type=_folds, default=5, help="of a trace, split by group (default: 5)")
    evaluated.add_argument("--cold", action="store_true", help="learn from no earlier rollout")
    evaluated.add_argument("--markdown", action="store_true", help="leave out terminal-only output")
    for one in (train, evaluated):
        one.add_argument(
            "--trace",
            action="append",
            default=[],
            type=Path,
            metavar="FILE",
            help="JSON lines of trajectories, .gz or not",
        )
        one.add_argument("--law", action="append", default=[], metavar="LAW", help="coding, search, math-heavy, ...")
        one.add_argument(
            "--trajectories",
            type=count,
            default=1_600,
            metavar="N",
            help="number drawn from a law (default: %(default)s)",
        )
        one.add_argument("--seed", type=seed, default=1, help="seed of the draw (default: %(default)s)")


def run(parsed: argparse.Namespace) -> int:
    """Train or evaluate."""
    try:
        if parsed.deed == "evaluate":
            return _evaluate(parsed)
        return _train_text(parsed) if parsed.text else _train(parsed)
    except ImportError:
        print("heddle predictor train: torch is not installed: pip install torch", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"heddle predictor {parsed.deed}: {why(error)}", file=sys.stderr)
        return 2


def _verb(verbs: Any, name: str, text: str, epilog: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=f"{text.capitalize()}.",
        epilog=epilog,
        formatter_class=Help,
    )
    return verb


def _folds(text: str) -> int:
    if count(text) < 2:
        raise argparse.ArgumentTypeError("must be at least 2: one to test on, the others to learn from")
    return int(text)


def _train(parsed: argparse.Namespace) -> int:
    predictor = predictor_named(parsed.predictor)
    num = sum(learn_trajectories(predictor, load_trace(path).trajectories) for path in parsed.trace)
    num += sum(learn_trajectories(predictor, _drawn(parsed, law, parsed.seed)) for law in parsed.law)
    for path in parsed.events:
        cut: list[int] = []
        lost: list[int] = []
        num_ended, num_partial = learn_events(predictor, path, cut.append, lost.append)
        num += num_ended
        for number in cut:
            print(f"{path}, line {number}, the last, is cut off and was skipped.")
        if lost:
            print(f"{path}: {sum(lost):,} lines were lost where whoever saved it fell behind the gateway.")
        if num_partial:
            reason = "that lack turns" if lost else _ROTATED
            print(f"{path}: skipped {num_partial:,} trajectories {reason}")
    if not num:
        raise ValueError("nothing to learn from: no trajectory that began and ended in --trace, --law or --events")
    write_whole(parsed.out, predictor.dump())
    print(f"{parsed.out}: a {parsed.predictor} predictor trained on {num:,} trajectories")
    return 0


def _train_text(parsed: argparse.Namespace) -> int:
    """Train on conversations; 1 if the result is not worth having."""
    if parsed.events or parsed.trace or parsed.law:
        raise ValueError("--text cannot be combined with --events, --trace or --law")
    examples = [example for path in parsed.text for example in read_examples(path)]
    report, choice = try_text(examples, parsed.out, seed=parsed.seed)
    print(
        f"{report.num_examples + report.num_held_out:,} turns learned from in {report.took_s:.0f} s.\n"
        f"On other groups, beside the tabular predictor: log-Pearson {choice.gain:+.2f} (97.5 % of draws: above "
        f"{choice.gain_low:+.2f}), recall of the longest 20 % {choice.recall_gain:+.2f}"
    )
    if not choice.takes_challenger:
        print("Not worth having: no model is written, and the tabular predictor stays.")
        return 1
    print(f"{parsed.out}: a text predictor")
    return 0


def _evaluate(parsed: argparse.Namespace) -> int:
    sources: list[tuple[str, list[Split]]] = [
        (path.name, folds(load_trace(path).trajectories, parsed.folds)) for path in parsed.trace
    ]
    # For a law, another seed's draw is learned first, like an earlier rollout.
    sources += [
        (law, [(_drawn(parsed, law, parsed.seed + 1_000), _drawn(parsed, law, parsed.seed))]) for law in parsed.law
    ]
    if not sources:
        raise ValueError("give --trace or --law")
    for name, splits in sources:
        if sum(len(asked) for _, asked in splits) < MIN_TRAJECTORIES:
            raise ValueError(f"{name}: fewer than {MIN_TRAJECTORIES} trajectories, too few to compare predictors")
        if parsed.cold:
            splits = [((), asked) for _, asked in splits]
        elif not all(before for before, _ in splits):
            raise ValueError(
                f"{name}: all trajectories are of one group, so there is no other to learn from; give --cold"
            )
        rows = _with_progress(splits, parsed.arrival, parsed.predictor or tuple(PREDICTORS))
        learned = "nothing learned before" if parsed.cold else "other groups learned before"
        print(f"### {name}: {parsed.arrival}, {learned}\n\n{markdown(rows)}")
        if not parsed.markdown:
            print("Single features are in *italics*; 'of remaining' is the log-Pearson of the tokens still to come.\n")
    return 0


def _with_progress(splits: list[Split], arrival: Arrival, names: Sequence[str]) -> list[Row]:
    """The rows, and on a terminal a bar until they are there: thousands of trajectories take a minute."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def begin(name: str, num_before: int, num: int) -> None:
            progress.update(task, description=name, completed=num_before, total=num)

        return evaluate(splits, arrival, names, begin)


def _drawn(parsed: argparse.Namespace, law: str, seed: int) -> tuple[Trajectory, ...]:
    return draw(law_named(law), parsed.trajectories, seed).trajectories
