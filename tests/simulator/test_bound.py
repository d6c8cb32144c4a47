"""The lower bound on the makespan: what it is for one trajectory, and that nobody beats it."""

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engines.profiles import load_profile
from engines.simulated.features import Features, Speculation
from predictor.siblings import SiblingPredictor
from scheduling.cost import EngineProfile
from scheduling.limits import Limits
from scheduling.policy import POLICIES
from simulator.bound import best_fleet_bound_s, fleet_bound_s
from simulator.conditions import Conditions
from simulator.rollout import Rollout
from workloads.laws import draw, law_named
from workloads.trajectories import Trajectory, Turn, Workload

PATIENT = Limits(queue_timeout_s=1e6)
TP1, TP4 = load_profile("qwen3-14b-h100-tp1"), load_profile("qwen3-14b-h100-tp4")


def makespan_s(
    workload: Workload, fleet: list[EngineProfile], policy: str, conditions: Conditions, *, oracle: bool = False
) -> float:
    rollout = Rollout(
        workload, fleet, POLICIES[policy], PATIENT, SiblingPredictor(), oracle=oracle, conditions=conditions
    )
    return rollout.run().makespan_s


def test_a_lone_trajectory_takes_hardly_longer_than_its_bound() -> None:
    """The critical path is exact but for the first prompt, which a sibling may have cached, and for whole blocks."""
    trajectory = Trajectory("t", "g", 16, (Turn(0, 400, 3.0), Turn(300, 700, 9.0)))
    bound_s = fleet_bound_s([trajectory], [TP4])
    taken_s = makespan_s(Workload("one", (trajectory,)), [TP4], "heddle", Conditions())
    assert bound_s <= taken_s < bound_s * 1.01
    assert taken_s > 3.0


@settings(max_examples=20, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    law=st.sampled_from(["coding", "math-heavy", "search-light"]),
    number=st.integers(1, 64),
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(["heddle", "slime", "verl", "heddle-paper"]),
    fleet=st.lists(st.sampled_from([TP1, TP4]), min_size=1, max_size=4),
    slots=st.sampled_from([4, 100]),
    speculation=st.sampled_from([None, Speculation(), Speculation(2.0, 32), Speculation(0.7, 4)]),
    oracle=st.booleans(),
    preamble=st.sampled_from([0, 0, 7_000]),
)
def test_no_run_beats_the_bound(
    law: str,
    number: int,
    seed: int,
    policy: str,
    fleet: list[EngineProfile],
    slots: int,
    speculation: Speculation | None,
    oracle: bool,
    preamble: int,
) -> None:
    """Whatever the policy, the fleet and the predictor; and the best fleet's bound is never above the fleet's."""
    fleet = [replace(profile, slots=slots * profile.tp) for profile in fleet]
    workload = draw(law_named(law), number, seed).with_preamble(preamble)
    bound_s = fleet_bound_s(workload.trajectories, fleet, speculation)
    taken_s = makespan_s(workload, fleet, policy, Conditions(Features(speculation)), oracle=oracle)
    assert bound_s <= taken_s
    family = [replace(profile, slots=slots * profile.tp) for profile in (TP1, TP4)]
    gpus = sum(profile.tp for profile in fleet)
    assert best_fleet_bound_s(workload.trajectories, family, gpus, speculation) <= bound_s * (1 + 1e-9)


def test_speculation_that_slows_small_batches_is_escaped_in_large_ones() -> None:
    """Drafts that are mostly refused cost time; who has the most company is not slowed, and the bound knows it."""
    slow = Speculation(speed_up=0.5, max_batch=1)
    trajectories = tuple(Trajectory(f"t{n}", "g", 16, (Turn(0, 1_000, 0.0),)) for n in range(2))
    bound_s = fleet_bound_s(trajectories, [TP1], slow)
    taken_s = makespan_s(Workload("two", trajectories), [TP1], "heddle", Conditions(Features(slow)))
    assert bound_s <= taken_s


def test_like_engines_share_the_work_evenly() -> None:
    """Twice the engines halve the bound, as long as work and not the longest trajectory sets it."""
    workload = draw(law_named("coding-light"), 3_200, 1)
    one, two = (fleet_bound_s(workload.trajectories, [TP1] * number) for number in (4, 8))
    assert one == pytest.approx(2 * two)


def test_one_fast_engine_among_slow_ones_shortens_the_critical_path_only() -> None:
    """On unlike engines the longest trajectory goes to the fastest, and the work is shared out in between."""
    long = Trajectory("t", "g", 16, (Turn(0, 30_000, 0.0),))
    assert fleet_bound_s([long], [TP1, TP4]) == fleet_bound_s([long], [TP4]) < fleet_bound_s([long], [TP1])
    crowd = draw(law_named("coding-light"), 1_600, 1).trajectories
    slow, fast, both = (fleet_bound_s(crowd, fleet) for fleet in ([TP1], [TP4], [TP1, TP4]))
    # Each takes what it is better at, which is a little faster than like shares of everything.
    assert 1 <= (1 / both) / (1 / slow + 1 / fast) < 1.1
