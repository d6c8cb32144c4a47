"""The additive estimate that placement, partition and scaling share."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.cost import EngineProfile
from scheduling.estimate import Remaining, Work, estimate_finish_s
from tests.scheduling.plans import PROFILES, plus, profiles, remainings, work_of

TP1 = PROFILES[1]


@pytest.mark.parametrize(
    ("parts", "slots", "kv", "steps"),
    [
        ([], 8, 0, 0),
        ([(1_000, 0)], 8, 0, 1_000),
        ([(1_000, 0), (500, 0)], 8, 0, 1_000),
        ([(1_000, 0)] * 4, 2, 0, 2_000),
        ([(1_000, 95)] * 4, 8, 100, 4_000),
    ],
    ids=["nothing", "one", "the longest", "waves of slots", "waves of KV"],
)
def test_the_estimate_counts_the_longest_or_the_waves(
    parts: list[tuple[float, float]], slots: int, kv: int, steps: float
) -> None:
    """The longest trajectory, the slots or the KV set the number of steps, whichever is most; then come tokens and KV
    reads."""
    profile = replace(TP1, slots=slots, kv_capacity_tokens=kv)
    work = Work()
    for tokens, context in parts:
        work = plus(work, tokens, context)
    expected_ms = (
        profile.decode_base_ms * steps
        + profile.decode_per_sequence_ms * sum(tokens for tokens, _ in parts)
        + profile.decode_per_kv_ktoken_ms * sum(tokens * context for tokens, context in parts) / 1000
    )
    assert estimate_finish_s(profile, work) == pytest.approx(expected_ms / 1000)


def test_shared_prompts_count_once_where_kv_makes_waves_and_in_full_where_they_are_read() -> None:
    """Four trajectories with contexts of 95 tokens, of which a KV cache of 100 holds a quarter: one wave, not four."""
    profile = replace(TP1, slots=8, kv_capacity_tokens=100)
    work = Work()
    for _ in range(4):
        work = plus(work, 1_000, 95)
    alone_s = estimate_finish_s(profile, work)
    work.room_share = 0.25
    assert alone_s - estimate_finish_s(profile, work) == pytest.approx(3_000 * profile.decode_base_ms / 1000)


def test_prefill_and_the_slowest_tools_are_added() -> None:
    """Prefill of every trajectory, but tools of only one, because an engine serves others while a tool runs."""
    one, other = Remaining(0, 0, new_tokens=2_000, tool_s=3.0), Remaining(0, 5_000, uncached_tokens=1_000, tool_s=2.0)
    expected_s = 3 * TP1.prefill_per_ktoken_ms / 1000 + 3.0
    assert estimate_finish_s(TP1, work_of([one, other])) == pytest.approx(expected_s)


def test_the_mean_context_is_the_context_half_way() -> None:
    """A context grows by its own output and by the outputs of tools."""
    assert Remaining(1_000, 500, new_tokens=200).mean_context_tokens == 1_100


@given(profiles, st.lists(remainings, max_size=5), remainings, st.floats(1, 3))
def test_more_or_longer_work_never_takes_less_time(
    profile: EngineProfile, parts: list[Remaining], more: Remaining, longer: float
) -> None:
    """The searches rely on it: one more trajectory costs no less than none, and a longer one no less than a shorter
    one."""
    larger = replace(more, output_tokens=more.output_tokens * longer, context_tokens=more.context_tokens * longer)
    without_s, with_s, with_larger_s = (
        estimate_finish_s(profile, work_of(trajectories)) for trajectories in (parts, [*parts, more], [*parts, larger])
    )
    assert without_s <= with_s <= with_larger_s
