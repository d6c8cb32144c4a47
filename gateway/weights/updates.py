"""Gives new weights to the fleet while turns run: one update at a time, many engines at once.

1. Each server is told to pause, to load and to resume (see `engines/weights.py`). Meanwhile it gets no new turns, and
   the turns that run there just wait. Other engines go on.
2. Weights from a path go to one engine first, if possible one that is not held: if it refuses the path, the update ends
   before the fleet is touched. A transfer goes to all engines at once, because its collectives wait for each other.
3. An engine that fails is held: it gets no turns until an update reaches it. If its weights may have been touched, its
   turns continue elsewhere.
4. An update is idempotent by version: repeated, it goes to the engines that do not have it.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engines.weights import NewWeights, WeightsError, transfer_fields
from gateway.clock import Clock
from gateway.config import Settings
from gateway.fleet.fleet import Fleet
from gateway.fleet.server import EngineState, Server
from gateway.http.refusals import bad_request, conflict
from gateway.turnlog import LOGGER
from gateway.turns.turn import Turn
from gateway.weights.record import WeightRecord
from gateway.weights.staleness import Staleness
from gateway.weights.steps import UpdateProgress, give_weights
from store.port import Store


@dataclass(slots=True, eq=False)
class Update:
    """One update, under way or ended. Times are seconds since the epoch.

    Args:
        is_of_all: it is for all engines that the fleet had when it began.
    """

    weights: NewWeights
    number: int
    began_at: float
    is_of_all: bool
    ended_at: float | None = None
    engines: dict[str, UpdateProgress] = field(default_factory=dict)

    def status(self) -> str:
        """running; done; partial: some engines failed; failed: no engine has the weights."""
        if self.ended_at is None:
            return "running"
        states = {progress.state for progress in self.engines.values()}
        is_for_nobody = self.weights.transfer is not None and "done" not in states  # one that returns cannot get it
        if not states & {"failed", "untouched"} and not is_for_nobody:
            return "done"
        return "partial" if "done" in states else "failed"

    def serves(self, version: str, server_ids: Iterable[str] | None) -> bool:
        """Whether a caller that orders this version for these servers (None for all) may wait for this update's end."""
        if version != self.weights.version:
            return False
        return self.is_of_all if server_ids is None else self.engines.keys() >= set(server_ids)

    def told(self) -> str:
        """Which engines it is for, in words."""
        return "all engines" if self.is_of_all else ", ".join(self.engines)

    def view(self) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "object": "weight_update",
            "version": self.weights.version,
            "mode": self.weights.mode.value,
            "status": self.status(),
            "began_at": self.began_at,
            "ended_at": self.ended_at,
            "engines": {engine_id: progress.view() for engine_id, progress in self.engines.items()},
        }


_Servers = Mapping[str, Server]
"""By the ids that they had when the update began, which are those of their first engines."""


