"""The lower bound on the makespan: tight if one resource binds, and never beaten."""

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
from simulator.predictors import Oracle
from simulator.rollout import Rollout
from workloads.laws import draw, law_named
from workloads.trajectories import Trajectory, Turn, Workload

PATIENT = Limits(queue_timeout_s=1e6)
TP1, TP4 = load_profile("qwen3-14b-h100-tp1"), load_profile("qwen3-14b-h100-tp4")


def makespan_s(
    workload: Workload, fleet: list[EngineProfile], policy: str, conditions: Conditions, *, oracle: bool = False
) -> float:
    predictor = Oracle(workload.trajectories) if oracle else SiblingPredictor()
    return Rollout(workload, fleet, POLICIES[policy], PATIENT, predictor, conditions=conditions).run().makespan_s


def test_a_lone_trajectory_takes_hardly_longer_than_its_bound() -> None:
    """The critical path is exact except for the first prompt, which a sibling may have cached, and for whole blocks."""
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
    """Whatever the policy, the fleet and the predictor. The best fleet's bound is never above the fleet's."""
    fleet = [replace(profile, slots=slots * profile.tp) for profile in fleet]
    workload = draw(law_named(law), number, seed).with_preamble(preamble)
    bound_s = fleet_bound_s(workload.trajectories, fleet, speculation)
    taken_s = makespan_s(workload, fleet, policy, Conditions(Features(speculation)), oracle=oracle)
    assert bound_s <= taken_s
    family = [replace(profile, slots=slots * profile.tp) for profile in (TP1, TP4)]
    gpus = sum(profile.tp for profile in fleet)
    assert best_fleet_bound_s(workload.trajectories, family, gpus, speculation) <= bound_s * (1 + 1e-9)


def crowd(number: int, group_size: int, prompt: int, *turns: Turn, preamble: int = 0) -> tuple[Trajectory, ...]:
    """Like trajectories in groups of the given size."""
    return tuple(
        Trajectory(f"t{n}", f"g{n // group_size}", prompt, turns, preamble_tokens=preamble) for n in range(number)
    )


COSTLY_KV = replace(TP4, decode_per_kv_ktoken_ms=100 * TP4.decode_per_kv_ktoken_ms)
FOUR_SLOTS = replace(TP4, slots=4)


@pytest.mark.parametrize(
    ("trajectories", "engine", "speculation"),
    [
        (crowd(1, 1, 300, Turn(0, 900, 2.0), Turn(4_000, 700, 3.0), Turn(200, 500, 9.0)), COSTLY_KV, None),
        (crowd(1, 1, 300, Turn(0, 900, 2.0), Turn(4_000, 700, 3.0)), COSTLY_KV, Speculation(2.0, 4)),
        (crowd(1, 1, 300, Turn(0, 1, 0.0), Turn(30_000, 1, 0.0), Turn(30_000, 1, 0.0)), TP1, None),
        (crowd(16, 1, 64, Turn(0, 2_000, 0.0)), FOUR_SLOTS, None),
        (crowd(16, 1, 64, Turn(0, 2_000, 0.0)), replace(COSTLY_KV, slots=4), None),
        (crowd(16, 1, 64, Turn(0, 2_000, 0.0)), FOUR_SLOTS, Speculation(1.6, 4)),
        (crowd(32, 1, 20_000, Turn(0, 1, 0.0)), TP1, None),
        (crowd(32, 8, 20_000, Turn(0, 1, 0.0)), TP1, None),
        (crowd(32, 1, 20_000, Turn(0, 1, 0.0), preamble=12_000), TP1, None),
        (crowd(32, 1, 64, Turn(0, 1, 0.0), Turn(20_000, 2_000, 0.0)), replace(TP1, kv_capacity_tokens=90_000), None),
    ],
    ids=[
        "alone",
        "drafted",
        "results",
        "slots",
        "slots, KV",
        "slots, drafted",
        "prompts",
        "siblings",
        "preamble",
        "KV",
    ],
)
def test_the_bound_is_tight_if_one_resource_binds(
    trajectories: tuple[Trajectory, ...], engine: EngineProfile, speculation: Speculation | None
) -> None:
    """A run takes less than 5 % longer; otherwise regret would mean nothing."""
    bound_s = fleet_bound_s(trajectories, [engine], speculation)
    taken_s = makespan_s(Workload("like", trajectories), [engine], "verl", Conditions(Features(speculation)))
    assert bound_s <= taken_s < 1.05 * bound_s
    if len(trajectories) == 1:  # more engines do not help it
        assert taken_s < 1.05 * fleet_bound_s(trajectories, [engine] * 9, speculation)


