"""Trains a predictor on the past: recorded trajectories, or the gateway's own event log.

The model is what the predictor would have learned had it served them, so there is only one way to learn.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from predictor.progress import Predictor, Progress
from predictor.replay import play
from workloads.importers.event_log import group_of, read_events
from workloads.importers.records import Record
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
        TraceError: a line does not belong to an event log or is malformed, or the file is damaged; the message names
            file, line and field.
        OSError: it cannot be read.
    """
    log = _Log(predictor, on_lost)
    for line in read_events(path, on_cut):
        log.take(line)
    return log.num_ended, log.num_partial


class _Log:
    """Follows the trajectories of an event log."""

    def __init__(self, predictor: Predictor, on_lost: Callable[[int], object] | None) -> None:
        self._predictor = predictor
        self._on_lost = on_lost
        self._progress: dict[str, list[Progress]] = {}  # of each trajectory: after 0, 1, 2, ... turns
        self._turns: dict[str, str] = {}
        self._over: set[str] = set()  # until another turn opens them again
        self.num_ended = self.num_partial = 0

    def take(self, line: Record) -> None:
        match line.fields.get("kind"):
            case "start":
                self._began(line.records("records"))
            case "continued":  # an older file comes before
                pass
            case "lost":
                num_lines = line.count("num_lines")
                if self._on_lost is not None:
                    self._on_lost(num_lines)
            case _:
                self._happened(line)

    def _began(self, records: Sequence[Record]) -> None:
        """A process begins, which knows these trajectories and no others. Turns that a killed one logged, and whose
        record it lost, are asked for again.
        """
        num_kept = {record.text("trajectory_id"): record.count("num_turns") for record in records}
        for name in [name for name in self._progress if name not in num_kept]:
            self._forget(name)
        for name, num_turns in num_kept.items():
            if known := self._progress.get(name):
                del known[num_turns + 1 :]

    def _happened(self, line: Record) -> None:
        match line.fields.get("type"):
            case "TurnArrived":
                self._arrived(line)
            case "TurnFinished":
                self._finished(line)
            case "Save":
                self._saved(Record(line.fields.get("record"), f"{line.where}, record"))
            case "Forget":
                self._forget(line.text("trajectory_id"))

    def _arrived(self, line: Record) -> None:
        name, prompt = line.text("trajectory_id"), line.count("prompt_tokens")
        self._turns[line.text("turn_id")] = name
        known = self._progress.setdefault(name, [Progress(name, group_of(line), prompt_tokens=prompt)])
        known[-1] = replace(known[-1], context_tokens=prompt)
        self._predictor.predict(known[-1])

    def _finished(self, line: Record) -> None:
        progress = self._progress.get(self._turns.pop(line.text("turn_id"), ""))
        if progress is None:  # its beginning is in an older file
            return
        known, prompt, made = progress[-1], line.count("prompt_tokens"), line.count("output_tokens")
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

    def _saved(self, record: Record) -> None:
        name, state = record.text("trajectory_id"), record.text("state")
        progress = self._progress.get(name)
        if state == "active":
            self._over.discard(name)
        if state == "active" or progress is None or name in self._over:
            return
        self._over.add(name)
        known = progress[-1]
        counted = record.count("num_turns"), record.count("output_tokens")
        if state == "finished" and counted == (known.num_turns, known.output_tokens):
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
