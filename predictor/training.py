"""Trains a predictor on the past: recorded trajectories, or the gateway's own event log.

The model is what the predictor would have learned had it served them, so there is only one way to learn.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from predictor.progress import Predictor, Progress
from predictor.replay import play
from workloads.traces import json_lines, shown
from workloads.trajectories import Trajectory


def learn_trajectories(predictor: Predictor, trajectories: Sequence[Trajectory]) -> int:
    """Play trajectories that all start at once to the predictor. Returns their number."""
    for _ in play(
        trajectories, predictor, lambda progress: (predictor.predict(progress).total_tokens, None), "together"
    ):
        pass
    return len(trajectories)


def learn_events(
    predictor: Predictor,
    path: Path,
    on_cut: Callable[[int], object] | None = None,
    on_lost: Callable[[int], object] | None = None,
) -> tuple[int, int]:
    """Play a gateway's event log, or a saved `/v1/events`, gzipped or not, to the predictor.

    Args:
        on_cut: called with the number of the last line if that is cut off, and skipped. None: that is an error.
        on_lost: called with the number of lines that are missing where a reader of `/v1/events` fell behind.

    Returns:
        How many trajectories it learned from; and how many it skipped because not all their turns are in the log, which
        a rotation may have begun in the midst of them, or whose lines were lost.

    Raises:
        ValueError: a line does not belong to an event log, or the file is damaged; the message names file and line.
        OSError: it cannot be read.
    """
    log = _Log(predictor, on_lost)
    for number, _, said in json_lines(path, on_cut):
        try:
            log.take(said)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path}, line {number}: {_fault(said, error)}") from None
    return log.num_ended, log.num_partial


def _fault(said: dict[str, Any], error: Exception) -> str:
    """What is wrong with a line that could not be taken."""
    if "turns" in said:
        return "not a line of an event log but of a trace, which --trace takes"
    return f"not a line of an event log: {f'it lacks {error}' if isinstance(error, KeyError) else error}"


class _Log:
    """Follows the trajectories of an event log."""

    def __init__(self, predictor: Predictor, on_lost: Callable[[int], object] | None) -> None:
        self._predictor = predictor
        self._on_lost = on_lost
        self._progress: dict[str, list[Progress]] = {}  # of each trajectory: after 0, 1, 2, ... turns
        self._turns: dict[str, str] = {}
        self._over: set[str] = set()  # until another turn opens them again
        self.num_ended = self.num_partial = 0

    def take(self, line: dict[str, Any]) -> None:
        match line.get("kind"):
            case "start":
                self._began(line.get("records", []))
            case "continued":  # an older file comes before
                pass
            case "lost":
                num_lines = _count(line, "num_lines")
                if self._on_lost is not None:
                    self._on_lost(num_lines)
            case _:
                self._happened(line)

    def _began(self, records: Sequence[dict[str, Any]]) -> None:
        """A process begins, which knows these trajectories and no others. Turns that a killed one logged, and whose
        record it lost, are asked for again.
        """
        num_kept = {str(record["trajectory_id"]): _count(record, "num_turns") for record in records}
        for name in [name for name in self._progress if name not in num_kept]:
            self._forget(name)
        for name, num_turns in num_kept.items():
            if known := self._progress.get(name):
                del known[num_turns + 1 :]

    def _happened(self, line: dict[str, Any]) -> None:
        match line["type"]:
            case "TurnArrived":
                self._arrived(line)
            case "TurnFinished":
                self._finished(line)
            case "Save":
                self._saved(line["record"])
            case "Forget":
                self._forget(line["trajectory_id"])

    def _arrived(self, line: dict[str, Any]) -> None:
        name, prompt = str(line["trajectory_id"]), _count(line, "prompt_tokens")
        self._turns[str(line["turn_id"])] = name
        known = self._progress.setdefault(name, [Progress(name, str(line["group_id"]), prompt_tokens=prompt)])
        known[-1] = replace(known[-1], context_tokens=prompt)
        self._predictor.predict(known[-1])

    def _finished(self, line: dict[str, Any]) -> None:
        progress = self._progress.get(self._turns.pop(str(line["turn_id"]), ""))
        if progress is None:  # its beginning is in an older file
            return
        known, prompt, made = progress[-1], _count(line, "prompt_tokens"), _count(line, "output_tokens")
        progress.append(
            replace(
                known,
                prompt_tokens=known.prompt_tokens if known.num_turns else prompt,
                context_tokens=prompt + made,
                output_tokens=known.output_tokens + made,
                last_output_tokens=made,
                num_turns=known.num_turns + 1,
            )
        )

    def _saved(self, record: dict[str, Any]) -> None:
        name, state = str(record["trajectory_id"]), record["state"]
        progress = self._progress.get(name)
        if state == "active":
            self._over.discard(name)
        if state == "active" or progress is None or name in self._over:
            return
        self._over.add(name)
        known = progress[-1]
        is_whole = (known.num_turns, known.output_tokens) == (record["num_turns"], record["output_tokens"])
        if state == "finished" and is_whole:
            self._predictor.ended(known)
            self.num_ended += 1
            return
        self._predictor.dropped(name)
        if state == "finished":
            self.num_partial += 1

    def _forget(self, name: str) -> None:
        """Its id may be another's from here on."""
        self._progress.pop(name, None)
        self._over.discard(name)
        self._predictor.dropped(name)


def _count(line: dict[str, Any], name: str) -> int:
    value = line[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}: must be a whole number from 0, not {shown(value)}")
    return int(value)
