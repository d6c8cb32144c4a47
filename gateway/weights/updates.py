"""Gives new weights to the fleet while turns run: one update at a time, many engines at once.

1. Each engine is told to pause, to load and to resume (see `engines/weights.py`). Meanwhile it gets no new turns, and
   the turns that run there just wait. Other engines go on.
2. Weights from a path go to one engine first: if it refuses the path, the update ends before the fleet is touched. A
   transfer goes to all engines at once, because its collectives wait for each other.
3. An engine that fails is held: it gets no turns until an update reaches it. If its weights may have been touched, its
   turns continue elsewhere.
4. An update is idempotent by version: repeated, it goes to the engines that do not have it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engines.weights import NewWeights, WeightsError, transfer_fields
from gateway.clock import Clock
from gateway.config import Settings
from gateway.fleet.fleet import Fleet
from gateway.fleet.member import EngineState, Member
from gateway.http.refusals import bad_request, conflict
from gateway.state.driver import LiveTurn
from gateway.turnlog import LOGGER
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

    def serves(self, version: str, engine_ids: Sequence[str] | None) -> bool:
        """Whether a caller that orders this version for these engines (None for all) may wait for this update's end."""
        if version != self.weights.version:
            return False
        return self.is_of_all if engine_ids is None else self.engines.keys() >= set(engine_ids)

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


_Members = Mapping[str, Member]
"""Engines, by the ids that they had when the update began."""


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
        live_turns: Callable[[], list[LiveTurn]],
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
        if self._update is not None and self._update.ended_at is None:
            if self._update.serves(weights.version, engine_ids) and not is_elsewhere:
                return self._update
            raise conflict(f"The update to {self._update.weights.version!r} is under way, for {self._update.told()}.")
        wanted = self._fleet.members() if engine_ids is None else map(self._fleet.get, engine_ids)
        members = {member.engine_id: member for member in wanted}
        for member in members.values():
            _check(weights, member)
        if is_elsewhere and members and all(_has(member, weights.version) for member in members.values()):
            raise conflict(
                f"All engines have {weights.version!r} already, from another path. Other weights need another version."
            )
        if others := {self._fleet.get(one).engine_id for one in of_engine or {}} - members.keys():
            raise bad_request(f"{min(others)!r} is not among the engines of this update.", "transfer_of")
        self._record.begin(weights)
        update = Update(weights, self._record.number(weights.version), self._clock(), engine_ids is None)
        update.engines = {engine_id: UpdateProgress() for engine_id in members}
        self._update = update
        self._task = asyncio.create_task(self._run(update, members, of_engine or {}), name="weights")
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
                member.engine_id: {"version": member.weight_version or None, "held": member.held or None}
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

    async def _run(self, update: Update, members: _Members, of_engine: Mapping[str, Mapping[str, Any]]) -> None:
        try:
            await self._store.settle(self._settings.settle_timeout_s)
            there = {engine_id: one for engine_id, one in members.items() if self._is_there(engine_id, one, update)}
            if update.weights.path is not None:
                await self._from_disk(update, there)
            else:
                await asyncio.gather(*(self._give(*one, update, of_engine) for one in there.items()))
        finally:
            self._end(update, is_broken_off=any(one.state not in _ENDS for one in update.engines.values()))

    async def _from_disk(self, update: Update, members: _Members) -> None:
        others = dict(members)
        if members and not any(_has(member, update.weights.version) for member in members.values()):
            first_id = min(members, key=lambda engine_id: members[engine_id].num_legs)
            refused = await self._give(first_id, others.pop(first_id), update, {})
            if refused:
                for engine_id in others:
                    update.engines[engine_id].state = "untouched"
                return
        at_once = asyncio.Semaphore(self._settings.weight_loads_at_once)

        async def give(engine_id: str, member: Member) -> None:
            async with at_once:
                # Others may have loaded for minutes: an engine that left, or is lost, is not there any more.
                if self._is_there(engine_id, member, update):
                    await self._give(engine_id, member, update, {})

        await asyncio.gather(*(give(*one) for one in others.items()))

    async def _give(
        self, engine_id: str, member: Member, update: Update, of_engine: Mapping[str, Mapping[str, Any]]
    ) -> bool:
        """Give one engine the weights; True if it refused them."""
        progress, weights = update.engines[engine_id], update.weights
        if _has(member, update.weights.version):
            progress.state = "done"
            return False
        if weights.transfer is not None:
            weights = replace(weights, transfer={**weights.transfer, **of_engine.get(engine_id, {})})
        was_in_doubt = member.is_in_doubt
        self._fleet.begin_update(member)
        held, is_in_doubt = "the update to its weights was broken off", True
        try:
            await give_weights(member, weights, update.number, self._settings, progress)
            held, is_in_doubt = "", False
            self._record.took(weights.version)
            self._staleness.stop_stale(self._live_turns(), member)
        except WeightsError as error:
            held = f"it could not take weights {weights.version!r}: {error}"
            is_in_doubt = was_in_doubt or error.step != "pause"
            progress.state, progress.error = "failed", str(error)
            return error.is_refusal
        finally:
            self._fleet.end_update(member, held, is_in_doubt)
        return False

    def _is_there(self, engine_id: str, member: Member, update: Update) -> bool:
        """Whether it can be given the weights: as another process, or once it is back, it takes them by itself."""
        is_same = member.engine_id == engine_id and member in self._fleet.members()
        if is_same and member.state is EngineState.READY:
            return True
        update.engines[engine_id].state = "absent"
        return False

    def _end(self, update: Update, is_broken_off: bool) -> None:
        update.ended_at = self._clock()
        if is_broken_off:
            return
        if update.status() == "failed" and not any(
            _has(member, update.weights.version) for member in self._fleet.members()
        ):
            self._record.take_back()
        else:
            self._record.end()
        LOGGER.info("weights", extra={"fields": update.view()})


_ENDS = frozenset({"done", "failed", "absent", "untouched"})


def _has(member: Member, version: str) -> bool:
    return member.weight_version == version and not member.held


def _check(weights: NewWeights, member: Member) -> None:
    kind = member.dialect.kind if member.dialect else member.settings.kind
    if weights.transfer is None or kind is None:
        return
    fields = transfer_fields(kind)
    if not fields & set(weights.transfer):
        raise bad_request(f"A transfer to {kind} needs one of: {', '.join(sorted(fields))}.", "transfer")