def test_the_bound_counts_a_shared_prompt_once() -> None:
    """Sixteen siblings that each fill a third of the KV all run at once: no bound may assume that only three do."""
    siblings, engine = crowd(16, 16, 20_000, Turn(0, 2_000, 0.0)), replace(TP1, kv_capacity_tokens=60_000, slots=16)
    taken_s = makespan_s(Workload("siblings", siblings), [engine], "verl", Conditions())
    assert 0.8 * taken_s < fleet_bound_s(siblings, [engine]) <= taken_s


def test_siblings_share_with_other_groups_only_the_preamble_that_all_of_them_have() -> None:
    """The bound took that of a group's first member for the group's: 9.3 s, for prompts that are prefilled in 1.1 s."""
    groups = [
        replace(crowd(1, 1, 20_000, Turn(0, 1, 0.0), preamble=20_000)[0], trajectory_id="first", group_id="first")
    ]
    for number, one in enumerate(crowd(16, 2, 20_100, Turn(0, 1, 0.0), preamble=20_000)):
        own_tokens = 0 if number % 2 else 1 + number // 2  # each group's first member has a preamble of its own length
        groups.append(replace(one, preamble_tokens=20_000 + own_tokens))
    taken_s = makespan_s(Workload("unlike preambles", tuple(groups)), [TP1], "verl", Conditions())
    assert 0.8 * taken_s < fleet_bound_s(groups, [TP1]) <= taken_s


def test_the_best_fleets_bound_is_the_fleets_if_there_is_one_size() -> None:
    """With two sizes, it is no slower than either alone."""
    for trajectories in (draw(law_named("coding"), 4, 1).trajectories, draw(law_named("coding"), 640, 1).trajectories):
        alone = {profile: best_fleet_bound_s(trajectories, [profile], 8) for profile in (TP1, TP4)}
        for profile, bound_s in alone.items():
            assert bound_s == pytest.approx(fleet_bound_s(trajectories, [profile] * (8 // profile.tp)))
        both_s = best_fleet_bound_s(trajectories, [TP1, TP4], 8)
        assert 0.8 * min(alone.values()) < both_s <= min(alone.values())


def test_the_bound_holds_if_speculation_slows_small_batches() -> None:
    """Drafts that are mostly rejected cost time. Large batches are not slowed, and the bound takes that into
    account."""
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


def test_unlike_engines_share_work_and_the_fastest_bounds_the_longest() -> None:
    """The longest trajectory's bound is that of the fastest engine; a large rollout is bound by the speed of both
    together."""
    long = Trajectory("t", "g", 16, (Turn(0, 30_000, 0.0),))
    assert fleet_bound_s([long], [TP1, TP4]) == fleet_bound_s([long], [TP4]) < fleet_bound_s([long], [TP1])
    crowd = draw(law_named("coding-light"), 1_600, 1).trajectories
    slow, fast, both = (fleet_bound_s(crowd, fleet) for fleet in ([TP1], [TP4], [TP1, TP4]))
    # Each engine takes what it is better at, which is slightly faster than equal shares of everything.
    assert 1 <= (1 / both) / (1 / slow + 1 / fast) < 1.1


@pytest.mark.parametrize("numbers", [(1, 1), (3, 4), (2, 4)])
def test_a_fleets_bound_is_never_below_that_of_the_best_fleet(numbers: tuple[int, int]) -> None:
    """One prompt is all the work. The search for weights stopped 0.1 % below those of the best fleet's bound."""
    family = [load_profile(f"toy-cpu-tp{tp}") for tp in (1, 2)]
    fleet = [kind for kind, number in zip(family, numbers, strict=True) for _ in range(number)]
    gpus = sum(engine.tp for engine in fleet)
    prompt = crowd(1, 1, 113, Turn(0, 1, 0.0))
    assert best_fleet_bound_s(prompt, family, gpus) <= fleet_bound_s(prompt, fleet) * (1 + 1e-12)
