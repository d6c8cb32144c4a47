"""What the controller keeps of rollouts, and the fleet for the next one."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from controller import rollouts
from controller.journal import Journal, State, dumped, fold
from controller.layout import Floor
from controller.planning import Proposal, present_tps, propose_next, relaunch_s
from controller.rollouts import MAX_POINTS, MAX_ROLLOUTS, History, after, chosen
from controller.steps import DesiredServer
from engines.profiles import load_profile
from scheduling.estimate import Remaining
from scheduling.reshaping import COLD_RELAUNCH_S

PROFILES = {tp: load_profile(f"qwen3-14b-h100-tp{tp}") for tp in (1, 2, 4, 8)}
DEVICES = tuple(str(number) for number in range(8))
FLOOR = Floor(DEVICES, 8)


def crowd(seed: int, num: int = 800) -> list[Remaining]:
    """Trajectories of about one length: small engines serve most of them at once."""
    dice = random.Random(seed)
    return [Remaining(dice.lognormvariate(7.5, 0.2), 2_000, 500, 2_000) for _ in range(num)]


def tail(seed: int, num: int = 200) -> list[Remaining]:
    """Few trajectories, some very long: large engines end sooner."""
    dice = random.Random(seed)
    return [Remaining(min(dice.lognormvariate(7.5, 1.6), 60_000), 2_000, 500, 2_000) for _ in range(num)]


def with_rollout(state: State, trajectories: list[Remaining]) -> State:
    return replace(state, history=after(state.history, trajectories, state.history.ended_at + 100))


def decided(state: State) -> tuple[State, Proposal | str]:
    """As the loop does: a fleet that is worth it is there at once; one that is not confirms the present fleet."""
    proposal = propose_next(state, PROFILES, FLOOR)
    if isinstance(proposal, str):
        return state, proposal
    if proposal.is_worth_it:
        state = replace(state, wanted=tuple(DesiredServer(f"{n}", tp, ()) for n, tp in enumerate(proposal.tps)))
    return replace(state, history=chosen(state.history, present_tps(state))), proposal


def fleet_of(*tps: int) -> State:
    times = {("start", tp): (20.0,) for tp in PROFILES}
    return State(wanted=tuple(DesiredServer(f"s{number}", tp, ()) for number, tp in enumerate(tps)), phase_s=times)


def test_a_drift_between_rollouts_changes_the_plan() -> None:
    """From a crowd to a tail and back. After each change the new fleet is kept, and the proposal says so."""
    state = fleet_of(*(1,) * 8)
    for law, grows in ((crowd, False), (tail, True), (crowd, False)):
        before = max(present_tps(state))
        for seed in range(3):
            state, proposal = decided(with_rollout(state, law(seed)))
        assert isinstance(proposal, str) and "for which the fleet was chosen" in proposal
        after_tp = max(present_tps(state))
        assert after_tp > before if grows else after_tp <= before
    assert max(present_tps(state)) < 8


def test_rollouts_of_one_law_change_the_fleet_only_once() -> None:
    """However their lengths vary, a fleet that was chosen for such lengths stays, and the proposal says so."""
    state, num_changes, num_kept = fleet_of(*(1,) * 8), 0, 0
    for seed in range(20):
        before = present_tps(state)
        state, proposal = decided(with_rollout(state, tail(seed)))
        num_changes += present_tps(state) != before
        num_kept += isinstance(proposal, str) and "for which the fleet was chosen" in proposal
    assert num_changes == 1 and num_kept >= 17


def test_a_gain_that_does_not_pay_is_declined_only_once() -> None:
    """A relaunch of an hour is spread over four rollouts. The next rollout of the same law brings no new proposal."""
    slow = replace(fleet_of(*(1,) * 8), phase_s={("start", tp): (3_600.0,) for tp in PROFILES})
    state, proposal = decided(with_rollout(slow, tail(0)))
    assert isinstance(proposal, Proposal) and not proposal.is_worth_it
    assert "for 4 rollouts" in proposal.why and "5% is the least that pays" in proposal.why
    state, proposal = decided(with_rollout(state, tail(1)))
    assert isinstance(proposal, str) and present_tps(state) == (1,) * 8


def test_a_fleet_shaped_for_a_tail_goes_back_if_one_rollout_pays_for_it() -> None:
    """It will be reshaped again, so the cost of the relaunch is not spread over rollouts."""
    state, _ = decided(with_rollout(fleet_of(*(1,) * 8), crowd(0)))
    for start_s, expected in ((1.0, (2, 2, 2, 2)), (3_600.0, (8,))):
        cut = replace(fleet_of(8), history=state.history, phase_s={("start", tp): (start_s,) for tp in PROFILES})
        again, proposal = decided(with_rollout(cut, crowd(1)))
        assert isinstance(proposal, Proposal) and " rollouts:" not in proposal.why
        assert present_tps(again) == expected


def test_lengths_before_a_drift_are_forgotten() -> None:
    """The last few similar rollouts are pooled; the next rollout has as many trajectories as the newest."""
    history = History()
    for seed in range(MAX_ROLLOUTS + 2):
        history = after(history, crowd(seed, 700 + seed), float(seed))
    assert len(history.alike) == MAX_ROLLOUTS and history.num_trajectories == 705
    pooled = history.next_rollout()
    assert len(pooled) == 705
    history = after(history, tail(0), 99.0)
    assert len(history.alike) == 1 and history.ended_at == 99.0
    assert [one.output_tokens for one in history.next_rollout()] == sorted(
        round(one.output_tokens) for one in tail(0)
    ), "a small rollout is kept whole"


def test_a_large_rollout_is_kept_as_quantiles() -> None:
    """Their sum and maximum are within a percent of the rollout's."""
    trajectories = [Remaining(float(number)) for number in range(1, 6_401)]
    (sample,) = after(History(), trajectories, 1.0).alike
    assert len(sample.points) == MAX_POINTS and len(sample.lengths()) == 6_400
    assert sum(sample.lengths()) == pytest.approx(sum(range(1, 6_401)), rel=0.01)
    assert max(sample.lengths()) == pytest.approx(6_400, rel=0.01)


def test_the_history_of_rollouts_is_in_the_journal(tmp_path: Path) -> None:
    """The journal's first record, the short form, has it, too."""
    journal = Journal(tmp_path / "journal.jsonl")
    history = chosen(after(History(), tail(0), 5.0), (4, 4))
    journal.write(kind="rollouts", history=rollouts.dumped(history))
    assert Journal(tmp_path / "journal.jsonl").state.history == history
    assert fold(State(), {"kind": "state", "state": dumped(journal.state)}).history == history
    earlier = {**rollouts.dumped(history), "num_since": 0}
    assert fold(State(), {"kind": "rollouts", "history": earlier}).history == history, (
        "an earlier version counted rollouts"
    )


def test_relaunch_times_are_those_of_this_kind_of_engine() -> None:
    """A size that was never launched takes as long as the other sizes."""
    state = State()
    for seconds in (30.0, 10.0, 20.0):
        state = fold(state, {"kind": "phase", "phase": "start", "tp": 1, "seconds": seconds, "engine_kind": "vllm"})
    assert relaunch_s(state.phase_s, (1, 1), (2,)) == 20.0
    state = fold(state, {"kind": "phase", "phase": "stop", "tp": 1, "seconds": 1.0, "engine_kind": "sglang"})
    assert state.phase_s == {("stop", 1): (1.0,)}
    assert relaunch_s(state.phase_s, (1, 1), (2,)) == 1.0 + COLD_RELAUNCH_S
