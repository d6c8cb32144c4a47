"""The laws: drawn workloads agree with them."""

import math
import statistics
from itertools import pairwise

import pytest

from workloads.laws import CODING, LAWS, MATH, SEARCH, TAILS, Law, draw, even, heavy, law_named, light, pareto
from workloads.trajectories import Trajectory, Workload

NUM_TRAJECTORIES = 16 * 1_000


def log_lengths(workload: Workload) -> list[list[float]]:
    return [[math.log(t.output_tokens) for t in siblings] for siblings in workload.groups.values()]


def intraclass_correlation(groups: list[list[float]]) -> float:
    """The one-way analysis of variance estimate, for groups of one size."""
    size = len(groups[0])
    within = statistics.mean(statistics.variance(group) for group in groups)
    between = statistics.variance([statistics.mean(group) for group in groups]) - within / size
    return between / (between + within)


@pytest.mark.parametrize(("law", "sigma"), [(CODING, 0.973), (light(CODING), 0.6), (heavy(CODING), 1.3)])
def test_drawn_mean_and_spread_agree_with_the_law(law: Law, sigma: float) -> None:
    """Without the cap, total output is log-normal with the stated sigma and nominal mean."""
    uncapped = Law(**{f: getattr(law, f) for f in law.__slots__} | {"max_output_tokens": 10**9})
    lengths = [t.output_tokens for t in draw(uncapped, NUM_TRAJECTORIES, seed=1).trajectories]
    # 1,000 groups: the shared half leaves about 3 to 6 % of noise in a mean with so heavy a tail.
    assert statistics.stdev(map(math.log, lengths)) == pytest.approx(sigma, rel=0.04)
    assert statistics.median(lengths) == pytest.approx(5_000 * math.exp(-(sigma**2) / 2), rel=0.08)
    assert statistics.mean(lengths) == pytest.approx(5_000, rel=0.12)


def test_siblings_are_correlated_as_the_law_states() -> None:
    """The intraclass correlation of log output is 0.65; in groups of unrelated trajectories it is about zero."""
    groups = log_lengths(draw(CODING, NUM_TRAJECTORIES, seed=2))
    assert intraclass_correlation(groups) == pytest.approx(0.65, abs=0.04)
    strangers = [list(group) for group in zip(*[iter(sum(zip(*groups, strict=True), ()))] * 16, strict=True)]
    assert abs(intraclass_correlation(strangers)) < 0.05


def test_pareto_tail_falls_with_its_index() -> None:
    """Twice the length is 2 ** -1.5 as frequent, up to the cap. Nothing is shorter than the minimum."""
    lengths = [t.output_tokens for t in draw(pareto(CODING), NUM_TRAJECTORIES, seed=3).trajectories]
    longer = [sum(length > 1_700 * 2**k for length in lengths) / len(lengths) for k in range(5)]
    assert min(lengths) >= 1_700
    for share, twice in pairwise(longer):
        assert twice / share == pytest.approx(2**-1.5, rel=0.15)


def test_a_heavier_tail_has_more_at_the_cap() -> None:
    """Nothing is longer than 40K tokens, and the tails differ in how many trajectories reach the cap."""
    at_cap = []
    for law in (light(CODING), CODING, heavy(CODING)):
        lengths = [t.output_tokens for t in draw(law, NUM_TRAJECTORIES, seed=4).trajectories]
        assert max(lengths) <= 40_000
        at_cap.append(sum(length == 40_000 for length in lengths))
    assert at_cap == sorted(at_cap)
    assert at_cap[0] < 10 < 50 < at_cap[2]


@pytest.mark.parametrize(
    ("law", "least", "most", "tool_s"), [(CODING, 5, 30, 0.41), (SEARCH, 3, 30, 1.41), (MATH, 1, 8, 0.046)]
)
def test_turns_tools_and_prompts_are_those_of_the_law(law: Law, least: int, most: int, tool_s: float) -> None:
    """Numbers of turns reach both of their bounds and stay within; tool times have the stated mean; prompts and tool
    outputs have the stated lengths."""
    workload = draw(law, 16 * 200, seed=5)
    num_turns = [len(t.turns) for t in workload.trajectories]
    assert (min(num_turns), max(num_turns)) == (least, most)
    tools = [turn.tool_s for t in workload.trajectories for turn in t.turns[:-1]]
    assert statistics.mean(tools) == pytest.approx(tool_s, rel=0.05)
    assert all(t.turns[0].new_tokens == 0 and t.turns[-1].tool_s == 0.0 for t in workload.trajectories)
    new_tokens = [turn.new_tokens for t in workload.trajectories for turn in t.turns[1:]]
    assert (min(new_tokens), max(new_tokens)) == (200, 800)
    assert all(500 <= t.context_tokens <= 1_500 for t in workload.trajectories)
    assert all(turn.output_tokens >= 1 for t in workload.trajectories for turn in t.turns)


