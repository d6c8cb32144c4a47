"""The controller: observes the fleet, decides what is wanted, and takes the steps that lead there, again and again.

Everything is decided from what is observed now and from the journal, so a controller that was killed continues from the
fleet's present state. Rules:

- Only the holder of the lease acts.
- What cannot be observed is not judged. While gateway or launcher do not answer, nothing is launched, drained or
  stopped; while the demand is unknown, nothing is planned. Engines keep working.
- One step at a time for each server; steps of different servers run concurrently.
- An observation is discarded if a step ended or the decision changed meanwhile.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Sequence

from controller import rollouts
from controller.demand import Demand, DemandAway
from controller.desired import DesiredFleet, NoDevices, Refused
from controller.drivers import Drivers, LaunchHindered, StartFailed, StopFailed
from controller.fleet_file import FleetFile
from controller.gateway_client import GatewayAway, GatewayClient, GatewayRefused, Member
from controller.journal import Journal, JournalAway, Json
from controller.launcher import Launcher, LaunchFailed, Server
from controller.observed import observed_servers, registered_urls, unlisted_servers
from controller.planning import Proposal, present_tps
from controller.records import new_ids, spares_record, step_record
from controller.restarts import find_ended, held_back, tend
from controller.rollouts import History
from controller.steps import (
    Launch,
    MakeReady,
    ObservedServer,
    Register,
    Remove,
    Sleep,
    Step,
    is_reached,
    next_steps,
)
from engines.sleep import CannotSleep, SleepFault

LOGGER = logging.getLogger("heddle.controller")


class Controller:
    """One fleet."""

    def __init__(
        self, fleet: FleetFile, launcher: Launcher, gateway: GatewayClient, demand: Demand, journal: Journal
    ) -> None:
        self.fleet = fleet
        self.journal = journal
        self.alarms: dict[str, str] = {}
        self.seen: list[ObservedServer] = []
        self.has_observed = False
        self.servers: list[Server] = []
        self.members: list[Member] = []
        self.devices: tuple[str, ...] = ()
        self.proposal: Proposal | str = (
            "no plan was made yet" if fleet.engine.profiles else "none, because engine.profiles is empty"
        )
        self.desired = DesiredFleet(fleet, lambda: self.devices, lambda: journal.state)
        self._launcher = launcher
        self._gateway = gateway
        self._demand = demand
        self._drivers = Drivers(fleet, launcher, gateway, journal, lambda: self.servers)
        self._tasks: dict[str, tuple[Step, asyncio.Task[None]]] = {}
        self._failed: dict[str, str] = {}
        self._hindered: dict[str, tuple[Step, str]] = {}  # by server, the step that is tried again, and why
        self._draining_since: dict[str, float] = {}
        self._not_stopped: dict[str, str] = {}
        self._num_changes = 0
        self._planned_at = 0.0
        self._made_at = time.monotonic()
        self._wake = asyncio.Event()

    # --- the loop -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until cancelled. Engines stay as they are."""
        try:
            while True:
                try:
                    await self.tick()
                except JournalAway as fault:
                    self._alarm("journal_away", str(fault))
                if not self.journal.is_away:
                    self._clear("journal_away")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.fleet.limits.observe_interval_s):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            await self.close()

    async def tick(self) -> None:
        """Observe once, decide, and begin every step that can be begun."""
        before, is_first = self._num_changes, not self.has_observed
        if not await self.observe() or before != self._num_changes:
            return
        if self.journal.state.changed_at is None:
            await self._begin()
            return
        if is_first and (command := self.desired.command_to_start()):
            LOGGER.warning("no engines are wanted", extra={"fields": {"why": self.journal.state.why, "start": command}})
        self._decide()
        await self._plan()
        if before == self._num_changes:
            self._act()

    async def observe(self) -> bool:
        """Observe the fleet. Returns False if that was not possible."""
        try:
            self.servers = await self._launcher.find(self.fleet.fleet)
            self.devices = await asyncio.to_thread(self._launcher.inventory)
        except Exception as fault:  # whatever Ray's or Kubernetes' client raises: it cannot be observed
            self._alarm("launcher_away", f"{type(fault).__name__}: {fault}")
            return False
        self._clear("launcher_away")
        try:
            self.members = await self._gateway.engines()
        except (GatewayAway, GatewayRefused) as fault:
            if isinstance(fault, GatewayRefused) or not self._may_gateway_be_starting():
                self._alarm("gateway_away", str(fault))
            return False
        self._clear("gateway_away")
        launching = [step for step, _ in self._tasks.values() if isinstance(step, Launch)]
        drivers, state = self._drivers, self.journal.state
        self.seen = observed_servers(self.servers, self.members, state, drivers.ready, drivers.launched, launching)
        self.has_observed = True
        for one in self.seen:
            drivers.note(one)
        if is_reached(state.wanted, self.seen) and state.wanted != state.proven:
            self.journal.write(kind="proven", at=time.time())  # now: whoever sees it may ask for another fleet
        return True

    def observed(self) -> list[ObservedServer]:
        """The last observation. Raises Refused before the first one: no decision may be made blindly."""
        if not self.has_observed:
            raise Refused(f"the fleet has not been seen yet: {'; '.join(self.alarms.values()) or 'wait a second'}")
        return self.seen

    def ask(self, records: Sequence[Json]) -> None:
        """Record and apply what `desired` decided."""
        for record in records:
            self.journal.write(**record)
            if record["kind"] == "wanted":
                LOGGER.info("wanted", extra={"fields": {"why": record["why"], "tps": _tps(record)}})
            self._changed()

    async def close(self) -> None:
        """Cancel the running steps; the next controller continues them."""
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._gateway.close()

    # --- deciding -------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        self.ask(self._tended())
        state = self.journal.state
        wanted_ids = {one.server_id for one in state.wanted}
        for one in self.seen:  # also those that are to leave: before they do, a restarted gateway is told of them again
            if one.is_serving and not one.has_served and one.server_id not in self._tasks:
                self.journal.write(kind="served", server_id=one.server_id, at=time.time())
        known = {one.server_id for one in self.seen} | {one.server_id for one in (*state.wanted, *state.spares)}
        noted = {*state.drained, *state.moved, *state.stopped, *state.rest}
        noted |= {*state.urls, *state.served_at, *state.begun}
        if gone := sorted(noted - known - self._tasks.keys()):
            self.journal.write(kind="gone", server_ids=gone)
        for one in self.seen:  # a controller killed after its request may not have recorded it
            if one.server_id in state.urls and one.server_id not in wanted_ids and not (one.held or one.is_member):
                self.journal.write(**step_record("done", Remove(one.server_id), time.time()))
        self._watch_drains()
        self._watch_stops()

    async def _begin(self) -> None:
        """A fleet without a journal: running servers are adopted; if there are none, the first fleet is wanted, once
        there are devices for it. Those at addresses that the gateway has were registered: it may give them turns.
        """
        alive = [one for one in self.seen if one.is_alive]
        if at_gateway := registered_urls(self.servers, self.members, self.journal.state):
            for server_id, url in at_gateway.items():
                for kind in ("begun", "done"):
                    self.journal.write(**step_record(kind, Register(server_id), time.time(), url=url))
            self._changed()
            return  # to look again, with them as members
        urls = {server.spec.server_id: server.url for server in self.servers}
        asleep = {one.server_id for one in alive if await self._drivers.sleeps(urls.get(one.server_id))}
        for server_id in asleep:
            self.journal.write(**step_record("done", Sleep(server_id), time.time()))
        if self.journal.state.changed_at is not None:
            return  # an operator asked for a fleet meanwhile
        try:
            self.ask(self.desired.adopted(alive, asleep) if alive else self.desired.first())
        except NoDevices as lack:
            self._alarm("no_devices", str(lack))
        else:
            self._clear("no_devices")

    def _tended(self) -> list[Json]:
        state = self.journal.state
        ended = find_ended(state, self.servers, self._failed | self._removed())
        failed = {one.server_id for one in ended} | self._failed.keys()
        alive_ids = {one.server_id for one in self.seen if one.is_alive} - failed
        self._failed.clear()
        new_id, serial = new_ids(self.fleet.fleet, state)
        return tend(state, ended, alive_ids, time.time(), self.fleet.retry_rule, new_id, serial)

    def _removed(self) -> dict[str, str]:
        """Causes by id of servers that somebody else removed from the launcher. Those that still serve are an alarm."""
        unlisted = unlisted_servers(self.servers, self.members, self.journal.state)
        wanted_ids = {one.server_id for one in self.journal.state.wanted}
        at_work = ", ".join(sorted(one for one, is_there in unlisted.items() if is_there and one in wanted_ids))
        self._alarm_while("engine_unlisted", at_work, f"{at_work} serves, but the launcher does not list it")
        return {one: "somebody else removed it" for one, is_there in unlisted.items() if not is_there}

    async def _plan(self) -> None:
        """Make a plan when it is due, and act on it if that is enabled and the fleet is at rest."""
        planning, now = self.fleet.planning, time.monotonic()
        if not self.fleet.engine.profiles or now - self._planned_at < planning.interval_s:
            return
        self._planned_at = now
        try:
            work = await self._demand.work(self.journal.state.history.ended_at)
        except DemandAway as fault:
            self._alarm("demand_away", str(fault))
            self.proposal = "none, because nothing reports the work"
            return
        self._clear("demand_away")
        history = self.desired.after_rollout(work)
        if history is not None:
            self._plan_next(history)
        elif work.remaining or not self.journal.state.history.alike:
            self._consider(self.desired.proposed(work, self.seen))

    def _plan_next(self, history: History) -> None:
        """Plan for the next rollout, from the lengths of the last ones."""
        self._remember(history)
        proposal = self.desired.proposed_next(self.seen)
        is_changed = self._consider(proposal)
        if is_changed or (isinstance(proposal, Proposal) and not proposal.is_worth_it):
            self._remember(rollouts.chosen(history, present_tps(self.journal.state)))

    def _remember(self, history: History) -> None:
        if history != self.journal.state.history:
            self.journal.write(kind="rollouts", history=rollouts.dumped(history))

    def _consider(self, proposal: Proposal | str) -> bool:
        """Carry out a proposal if it is worth it and nothing forbids it. Returns whether it is carried out."""
        if _why(proposal) != _why(self.proposal):
            LOGGER.info("plan", extra={"fields": {"why": _why(proposal)}})
        self.proposal = proposal
        state = self.journal.state
        is_at_rest = is_reached(self.desired.at_hand(self.seen), self.seen)
        may_act = self.fleet.planning.is_automatic and not state.is_manual and is_at_rest
        if not may_act or isinstance(proposal, str) or not proposal.is_worth_it:
            return False
        try:
            self.ask(self.desired.planned(proposal, self.seen))
        except Refused as refused:
            self.proposal = f"{proposal.why}; but {refused}"
            return False
        return True

    # --- acting ---------------------------------------------------------------------------------------------

    def _act(self) -> None:
        state, limits = self.journal.state, self.fleet.limits
        expected = {one.server_id for one in (*state.wanted, *state.spares)}
        alive_ids = {one.server_id for one in self.seen if one.is_alive}
        for server_id, (step, task) in self._tasks.items():
            if isinstance(step, MakeReady) and server_id not in expected & alive_ids:
                task.cancel()
        steps = next_steps(
            state.wanted,
            self.seen,
            spares=state.spares,
            min_engines=self.desired.min_engines(state.wanted),
            max_starting=limits.max_starting,
            held_back=held_back(state, time.time(), self.fleet.retry_rule) | self._without_devices(),
            resting=state.resting,
        )
        if not any(isinstance(step, Launch) for step in (*steps, *(step for step, _ in self._tasks.values()))):
            self._clear("launch_hindered")
        if not steps and not self._tasks:
            self._hindered.clear()
            self._clear("gateway_refused")
            self._clear("step_failed")
        for step in steps:
            if step.server_id not in self._tasks:
                self._tasks[step.server_id] = step, asyncio.create_task(self._perform(step), name=str(step))

    def _without_devices(self) -> set[str]:
        """Ids of wanted servers that wait for devices that left; an alarm tells of them."""
        at_hand = self.desired.at_hand(self.seen)
        waiting = [one for one in self.journal.state.wanted if one not in at_hand]
        said = (f"{one.server_id} waits for {', '.join(one.devices)}, which left" for one in waiting)
        self._alarm_while("no_devices", waiting, "; ".join(said))
        return {one.server_id for one in waiting}

    async def _perform(self, step: Step) -> None:
        server_id, before = step.server_id, self._hindered.pop(step.server_id, None)
        fields = {"step": type(step).__name__, "server": server_id}
        if before is None or before[0] != step:
            LOGGER.info("step", extra={"fields": fields})
        alarm = why = ""
        try:
            await self._drivers.perform(step)
            self._clear("gateway_refused")
            self._clear("step_failed")
        except CannotSleep as lack:
            self.journal.write(**spares_record((), sleepless=str(lack)))
        except (StartFailed, LaunchFailed, SleepFault) as failure:
            self._failed[server_id] = str(failure)
        except LaunchHindered as fault:
            alarm, why = "launch_hindered", f"{server_id}: {fault}"
        except StopFailed as fault:
            self._not_stopped[server_id] = str(fault)
            alarm, why = "stop_failed", self._why_not_stopped()
        except GatewayAway as fault:
            alarm, why = "gateway_away", str(fault)
        except GatewayRefused as fault:
            alarm, why = "gateway_refused", str(fault)
        except JournalAway as fault:
            alarm, why = "journal_away", str(fault)
        except Exception as fault:
            alarm, why = "step_failed", f"{type(step).__name__} of {server_id}: {fault}"
            if before != (step, why):
                LOGGER.exception("defect", extra={"fields": fields})
        finally:
            self._tasks.pop(server_id, None)
            self._num_changes += 1
            if alarm:
                if before == (step, why):  # it was logged, also if a look at the gateway has ended the alarm since then
                    self.alarms[alarm] = why
                else:
                    self._clear(alarm)  # so that another cause is logged, too
                    self._alarm(alarm, why)
                self._hindered[server_id] = step, why  # tried again after `observe_interval_s`: it would fail at once
            else:
                self._wake.set()

    def _changed(self) -> None:
        self._num_changes += 1
        self._wake.set()

    def _watch_drains(self) -> None:
        now = time.monotonic()
        draining = {one.server_id for one in self.seen if one.was_drained and one.is_cordoned and one.num_turns}
        self._draining_since = {one: self._draining_since.get(one, now) for one in draining}
        overdue = [one for one, since in self._draining_since.items() if now - since > self.fleet.limits.drain_alarm_s]
        self._alarm_while("drain_overdue", overdue, f"turns still run on {', '.join(sorted(overdue))}")

    def _watch_stops(self) -> None:
        """A stop that failed is an alarm until that server has been stopped, also while it is tried again."""
        left = {one.server_id for one in self.seen if not one.was_stopped}
        self._not_stopped = {one: why for one, why in self._not_stopped.items() if one in left}
        self._alarm_while("stop_failed", self._not_stopped, self._why_not_stopped())

    def _why_not_stopped(self) -> str:
        return "; ".join(dict.fromkeys(self._not_stopped.values()))

    def _may_gateway_be_starting(self) -> bool:
        """Whether it never answered, and was perhaps started together with this controller, as by `heddle up`."""
        return not self.has_observed and time.monotonic() - self._made_at < self.fleet.limits.gateway_start_s

    def _alarm_while(self, name: str, condition: object, why: str) -> None:
        if condition:
            self._alarm(name, why)
        else:
            self._clear(name)

    def _alarm(self, name: str, why: str) -> None:
        if name not in self.alarms:
            LOGGER.warning("alarm", extra={"fields": {"alarm": name, "why": why}})
        self.alarms[name] = why

    def _clear(self, name: str) -> None:
        self.alarms.pop(name, None)


def _why(proposal: Proposal | str) -> str:
    return proposal if isinstance(proposal, str) else proposal.why


def _tps(record: Json) -> str:
    return json.dumps(sorted((one["tp"] for one in record["wanted"]), reverse=True))
