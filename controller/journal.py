"""What the controller must know after SIGKILL and cannot observe: a file of records, each on disk before what it
describes.

The fleet itself is observed at the launcher and the gateway. The journal holds the rest: the wanted fleet and the one
before, which engines this controller drained, moved and stopped, which failed, and how long each phase took. Records
are JSON lines. The state is their fold, and nothing else changes it. A torn last line was never acted on.
"""

import errno
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from controller import rollouts
from controller.rollouts import History
from controller.steps import DesiredServer, SleepState

MAX_TIMES_KEPT = 5  # per phase and TP size: the median soon follows a change of disk or model
MAX_FAILURES_KEPT = 20
# Limit of the file. A rollout is recorded with 120 KB, and a start has to read only the state, which takes half of
# that.
_MAX_BYTES = 4 * 2**20

Json = dict[str, Any]
Of = TypeVar("Of")


@dataclass(frozen=True, slots=True)
class Failure:
    """A wanted server or a spare that ended, or never answered."""

    server_id: str
    tp: int
    at: float
    cause: str
    last_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class State:
    """The fold of the records.

    Args:
        fleet: its id; "": the journal is older than this record.
        wanted: the fleet that should be there.
        proven: the last fleet that was reached, without servers given up since; it is restored if another one does not
            start. Empty: there was none.
        earlier: the fleet of another shape that was proven before, likewise; it is restored if nothing is left of
            `proven`.
        is_manual: an operator chose the fleet; plans are made, but not acted on.
        spares: servers that should be there, asleep; none of them is in `wanted`.
        sleepless: why no server may sleep, as an engine reported it; "": they may.
        rest: servers that are not awake: `asleep`, or `between` if one was told to fall asleep or to wake.
        levels: the level at which each server last fell asleep, whatever the file says now.
        resting: devices that an operator took out of use.
        drained: servers whose cordon, if they have one, is not an operator's.
        urls: where servers were registered at the gateway, by server id.
        served_at: when each server first served, since it was launched or woke.
        num_tries: failed starts of a server, including those of the servers it replaced, by server id.
        begun: steps begun and not known to be done, for people.
        phase_s: the last times of each phase and TP size, such as ("start", 2), for engines of `kind`.
        kind: the kind of the measured engines; times of another kind are dropped.
        blocked_tps: sizes that failed to start for good; not planned until an operator scales.
        history: of rollouts.
    """

    fleet: str = ""
    wanted: tuple[DesiredServer, ...] = ()
    proven: tuple[DesiredServer, ...] = ()
    earlier: tuple[DesiredServer, ...] = ()
    spares: tuple[DesiredServer, ...] = ()
    sleepless: str = ""
    rest: dict[str, str] = field(default_factory=dict)
    levels: dict[str, int] = field(default_factory=dict)
    is_manual: bool = False
    why: str = ""
    serial: int = 0
    resting: frozenset[str] = frozenset()
    drained: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()
    stopped: frozenset[str] = frozenset()
    urls: dict[str, str] = field(default_factory=dict)
    served_at: dict[str, float] = field(default_factory=dict)
    num_tries: dict[str, int] = field(default_factory=dict)
    not_before: dict[str, float] = field(default_factory=dict)
    begun: dict[str, str] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    phase_s: dict[tuple[str, int], tuple[float, ...]] = field(default_factory=dict)
    kind: str = ""
    blocked_tps: frozenset[int] = frozenset()
    history: History = field(default_factory=History)
    changed_at: float | None = None


def shape_of(fleet: Sequence[DesiredServer]) -> list[tuple[str, ...]]:
    """The devices of each server, whatever the servers are called."""
    return sorted(one.devices for one in fleet)