def test_siblings_share_their_prompt_and_groups_have_sixteen() -> None:
    """A group is sixteen trajectories of one prompt length. If sixteen does not divide the number, the last group is
    smaller."""
    groups = draw(CODING, 40, seed=6).groups
    assert [len(siblings) for siblings in groups.values()] == [16, 16, 8]
    assert all(len({t.context_tokens for t in siblings}) == 1 for siblings in groups.values())
    assert len({t.trajectory_id for siblings in groups.values() for t in siblings}) == 40


def test_a_workload_depends_on_its_seed_alone() -> None:
    """One seed gives one workload, another seed another, and fewer trajectories are a prefix of more."""
    assert draw(SEARCH, 32, seed=7) == draw(SEARCH, 32, seed=7)
    assert draw(SEARCH, 32, seed=7) != draw(SEARCH, 32, seed=8)
    assert draw(SEARCH, 10, seed=7).trajectories == draw(SEARCH, 32, seed=7).trajectories[:10]


def test_a_later_epoch_has_the_same_prompts_in_groups_of_its_own() -> None:
    """A prompt keeps its id and its length; trajectories and groups have new ids."""
    first, second = (draw(LAWS["coding"], 64, 1, epoch=epoch).trajectories for epoch in (0, 1))
    assert [(t.prompt_id, t.context_tokens) for t in first] == [(t.prompt_id, t.context_tokens) for t in second]
    assert len({t.prompt_id for t in first}) == 4
    assert not {t.group_id for t in first} & {t.group_id for t in second}
    assert not {t.trajectory_id for t in first} & {t.trajectory_id for t in second}


def test_scale_shrinks_lengths_and_tools_but_keeps_turns() -> None:
    """A hundredth of the lengths with the same turns. Tool times may keep their own scale."""
    whole, small = draw(CODING, 64, seed=8), draw(CODING, 64, seed=8, scale=0.01)
    assert [len(t.turns) for t in small.trajectories] == [len(t.turns) for t in whole.trajectories]
    for t, s in zip(whole.trajectories, small.trajectories, strict=True):
        # Each turn is rounded for itself, and none falls to nothing.
        assert abs(s.output_tokens - t.output_tokens / 100) <= len(t.turns)
        assert s.tool_s == pytest.approx(t.tool_s / 100)
    as_before = draw(CODING, 64, seed=8, scale=0.01, tool_scale=1.0)
    assert as_before.trajectories[0].tool_s == whole.trajectories[0].tool_s


def test_laws_are_found_by_name_and_an_unknown_name_lists_them() -> None:
    """`coding-heavy` is the coding law with the heavy tail."""
    for name, law in LAWS.items():
        assert law_named(name) is law
        for tail in TAILS:
            assert law_named(f"{name}-{tail}").name == f"{name}-{tail}"
    assert law_named("search-heavy").sigma == 1.3
    for wrong in ("cooking", "coding-huge"):
        with pytest.raises(ValueError, match=r"coding, search, math.*-light"):
            law_named(wrong)


def test_pace_predicts_nothing_if_turns_are_even() -> None:
    """The longest trajectories then have turns as long as middling ones. With a bound on the number of turns they have
    longer ones."""

    def pace(law: Law) -> float:
        by_length = sorted(draw(law, 1_600, 3).trajectories, key=lambda trajectory: trajectory.output_tokens)
        middle, longest = by_length[700:900], by_length[-50:]

        def mean(part: list[Trajectory]) -> float:
            return sum(one.output_tokens for one in part) / sum(len(one.turns) for one in part)

        return mean(longest) / mean(middle)

    assert 0.95 < pace(even(CODING)) < 1.05
    assert pace(CODING) > 1.5
