"""Gives one engine weights, step by step; and what a new process must do before its first turn."""

import time
from dataclasses import asdict, dataclass
from typing import Any

from engines.dialect import ObservationError
from engines.weights import WEIGHTS, NewWeights, WeightsError
from gateway.config import Settings
from gateway.fleet.known_processes import KnownProcesses
from gateway.fleet.server import Server
from gateway.weights.record import WeightRecord


@dataclass(slots=True)
class UpdateProgress:
    """How far an engine is with an update.

    Args:
        state: waiting, pausing, loading, resuming, done, failed; absent: it could not be asked, and takes the weights
            when it is back; untouched: it was spared, because the first engine refused them.
        load_s: how long loading took.
        paused_s: how long it made no tokens.
    """

    state: str = "waiting"
    error: str | None = None
    load_s: float | None = None
    paused_s: float | None = None

    def view(self) -> dict[str, Any]:
        """As the API shows it."""
        return asdict(self)


async def give_weights(
    server: Server, weights: NewWeights, number: int, settings: Settings, progress: UpdateProgress
) -> None:
    """Pause, load, resume. Raises WeightsError, whose step tells what is known of the weights; safe to repeat."""
    assert server.dialect is not None
    control, http = WEIGHTS[server.dialect.kind], server.http
    progress.state, began_at = "pausing", time.perf_counter()
    try:
        await control.pause(http, weights.mode, settings.weight_pause_timeout_s)
    except WeightsError:  # it may be paused all the same, and can go on with its old weights
        await control.resume(http, settings.weight_pause_timeout_s)
        raise
    progress.state, paused_at = "loading", time.perf_counter()
    await control.load(http, weights, settings.weight_load_timeout_s)
    progress.load_s = time.perf_counter() - paused_at
    server.took(weights.version, number)
    progress.state = "resuming"
    await control.resume(http, settings.weight_pause_timeout_s)
    progress.paused_s = time.perf_counter() - began_at
    progress.state, server.held, server.is_in_doubt = "done", "", False


async def join(server: Server, record: WeightRecord, known: KnownProcesses, settings: Settings) -> None:
    """Bring a new process to the fleet's weights, or hold it with the reason. Raises ObservationError."""
    assert server.dialect is not None
    if record.is_fenced:
        raise ObservationError("another gateway has taken over, and gives it its weights")
    control = WEIGHTS[server.dialect.kind]
    try:
        told = await control.version(server.http, settings.observe_timeout_s)
    except WeightsError as error:
        if record.current is not None:
            raise ObservationError(str(error)) from None
        told = None
    server.held = ""
    server.versions.clear()
    if told is not None:
        server.took(told, record.number(told))
    while (wanted := record.current) is not None:
        server.held = await _brought_to(server, wanted, record, known, settings)
        if not server.held:
            record.took(wanted.version)
        if record.current is wanted:  # it may have changed in all that time
            return
    if server.weight_version != (told or ""):  # it took a first version, which was taken back
        server.is_in_doubt = True
    server.held = _IN_DOUBT if server.is_in_doubt else ""


_IN_DOUBT = "an update to its weights failed, and no version was set before: send one, or restart the engine"


async def _brought_to(
    server: Server, wanted: NewWeights, record: WeightRecord, known: KnownProcesses, settings: Settings
) -> str:
    """Why it could not be brought to the weights; "" if it was."""
    assert server.dialect is not None
    has = server.weight_version
    try:
        if has == wanted.version and not server.is_in_doubt:
            if record.is_unfinished:  # the gateway may have died between its pause and its resume
                await WEIGHTS[server.dialect.kind].resume(server.http, settings.weight_pause_timeout_s)
        elif not has:
            return f"it does not tell its weights, and the fleet's are {wanted.version!r}"
        elif wanted.path is None:
            return f"it has weights {has!r}; {wanted.version!r} came by transfer: send them again"
        else:
            server.is_in_doubt = True
            known.note(server)  # the gateway may die before its resume
            await give_weights(server, wanted, record.number(wanted.version), settings, UpdateProgress())
    except WeightsError as error:
        return f"it could not take weights {wanted.version!r}: {error}"
    return ""
