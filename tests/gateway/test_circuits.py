"""When an engine's circuit opens and closes, and what it reports to the scheduler: faults in, events out."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.dialect import Observation
from engines.http import ConnectionBroken, HttpLimits
from engines.probe import Model
from gateway.config import load_settings
from gateway.engine_settings import EngineSettings
from gateway.fleet.circuits import Circuits
from gateway.fleet.server import EngineState, Server
from scheduling.types import EngineLoad, EngineLost, EngineReported, Event

OBSERVATION = Observation(3, 2, 0.5, 10_000, 64, 0.0, None)


class Site:
    """One engine, and the events that its circuit posts."""

    def __init__(self, faults_to_open: int = 3, default_slots: int | None = 128, **engine: Any) -> None:
        settings = EngineSettings(url="http://10.0.0.1:8000", **engine)
        self.server = Server(settings, HttpLimits(), None, "run")
        self.events: list[Event] = []
        chosen = load_settings(store="memory:", faults_to_open=faults_to_open, default_slots=default_slots)
        self.circuits = Circuits(chosen, lambda: 5.0, self.events.append)

    def observed(self, observation: Observation = OBSERVATION) -> EngineReported:
        """A successful observation; returns what is reported of it."""
        self.server.members[0].observation = observation
        self.circuits.close(self.server)
        self.circuits.report(self.server, is_look=True)
        reported = self.events.pop()
        assert isinstance(reported, EngineReported)
        return reported


@given(st.integers(1, 4), st.lists(st.booleans(), max_size=20))
def test_a_circuit_opens_after_the_configured_faults_in_a_row(faults_to_open: int, checks: list[bool]) -> None:
    """Good checks and faults in any order: the scheduler gets one event for each loss, and a good check ends it."""
    site = Site(faults_to_open)
    site.observed()
    num_in_a_row = num_losses = 0
    for is_good in checks:
        if is_good:
            assert site.circuits.close(site.server) is (num_in_a_row >= faults_to_open)
            num_in_a_row = 0
        else:
            num_in_a_row += 1
            num_losses += num_in_a_row == faults_to_open
            site.circuits.count_fault(site.server, ConnectionBroken(f"fault {num_in_a_row}"))
            assert site.server.last_fault == f"fault {num_in_a_row}"
        assert (site.server.state is EngineState.LOST) is (num_in_a_row >= faults_to_open)
        assert site.events == [EngineLost(5.0, "10.0.0.1:8000")] * num_losses


def test_an_engine_that_was_never_ready_is_not_reported_as_lost() -> None:
    """The scheduler does not know it yet."""
    site = Site()
    site.circuits.open(site.server, ConnectionBroken("nothing listens"))
    assert site.server.state is EngineState.LOST and site.server.last_fault == "nothing listens"
    site.circuits.report(site.server)
    assert site.events == []


async def test_a_loss_wakes_those_who_wait_for_a_change() -> None:
    """A drain waits for changes, and so does the start."""
    site = Site()

    async def is_lost() -> None:
        site.circuits.open(site.server, ConnectionBroken("gone"))

    await asyncio.wait_for(asyncio.gather(site.circuits.next_change(), is_lost()), 60)


def test_a_loss_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that stays away for hours fails every check, but does not fill the log."""
    site = Site()
    site.observed()
    for number in range(5):
        site.circuits.open(site.server, ConnectionBroken(f"fault {number}"))
    [record] = caplog.records
    assert (record.levelname, record.message) == ("WARNING", "engine is lost")
    assert record.__dict__["fields"] == {"engine": "10.0.0.1:8000", "fault": "fault 0"}


def test_the_scheduler_gets_what_an_engine_reports() -> None:
    """Its models, slots, KV and load."""
    site = Site(tp=2)
    site.server.models = (Model("a", 4096), Model("b", None))
    reported = site.observed()
    assert reported.at == 5.0 and reported.accepting
    spec = reported.spec
    assert (spec.engine_id, spec.models, spec.slots) == ("10.0.0.1:8000", frozenset({"a", "b"}), 64)
    assert (spec.kv_capacity_tokens, spec.tp, spec.profile) == (10_000, 2, None)
    assert reported.load == EngineLoad(3, 2, 5_000)
    site.circuits.report(site.server)
    assert site.events == [replace(reported, load=None)], "a change that the gateway makes is no look"