class WeightUpdates:
    """The updates of a fleet's weights, one at a time.

    Args:
        record: the current weights, and the update that an earlier process was running.
        live_turns: gives all turns that are being served.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        fleet: Fleet,
        store: Store,
        record: WeightRecord,
        staleness: Staleness,
        live_turns: Callable[[], list[Turn]],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._fleet = fleet
        self._store = store
        self._record = record
        self._staleness = staleness
        self._live_turns = live_turns
        self._update: Update | None = None
        self._task: asyncio.Task[None] | None = None
        self._refusal: tuple[str, str | None] = "", None  # the last of an engine that went first, and of which path

    def begin(
        self,
        weights: NewWeights,
        engine_ids: Sequence[str] | None = None,
        of_engine: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Update:
        """Begin an update; `finished` waits for its end.

        Args:
            engine_ids: which engines; None means all.
            of_engine: extra transfer fields for one engine, such as its rank.

        Raises:
            UnknownEngine: one of these.
            Refused: 409 while another update runs, or if all engines have this version from another path; 400 for
                fields that an engine's kind cannot use.
        """
        is_elsewhere = engine_ids is None and self._is_elsewhere(weights)
        wanted = self._fleet.servers() if engine_ids is None else [self._fleet.get(one).server for one in engine_ids]
        servers = {server.server_id: server for server in wanted}
        if self._update is not None and self._update.ended_at is None:
            if self._update.serves(weights.version, None if engine_ids is None else servers) and not is_elsewhere:
                return self._update
            raise conflict(f"The update to {self._update.weights.version!r} is under way, for {self._update.told()}.")
        for server in servers.values():
            _check(weights, server)
        if is_elsewhere and servers and all(_has(server, weights.version) for server in servers.values()):
            raise conflict(
                f"All engines have {weights.version!r} already, from another path. Other weights need another version."
            )
        of_server = {self._fleet.get(one).server.server_id: fields for one, fields in (of_engine or {}).items()}
        if len(of_server) < len(of_engine or {}):
            raise bad_request("Two of these engines are ranks of one server.", "transfer_of")
        if others := of_server.keys() - servers.keys():
            raise bad_request(f"{min(others)!r} is not among the engines of this update.", "transfer_of")
        self._record.begin(weights)
        update = Update(weights, self._record.number(weights.version), self._clock(), engine_ids is None)
        update.engines = {server_id: UpdateProgress() for server_id in servers}
        self._update = update
        self._task = asyncio.create_task(self._run(update, servers, of_server), name="weights")
        return update

    async def fleet_known(self) -> None:
        """Wait until the engines are known: just after a restart, an update would miss those yet to come."""
        await self._fleet.started()

    async def finished(self, update: Update) -> Update:
        """The update once it has ended. A caller that stops waiting does not stop it."""
        while update.ended_at is None and self._task is not None:
            await asyncio.wait((self._task,))
        return update

    async def close(self) -> None:
        """Break off; the record shows the update as unfinished."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def view(self) -> dict[str, Any]:
        """The current version, which engine has which, and the last update."""
        current = self._record.current
        return {
            "object": "weights",
            "version": current.version if current else None,
            "number": self._record.number(current.version) if current else 0,
            "path": current.path if current else None,
            "engines": {
                member.engine_id: {"version": member.server.weight_version or None, "held": member.server.held or None}
                for member in self._fleet.members()
            },
            "update": self._update.view() if self._update else None,
        }

    def _is_elsewhere(self, weights: NewWeights) -> bool:
        """Whether the current version is named again, with another path."""
        current = self._record.current
        if current is None or current.version != weights.version or current.path is None or weights.path is None:
            return False
        return current.path != weights.path

    # --- running --------------------------------------------------------------------------------------------

    async def _run(self, update: Update, servers: _Servers, of_server: Mapping[str, Mapping[str, Any]]) -> None:
        try:
            await self._store.settle(self._settings.settle_timeout_s)
            if self._store.is_fenced:
                for progress in update.engines.values():
                    progress.state, progress.error = "untouched", "another gateway has taken over the fleet"
                return
            there = {server_id: one for server_id, one in servers.items() if self._is_there(server_id, one, update)}
            if update.weights.path is not None:
                await self._from_disk(update, there)
            else:
                await asyncio.gather(*(self._give(*one, update, of_server) for one in there.items()))
        finally:
            self._end(update, is_broken_off=any(one.state not in _ENDS for one in update.engines.values()))

    async def _from_disk(self, update: Update, servers: _Servers) -> None:
        others = dict(servers)
        if servers and not any(_has(server, update.weights.version) for server in servers.values()):
            first_id = self._first(servers, update.weights.path)
            refused = await self._give(first_id, others.pop(first_id), update, {})
            if refused:
                self._refusal = first_id, update.weights.path
                for server_id in others:
                    update.engines[server_id].state = "untouched"
                return
        at_once = asyncio.Semaphore(self._settings.weight_loads_at_once)

        async def give(server_id: str, server: Server) -> None:
            async with at_once:
                # Others may have loaded for minutes: an engine that left, or is lost, is not there any more.
                if self._is_there(server_id, server, update):
                    await self._give(server_id, server, update, {})

        await asyncio.gather(*(give(*one) for one in others.items()))

    def _first(self, servers: _Servers, path: str | None) -> str:
        """Which server is given a path first: of those that are not held, the one with the fewest turns.

        A held one may lack every path, or hang. But who refused this very path is asked again: no other is held for it.
        """
        refused_by, refused = self._refusal
        if refused == path and refused_by in servers:
            return refused_by
        return min(servers, key=lambda server_id: (bool(servers[server_id].held), servers[server_id].num_legs))

    async def _give(
        self, server_id: str, server: Server, update: Update, of_server: Mapping[str, Mapping[str, Any]]
    ) -> bool:
        """Give one engine the weights; True if it refused them."""
        progress, weights = update.engines[server_id], update.weights
        if _has(server, update.weights.version):
            progress.state = "done"
            return False
        if weights.transfer is not None:
            weights = replace(weights, transfer={**weights.transfer, **of_server.get(server_id, {})})
        was_in_doubt = server.is_in_doubt
        self._fleet.begin_update(server)
        held, is_in_doubt = "the update to its weights was broken off", True
        try:
            await give_weights(server, weights, update.number, self._settings, progress)
            held, is_in_doubt = "", False
            self._record.took(weights.version)
            self._staleness.stop_stale(self._live_turns(), server)
        except WeightsError as error:
            held = f"it could not take weights {weights.version!r}: {error}"
            is_in_doubt = was_in_doubt or error.step != "pause"
            progress.state, progress.error = "failed", str(error)
            return error.is_refusal
        finally:
            self._fleet.end_update(server, held, is_in_doubt)
        return False

    def _is_there(self, server_id: str, server: Server, update: Update) -> bool:
        """Whether it can be given the weights: as another process, or once it is back, it takes them by itself."""
        is_same = server.server_id == server_id and server in self._fleet.servers()
        if is_same and server.state is EngineState.READY:
            return True
        update.engines[server_id].state = "absent"
        return False

    def _end(self, update: Update, is_broken_off: bool) -> None:
        update.ended_at = self._clock()
        if is_broken_off:
            return
        if update.status() == "failed" and not any(
            _has(server, update.weights.version) for server in self._fleet.servers()
        ):
            self._record.take_back()
        else:
            self._record.end()
        LOGGER.info("weights", extra={"fields": update.view()})


_ENDS = frozenset({"done", "failed", "absent", "untouched"})


def _has(server: Server, version: str) -> bool:
    return server.weight_version == version and not server.held


def _check(weights: NewWeights, server: Server) -> None:
    kind = server.kind
    if weights.transfer is None or kind is None:
        return
    fields = transfer_fields(kind)
    if not fields & set(weights.transfer):
        raise bad_request(f"A transfer to {kind} needs one of: {', '.join(sorted(fields))}.", "transfer")
