"""Heddle's own event log, which a gateway (`event_log`) and `heddle simulate --log` write.

    {"at": 3.5, "kind": "event", "type": "TurnArrived", "turn_id": "a", "trajectory_id": "t", "group_id": "g", ...}
    {"at": 9.0, "kind": "event", "type": "TurnFinished", "turn_id": "a", "prompt_tokens": 900, "output_tokens": 9, ...}
    {"at": 9.0, "kind": "action", "type": "Save", "record": {"trajectory_id": "t", "num_turns": 1, ...}}

A trajectory is a session. One that began in an older file is left out: its record counts more turns than the log has.
One that was aborted (its record's `state`) is left out too, as by `heddle predictor train`: nobody knows how it would
have gone on. One that still runs at the log's end is cut there, and a last line that is cut off is left out. Turns that
a killed gateway logged, and whose record it lost, are left out: its clients asked for them again. The next process
tells in its first line which turns it knows. Once the gateway has forgotten a trajectory, or a process begins that does
not know it (its store is another, or did not survive), its id may be another's.

    {"at": 12.0, "kind": "start", "records": [{"trajectory_id": "t", "num_turns": 1, ...}], ...}

A saved `/v1/events` has the same lines, and one more where its reader fell behind. Trajectories that lack turns there
are left out, and those of which no line comes later end there.

    {"kind": "lost", "num_lines": 120}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workloads.importers.calls import Call, workload_of_sessions
from workloads.importers.records import Record
from workloads.traces import TraceError, json_lines
from workloads.trajectories import Workload

# A client may ask for the next turn before the gateway has noted the end of the last one; this is ample.
_NOTED_LATE_S = 1.0


@dataclass(slots=True)
class _Session:
    """What a log tells of a trajectory until the gateway forgets it; num_turns: as its record counts them."""

    trajectory_id: str
    group_id: str = ""
    num_turns: int = 0
    is_aborted: bool = False
    calls: list[Call] = field(default_factory=list)


@dataclass(slots=True)
class _Clock:
    """When a log's lines were written. If the machine's clock was set back before a process began, time goes on from
    where the last process left it."""

    latest_s: float = 0.0
    set_back_s: float = 0.0

    def note(self, line: Record) -> None:
        """Take the next line."""
        if line.has("at"):
            if line.fields.get("kind") == "start":
                self.set_back_s += max(0.0, self.latest_s - self.at_s(line))
            self.latest_s = max(self.latest_s, self.at_s(line))

    def at_s(self, line: Record) -> float:
        """When this line, the last that was noted, was written."""
        return line.number("at") + self.set_back_s


def is_event(fields: dict[str, Any]) -> bool:
    """Whether an object is a line of an event log."""
    kind = fields.get("kind")
    return kind in ("start", "continued", "lost") or (kind in ("event", "action") and "type" in fields)


def read_events(path: Path, on_cut: Callable[[int], object] | None = None) -> Iterator[Record]:
    """The lines of a log, gzipped or not, or of a saved `/v1/events`.

    Args:
        on_cut: Called with the number of the last line if that is cut off. None: that is an error.

    Raises:
        TraceError: While it is read, if a line does not belong to an event log, or the file is damaged; the message
            names file and line.
        OSError: If the file cannot be read.
    """
    for number, _, fields in json_lines(path, on_cut):
        where = f"{path}, line {number}"
        if not is_event(fields):
            of_what = " but of a trace, which --trace takes" if "turns" in fields else ""
            raise TraceError(f"{where}: not a line of an event log{of_what}")
        yield Record(fields, where)


def read_event_log(path: Path) -> Workload:
    """The workload of a log.

    Raises:
        TraceError: If a line is malformed; the message names the line and the field. If no trajectory began in the log
            and went on unaborted.
        OSError: If the file cannot be read.
    """
    cut: list[int] = []
    sessions, num_lost = _read(path, cut)
    begun = [session for session in sessions if session.calls or session.num_turns]
    whole = [session for session in begun if not session.is_aborted and len(session.calls) == session.num_turns]
    num_aborted = sum(session.is_aborted for session in begun)
    num_partial = len(begun) - num_aborted - len(whole)
    lacks = "lack turns" if num_lost else "began in an older file, whose lines must come before it"
    if begun and not whole:
        behind = ": whoever saved it fell behind the gateway" if num_lost else ""
        are = ["were aborted"] * (num_aborted > 0) + [lacks + behind] * (num_partial > 0)
        raise TraceError(f"{path}: all trajectories in it {' or '.join(are)}")
    for session in whole:  # they are logged when they end
        session.calls.sort(key=lambda call: call.started_at_s or 0.0)
    calls_of = ((session.trajectory_id, session.calls) for session in whole)
    workload = workload_of_sessions(path.name.split(".")[0], calls_of, (session.group_id for session in whole))
    left_out = [f"line {number:,}, the last, which is cut off" for number in cut]
    if num_lost:
        left_out.append(f"lines that were lost where whoever saved it fell behind the gateway: {num_lost:,}")
    if num_aborted:
        left_out.append(f"trajectories that were aborted: {num_aborted:,}")
    if num_partial:
        left_out.append(f"trajectories that {lacks}: {num_partial:,}")
    return replace(workload, left_out="; ".join(left_out))


def group_of(arrived: Record) -> str:
    """The group of a turn that arrived; empty if it is unknown."""
    return arrived.text("group_id") if arrived.fields.get("group_id") else ""


def _read(path: Path, cut: list[int]) -> tuple[list[_Session], int]:
    """The sessions of a log, those that the gateway has forgotten first, and how many lines were lost.

    Args:
        cut: gets the number of the last line if that is cut off.
    """
    arrivals: dict[str, tuple[str, float]] = {}
    sessions: dict[str, _Session] = {}
    forgotten: list[_Session] = []
    clock = _Clock()
    num_lost = 0
    for record in read_events(path, cut.append):
        clock.note(record)
        match record.fields.get("type"):
            case "TurnArrived":
                trajectory_id = record.text("trajectory_id")
                arrivals[record.text("turn_id")] = trajectory_id, clock.at_s(record)
                if group_id := group_of(record):
                    _session(sessions, trajectory_id).group_id = group_id
            case "TurnFinished":
                arrival = arrivals.pop(record.text("turn_id"), None)
                if arrival is not None:
                    _session(sessions, arrival[0]).calls.append(_call(record, arrival[1], clock.at_s(record)))
            case "Save":
                saved = Record(record.fields.get("record"), f"{record.where}, record")
                session = _session(sessions, saved.text("trajectory_id"))
                session.num_turns = saved.count("num_turns")
                session.is_aborted = saved.fields.get("state") == "aborted"
            case "Forget":
                if (gone := sessions.pop(record.text("trajectory_id"), None)) is not None:
                    forgotten.append(gone)
            case None if record.fields.get("kind") == "start":
                num_kept = {kept.text("trajectory_id"): kept.count("num_turns") for kept in record.records("records")}
                forgotten += [sessions.pop(name) for name in list(sessions) if name not in num_kept]
                for name, known in sessions.items():
                    known.num_turns = num_kept[name]
                    del known.calls[known.num_turns :]
            case None if record.fields.get("kind") == "lost":
                num_lost += record.count("num_lines")
    return [*forgotten, *sessions.values()], num_lost


def _session(sessions: dict[str, _Session], trajectory_id: str) -> _Session:
    if trajectory_id not in sessions:
        sessions[trajectory_id] = _Session(trajectory_id)
    return sessions[trajectory_id]


def _call(finished: Record, started_at_s: float, ended_at_s: float) -> Call:
    return Call(
        prompt_tokens=finished.count("prompt_tokens"),
        output_tokens=finished.count("output_tokens"),
        started_at_s=started_at_s,
        ended_at_s=ended_at_s,
        early_s=_NOTED_LATE_S,
    )