@pytest.mark.parametrize(
    ("engine", "requested_slots", "observation", "slots", "kv_capacity_tokens"),
    [
        ({"kv_capacity_tokens": 7_000}, None, OBSERVATION, 64, 7_000),
        ({}, 9, OBSERVATION, 9, 10_000),
        ({}, None, Observation(0, 0, 0.0, None, None, 0.0, None), 128, 0),
    ],
    ids=["configured-kv", "requested-slots", "neither-reported"],
)
def test_configured_and_requested_values_outrank_observed_ones(
    engine: dict[str, int], requested_slots: int | None, observation: Observation, slots: int, kv_capacity_tokens: int
) -> None:
    """An engine that reports neither gets the default number of slots, and no KV limit."""
    site = Site(**engine)
    site.server.slots = requested_slots
    spec = site.observed(observation).spec
    assert (spec.slots, spec.kv_capacity_tokens) == (slots, kv_capacity_tokens)
    assert not spec.slots_are_assumed


def test_slots_that_nobody_tells_are_searched_for() -> None:
    """Unless the gateway has a setting for such engines."""
    silent = replace(OBSERVATION, slots=None)
    assert Site(default_slots=None).observed(silent).spec.slots_are_assumed
    assert not Site(default_slots=None).observed().spec.slots_are_assumed
    assert not Site().observed(silent).spec.slots_are_assumed


@pytest.mark.parametrize(("offered", "remaining"), [(4_000, 6_000), (10_000, 1), (12_000, 1)])
def test_kv_offered_to_others_reduces_an_engines_capacity(offered: int, remaining: int) -> None:
    """At least one token remains, because zero would mean no limit. It is still large enough for long contexts."""
    site = Site()
    site.server.members[0].kv_offered_tokens = offered
    spec = site.observed().spec
    assert (spec.kv_capacity_tokens, spec.max_context_tokens) == (remaining, 10_000)


@pytest.mark.parametrize(
    ("limits", "observation", "longest"),
    [
        ([4_096, None], OBSERVATION, 4_096),
        ([20_000, 30_000], OBSERVATION, 10_000),
        ([None], OBSERVATION, 10_000),
        ([4_096], Observation(0, 0, 0.0, None, None, 0.0, None), 4_096),
        ([None], Observation(0, 0, 0.0, None, None, 0.0, None), 0),
    ],
)
def test_the_longest_context_of_an_engine_is_that_of_its_models_and_its_kv(
    limits: list[int | None], observation: Observation, longest: int
) -> None:
    """As far as it reports them."""
    site = Site()
    site.server.models = tuple(Model(f"model-{index}", limit) for index, limit in enumerate(limits))
    assert site.observed(observation).spec.max_context_tokens == longest


@pytest.mark.parametrize("why", ["is_cordoned", "held", "is_updating"])
def test_an_engine_that_gets_no_turns_is_reported_as_not_accepting(why: str) -> None:
    """Because of its operator, its weights, or while it loads."""
    site = Site()
    setattr(site.server, why, "its weights" if why == "held" else True)
    assert not site.observed().accepting


def test_the_ranks_of_a_server_are_engines_that_come_and_go_together() -> None:
    """Each with its own KV and load; a fault of one is their process's."""
    site = Site()
    site.server.resize(2)
    first, second = site.server.members
    first.observation, second.observation = OBSERVATION, replace(OBSERVATION, kv_capacity_tokens=20_000, num_running=9)
    site.circuits.close(site.server)
    site.circuits.report(site.server, is_look=True)
    told = [(one.spec.engine_id, one.spec.kv_capacity_tokens, one.load) for one in site.events]
    assert told == [
        ("10.0.0.1:8000", 10_000, EngineLoad(3, 2, 5_000)),
        ("10.0.0.1:8000@1", 20_000, EngineLoad(9, 2, 10_000)),
    ]
    site.events.clear()
    site.circuits.open(site.server, ConnectionBroken("gone"))
    assert site.events == [EngineLost(5.0, "10.0.0.1:8000"), EngineLost(5.0, "10.0.0.1:8000@1")]


def test_another_process_has_other_engines() -> None:
    """Also at each rank, because none of them has the KV of the one before."""
    server = Site().server
    server.resize(3)
    server.become_another(keeps_weights=False)
    assert [member.engine_id for member in server.members] == [
        "10.0.0.1:8000~2",
        "10.0.0.1:8000~2@1",
        "10.0.0.1:8000~2@2",
    ]
    assert [member.rank for member in server.resize(1)] == [1, 2]