def fold(state: State, record: Json) -> State:
    """The state after one more record. Unknown kinds and fields come from a later version and are skipped."""
    match record["kind"]:
        case "state":
            return _loaded(record["state"])
        case "fleet":
            return replace(state, fleet=record["fleet"])
        case "wanted":
            return _wanted(state, record)
        case "proven":
            is_other = shape_of(state.wanted) != shape_of(state.proven)
            return replace(state, proven=state.wanted, earlier=state.proven if is_other else state.earlier)
        case "served":
            served_at = state.served_at | {record["server_id"]: record["at"]}
            return replace(state, served_at=served_at, drained=state.drained - {record["server_id"]})
        case "begun":
            return replace(_begun(state, record), begun=state.begun | {record["server_id"]: record["step"]})
        case "done":
            return replace(_done(state, record), begun=_without(state.begun, {record["server_id"]}))
        case "failed":
            return replace(state, failures=(*state.failures, _failure(record["failure"]))[-MAX_FAILURES_KEPT:])
        case "phase":
            return _measured(state, record)
        case "spares":
            spares = _servers(record["spares"])
            return replace(state, spares=spares, sleepless=record.get("sleepless", state.sleepless))
        case "rollouts":
            return replace(state, history=rollouts.loaded(record["history"]))
        case "blocked":
            devices = tuple(record.get("devices", ()))  # an earlier version did not write them
            proven, earlier = (
                tuple(one for one in fleet if one.devices != devices) for fleet in (state.proven, state.earlier)
            )
            return replace(state, blocked_tps=state.blocked_tps | {record["tp"]}, proven=proven, earlier=earlier)
        case "gone":
            return _gone(state, set(record["server_ids"]))
    return state


def _wanted(state: State, record: Json) -> State:
    """Fields absent from the record stay as they are; a wanted server is no longer a spare."""
    wanted = _servers(record["wanted"])
    spares = _servers(record["spares"]) if "spares" in record else state.spares
    return replace(
        state,
        wanted=wanted,
        spares=tuple(one for one in spares if one.server_id not in {other.server_id for other in wanted}),
        sleepless=record.get("sleepless", state.sleepless),
        serial=record["serial"],
        changed_at=record["at"],
        why=record["why"],
        is_manual=record.get("is_manual", state.is_manual),
        resting=frozenset(record.get("resting", state.resting)),
        blocked_tps=frozenset(record.get("blocked_tps", state.blocked_tps)),
        num_tries=record.get("num_tries", state.num_tries),
        not_before=record.get("not_before", state.not_before),
    )


def _measured(state: State, record: Json) -> State:
    kind, key = record.get("engine_kind", state.kind), (record["phase"], record["tp"])
    phase_s = state.phase_s if kind == state.kind else {}
    times = (*phase_s.get(key, ()), record["seconds"])[-MAX_TIMES_KEPT:]
    return replace(state, kind=kind, phase_s=phase_s | {key: times})


def _begun(state: State, record: Json) -> State:
    """A drain counts from its beginning: it may have happened even though its end was never recorded.

    A server that is registered for the first time counts as drained, too: if it comes cordoned, that is an earlier
    drain of its address, which the gateway remembers if it was restarted before it was told to forget the engine.
    """
    server_id = record["server_id"]
    match record["step"]:
        case "Drain":
            return replace(state, drained=state.drained | {server_id}, moved=state.moved - {server_id})
        case "Register":
            drained = state.drained if server_id in state.urls else state.drained | {server_id}
            return replace(state, urls=state.urls | {server_id: record["url"]}, drained=drained)
        case "Sleep":
            levels = state.levels | {server_id: record["level"]}
            rest, served_at = state.rest | {server_id: SleepState.BETWEEN.value}, _without(state.served_at, {server_id})
            return replace(state, rest=rest, levels=levels, served_at=served_at)
        case "Wake":
            return replace(state, rest=state.rest | {server_id: SleepState.BETWEEN.value})
    return state


def _done(state: State, record: Json) -> State:
    server_id = record["server_id"]
    match record["step"]:
        case "Reopen":
            return replace(state, drained=state.drained - {server_id}, moved=state.moved - {server_id})
        case "MoveKv":
            return replace(state, moved=state.moved | {server_id})
        case "Stop":
            return replace(state, stopped=state.stopped | {server_id})
        case "Sleep":
            return replace(state, rest=state.rest | {server_id: SleepState.ASLEEP.value})
        case "Wake":
            return replace(state, rest=_without(state.rest, {server_id}))
        case "Remove":
            drained, moved = state.drained - {server_id}, state.moved - {server_id}
            return replace(state, urls=_without(state.urls, {server_id}), drained=drained, moved=moved)
    return state


def _gone(state: State, server_ids: set[str]) -> State:
    """Servers that are neither wanted nor seen anywhere: nothing about them matters any more."""
    return replace(
        state,
        drained=state.drained - server_ids,
        moved=state.moved - server_ids,
        stopped=state.stopped - server_ids,
        rest=_without(state.rest, server_ids),
        levels=_without(state.levels, server_ids),
        urls=_without(state.urls, server_ids),
        served_at=_without(state.served_at, server_ids),
        begun=_without(state.begun, server_ids),
    )


