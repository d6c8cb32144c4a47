"""When an engine's circuit opens and closes, and what the scheduler is told of the engine: faults in, events out."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.dialect import Observation
from engines.http import ConnectionBroken, HttpClient
from engines.probe import Model
from gateway.config import EngineSettings, load_settings
from gateway.fleet.circuits import Circuits
from gateway.fleet.member import EngineState, Member
from scheduling.types import EngineLoad, EngineLost, EngineReported, Event

SEEN = Observation(3, 2, 0.5, 10_000, 64, 0.0, None)


class Site:
    """One engine, and the events that its circuit posts."""

    def __init__(self, faults_to_open: int = 3, **engine: Any) -> None:
        settings = EngineSettings(url="http://10.0.0.1:8000", **engine)
        self.member = Member(settings, HttpClient(settings.url), None, settings.address, "run")
        self.events: list[Event] = []
        chosen = load_settings(store="memory:", faults_to_open=faults_to_open, default_slots=128)
        self.circuits = Circuits(chosen, lambda: 5.0, self.events.append)

    def looked(self, seen: Observation = SEEN) -> EngineReported:
        """A good look; what it reports."""
        self.member.observation = seen
        self.circuits.close(self.member)
        self.circuits.report(self.member)
        reported = self.events.pop()
        assert isinstance(reported, EngineReported)
        return reported


@given(st.integers(1, 4), st.lists(st.booleans(), max_size=20))
def test_a_circuit_opens_at_so_many_faults_in_a_row(faults_to_open: int, looks: list[bool]) -> None:
    """Good looks and faults in any order: the scheduler is told once of each loss, and a good look ends it."""
    site = Site(faults_to_open)
    site.looked()
    num_in_a_row = num_losses = 0
    for is_good in looks:
        if is_good:
            assert site.circuits.close(site.member) is (num_in_a_row >= faults_to_open)
            num_in_a_row = 0
        else:
            num_in_a_row += 1
            num_losses += num_in_a_row == faults_to_open
            site.circuits.count_fault(site.member, ConnectionBroken(f"fault {num_in_a_row}"))
            assert site.member.last_fault == f"fault {num_in_a_row}"
        assert (site.member.state is EngineState.LOST) is (num_in_a_row >= faults_to_open)
        assert site.events == [EngineLost(5.0, "10.0.0.1:8000")] * num_losses


def test_an_engine_that_was_never_ready_is_not_reported_as_lost() -> None:
    """The scheduler does not know it yet."""
    site = Site()
    site.circuits.open(site.member, ConnectionBroken("nothing listens"))
    assert site.member.state is EngineState.LOST and site.member.last_fault == "nothing listens"
    site.circuits.report(site.member)
    assert site.events == []


async def test_a_loss_wakes_whoever_waits_for_a_change() -> None:
    """As a drain does, and the start."""
    site = Site()

    async def is_lost() -> None:
        site.circuits.open(site.member, ConnectionBroken("gone"))

    await asyncio.wait_for(asyncio.gather(site.circuits.next_change(), is_lost()), 60)


def test_a_loss_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that stays away for hours fails every look, and fills no log."""
    site = Site()
    site.looked()
    for number in range(5):
        site.circuits.open(site.member, ConnectionBroken(f"fault {number}"))
    [record] = caplog.records
    assert (record.levelname, record.message) == ("WARNING", "engine is lost")
    assert record.__dict__["fields"] == {"engine": "10.0.0.1:8000", "fault": "fault 0"}


def test_what_an_engine_reports_is_what_the_scheduler_is_told() -> None:
    """Its models, slots, KV and load."""
    site = Site(tp=2)
    site.member.models = (Model("a", 4096), Model("b", None))
    told = site.looked()
    assert told.at == 5.0 and told.accepting
    spec = told.spec
    assert (spec.engine_id, spec.models, spec.slots) == ("10.0.0.1:8000", frozenset({"a", "b"}), 64)
    assert (spec.kv_capacity_tokens, spec.tp, spec.profile) == (10_000, 2, None)
    assert told.load == EngineLoad(3, 2, 5_000)


@pytest.mark.parametrize(
    ("engine", "asked_slots", "seen", "slots", "kv_capacity_tokens"),
    [
        ({"kv_capacity_tokens": 7_000}, None, SEEN, 64, 7_000),
        ({}, 9, SEEN, 9, 10_000),
        ({}, None, Observation(0, 0, 0.0, None, None, 0.0, None), 128, 0),
    ],
    ids=["configured-kv", "asked-slots", "neither-reported"],
)
def test_what_is_configured_or_asked_outranks_what_is_observed(
    engine: dict[str, int], asked_slots: int | None, seen: Observation, slots: int, kv_capacity_tokens: int
) -> None:
    """An engine that reports neither gets the default of slots, and no limit of KV."""
    site = Site(**engine)
    site.member.slots = asked_slots
    spec = site.looked(seen).spec
    assert (spec.slots, spec.kv_capacity_tokens) == (slots, kv_capacity_tokens)


@pytest.mark.parametrize(("offered", "left"), [(4_000, 6_000), (10_000, 1), (12_000, 1)])
def test_kv_that_is_offered_to_others_is_not_an_engines_to_give(offered: int, left: int) -> None:
    """Its capacity is the less by so much, and never unlimited because of that."""
    site = Site()
    site.member.kv_offered_tokens = offered
    assert site.looked().spec.kv_capacity_tokens == left


@pytest.mark.parametrize("why", ["is_cordoned", "held", "is_updating"])
def test_an_engine_that_gets_no_turns_is_reported_as_not_accepting(why: str) -> None:
    """For its operator's reason, for its weights, or while it loads."""
    site = Site()
    setattr(site.member, why, "its weights" if why == "held" else True)
    assert not site.looked().accepting
