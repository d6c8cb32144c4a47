"""Plays a scheduler's log again: the same events must lead to the same actions, byte for byte.

A log is what the gateway's event log and `heddle simulate --log` write: a JSON line for each event,
`{"at", "kind": "event", "type", ...fields}`, followed by a line of kind `action` for each action. A line
`{"kind": "start", "policy", "limits", "can_preempt", "records"}` at the head tells how the scheduler was made; each
further one means that a new process made a new scheduler. Without such a line, the log must begin with an empty
scheduler, and the caller names its policy. After a line of kind `continued`, with which a gateway begins the file after
a full one, lines are skipped until a process starts, unless the full file's lines come before it. A line of kind
`lost`, in a saved `/v1/events` whose reader fell behind, ends the replay with an error. Lines of other kinds are
skipped, and a last line that is cut off. The file may be gzipped.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, get_args

import orjson

from scheduling.limits import Limits
from scheduling.logged import logged
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.types import Action, Event, TrajectoryRecord
from simulator.runs import policy_named
from simulator.tables import from_table
from workloads.traces import json_lines

_EVENTS = {kind.__name__: kind for kind in get_args(Event)}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first line at which a replay decides differently; None means no further action."""

    line_number: int
    event: bytes
    recorded: bytes | None
    replayed: bytes | None


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay: how much agreed before the difference, if there is one.

    Args:
        cut_line: the number of the last line, if it is cut off. It was not played.
    """

    num_events: int
    num_actions: int
    difference: Difference | None
    cut_line: int | None = None


@dataclass(frozen=True, slots=True)
class _Start:
    """How a scheduler was made."""

    at: float
    policy: str
    can_preempt: bool
    limits: Limits = field(default_factory=Limits)
    records: tuple[TrajectoryRecord, ...] = ()


class LogWriter:
    """Writes a rollout's log; passed to a `Rollout` as its `log`."""

    def __init__(self, path: Path, policy: Policy, limits: Limits) -> None:
        self._file: BinaryIO = path.open("wb")
        start = {"at": 0.0, "kind": "start", "policy": policy.name, "limits": asdict(limits), "can_preempt": True}
        self._file.write(orjson.dumps(start, option=orjson.OPT_APPEND_NEWLINE))

    def __enter__(self) -> "LogWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __call__(self, event: Event, actions: list[Action]) -> None:
        """Write an event and the actions that followed."""
        self._file.write(log_line(event.at, "event", event))
        self._file.writelines(log_line(event.at, "action", action) for action in actions)


def log_line(at: float, kind: str, said: Event | Action) -> bytes:
    """The line of an event or an action."""
    return orjson.dumps(logged(at, kind, said), default=sorted, option=orjson.OPT_APPEND_NEWLINE)


def replay(path: Path, policy_name: str | None = None) -> Replayed:
    """Plays a log again until it ends or something differs.

    Args:
        policy_name: the policy of the log, needed if the log does not name it. None: the default policy.

    Raises:
        ValueError: a line is malformed, or has a number for which nothing can be decided, the file is damaged, there is
            no event, or no such policy, or the log names another.
        OSError: the file cannot be read.
    """
    replayed = _replay(path, policy_name)
    if not replayed.num_events:
        raise ValueError(f"{path}: no event in it")
    return replayed


def _replay(path: Path, policy_name: str | None) -> Replayed:
    scheduler: Scheduler | None = None
    due: list[bytes] = []
    event_line = b""
    num_events = num_actions = number = 0
    is_without_beginning = False
    cut: list[int] = []
    for number, line, said in json_lines(path, on_cut=cut.append):
        match said.get("kind"):
            case "continued":
                is_without_beginning = scheduler is None
            case "lost":
                raise ValueError(
                    f"{path}, line {number}: lines were lost here, where whoever saved it fell behind the gateway; "
                    "a replay needs all of them, as the gateway's event_log has them"
                )
            case "start":
                is_without_beginning = False
                due = []  # a process that was killed may not have written all of its last actions
                scheduler = _started(said, f"{path}, line {number}: ", policy_name)
            case "event" | "action" if is_without_beginning:
                pass
            case "event":
                if due:
                    return Replayed(num_events, num_actions, Difference(number, event_line, None, due[0]))
                event = _event(said, f"{path}, line {number}: ")
                if scheduler is None:
                    scheduler = Scheduler(policy_named(policy_name or "heddle"), Limits(), at=event.at)
                event_line, num_events = line, num_events + 1
                try:
                    due = [log_line(event.at, "action", action) for action in scheduler.handle(event)]
                except (ArithmeticError, orjson.JSONEncodeError) as error:
                    raise ValueError(
                        f"{path}, line {number}: a number there, or in an earlier line, is out of range: {error}"
                    ) from error
            case "action":
                if not event_line:
                    raise ValueError(
                        f"{path}, line {number}: an action before any event: the log's beginning is missing"
                    )
                if not due or due[0] != line:
                    return Replayed(
                        num_events, num_actions, Difference(number, event_line, line, due[0] if due else None)
                    )
                num_actions += 1
                due.pop(0)
    if is_without_beginning:
        raise ValueError(f"{path}: it continues an older file, whose lines must come before it")
    if cut:  # what is due was there, or comes after
        return Replayed(num_events, num_actions, None, cut[0])
    difference = Difference(number + 1, event_line, None, due[0]) if due else None
    return Replayed(num_events, num_actions, difference)


def _started(said: dict[str, Any], where: str, policy_name: str | None) -> Scheduler:
    missing = [name for name in ("at", "policy", "can_preempt") if name not in said]
    if missing:
        raise ValueError(f"{where}the line of kind start lacks {missing[0]!r}")
    start = from_table(_Start, {name: said[name] for name in _Start.__dataclass_fields__ if name in said}, where)
    try:
        policy = policy_named(start.policy)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from error
    if policy_name not in (None, start.policy):
        raise ValueError(f"{where}the log's policy is {start.policy}, and a replay can have no other")
    return Scheduler(policy, start.limits, start.records, start.at, can_preempt=start.can_preempt)


def _event(said: dict[str, Any], where: str) -> Event:
    kind = _EVENTS.get(str(said.get("type")))
    if kind is None:
        raise ValueError(f"{where}no event is called {said.get('type')!r}")
    fields = {name: value for name, value in said.items() if name not in ("kind", "type")}
    event: Event = from_table(kind, fields, where)
    return event