def _without(of: dict[str, Of], server_ids: set[str]) -> dict[str, Of]:
    return {server_id: value for server_id, value in of.items() if server_id not in server_ids}


def _failure(one: Json) -> Failure:
    return Failure(one["server_id"], one["tp"], one["at"], one["cause"], tuple(one["last_lines"]))


def _servers(items: Iterable[Json]) -> tuple[DesiredServer, ...]:
    return tuple(DesiredServer(one["server_id"], one["tp"], tuple(one["devices"])) for one in items)


class JournalAway(Exception):
    """The journal cannot be written: nothing may be changed until it can."""


class Journal:
    """The records of one fleet, and their fold.

    Args:
        path: the file; its folder is created. Only the holder of the fleet's lease may open it.

    Attributes:
        is_away: the last record could not be written.

    Raises:
        ValueError: the file is damaged before its last line, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_away = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self.state = read_state(path)
        written = path.read_bytes() if path.exists() else b""
        # A torn last line is dropped: the file is rewritten without it.
        self._file = self._begun_anew(written[: written.rfind(b"\n") + 1])
        self._shorten()

    def write(self, **record: Any) -> State:
        """Write a record to disk; once this returns, the record survives a power cut. Returns the state after it.

        Raises:
            JournalAway: the disk is full or broken. The record is not in the file, nor will it ever be.
        """
        try:
            self._shorten()
            self._append(_line(record))
        except OSError as fault:
            self.is_away = True
            raise JournalAway(f"{self._path} cannot be written: {fault.strerror}") from fault
        self.is_away = False
        self.state = fold(self.state, record)
        return self.state

    def close(self) -> None:
        self._file.close()

    def _shorten(self) -> None:
        """If the file has grown too large, replace the records by the state. Raises OSError: nothing may be appended
        until this succeeds, because another file may have the path by then.
        """
        if self._file.tell() > _MAX_BYTES:
            anew = self._begun_anew(_line({"kind": "state", "state": dumped(self.state)}))
            self._file.close()
            self._file = anew

    def _append(self, line: bytes) -> None:
        """Raises OSError; the file is then as it was."""
        size = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(size)
            raise

    def _begun_anew(self, written: bytes) -> FileIO:
        """Replace the content of the file by `written`: all of it, or nothing if the machine dies meanwhile."""
        draft = self._path.with_suffix(".draft")
        with draft.open("wb") as file:
            file.write(written)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return self._path.open("ab", buffering=0)  # a buffer would keep what could not be written, and write it later


def read_state(path: Path) -> State:
    """The state in a journal, whichever process writes it. Raises ValueError: see `Journal`."""
    state = State()
    try:
        *lines, _torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return state
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            state = fold(state, json.loads(line))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(f"{path}, line {number}, is damaged; move the file away to start empty") from None
    return state


def check_owner(state: State, fleet_id: str, state_dir: Path) -> None:
    """Raises ValueError if the journal in this folder is another fleet's, whose engines nobody would look after."""
    if state.fleet not in ("", fleet_id):
        raise ValueError(f"state_dir {state_dir} is that of fleet {state.fleet}; give fleet {fleet_id} one of its own")


def dumped(state: State) -> Json:
    """The state as JSON, for the first record of a file."""
    written = asdict(state)
    written["phase_s"] = [[phase, tp, times] for (phase, tp), times in state.phase_s.items()]
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in written.items()}


def _loaded(written: Json) -> State:
    sets = ("resting", "drained", "moved", "stopped", "blocked_tps")
    return State(
        **{
            **{one.name: written[one.name] for one in fields(State) if one.name in written},
            **{name: frozenset(written[name]) for name in sets},
            "history": rollouts.loaded(written["history"]) if "history" in written else History(),
            **{name: _servers(written.get(name, ())) for name in ("wanted", "proven", "earlier", "spares")},
            "failures": tuple(map(_failure, written["failures"])),
            "phase_s": {(phase, tp): tuple(times) for phase, tp, times in written["phase_s"]},
        }
    )


def _line(record: Json) -> bytes:
    return json.dumps(record).encode() + b"\n"
