"""The records of a journal, as they are written; `journal.fold` reads them."""

import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from controller.journal import Json, State
from controller.steps import DesiredServer, Step


def step_record(kind: str, step: Step, at: float, **more: Any) -> Json:
    """The record before (`begun`) or after (`done`) a step."""
    return {"kind": kind, "at": at, "step": type(step).__name__, "server_id": step.server_id, **more}


def wanted_record(wanted: Iterable[DesiredServer], serial: int, at: float, why: str, **more: Any) -> Json:
    """The record of a decision. `more`: see `State`; absent fields stay as they are. A plan's assumed relaunch time,
    `counted_s`, is for people who read the journal."""
    return {
        "kind": "wanted",
        "at": at,
        "why": why,
        "serial": serial,
        "wanted": [asdict(one) for one in wanted],
        **{name: _plain(value) for name, value in more.items()},
    }


def spares_record(spares: Iterable[DesiredServer], **more: Any) -> Json:
    """The record of the servers to keep asleep from now on. `more`: `sleepless`, see `State`."""
    return {"kind": "spares", "spares": [asdict(one) for one in spares], **more}


def new_ids(fleet_id: str, state: State) -> tuple[Callable[[], str], Callable[[], int]]:
    """Returns a source of ids that no server of this fleet ever had, and the serial number to record with them.

    A few random digits keep them apart from those of a journal that was moved away.
    """
    serial = state.serial

    def new_id() -> str:
        nonlocal serial
        serial += 1
        return f"{fleet_id}-{serial}-{os.urandom(2).hex()}"

    return new_id, lambda: serial


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return (
        [asdict(one) if isinstance(one, DesiredServer) else one for one in value] if isinstance(value, list) else value
    )
