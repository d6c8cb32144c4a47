"""Strategies and brute-force helpers shared by the tests of fleet plans."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

from hypothesis import strategies as st

from engines.profiles import load_profile
from scheduling.cost import EngineProfile
from scheduling.estimate import Remaining, Work, estimate_finish_s
from scheduling.running_sums import LoadedEngine, Speculation
from workloads.laws import draw, law_named

PROFILES = {tp: load_profile(f"qwen3-14b-h100-tp{tp}") for tp in (1, 2, 4, 8)}

remainings = st.builds(
    Remaining,
    output_tokens=st.floats(0, 40_000),
    context_tokens=st.floats(0, 60_000),
    new_tokens=st.floats(0, 20_000),
    uncached_tokens=st.floats(0, 20_000),
    tool_s=st.one_of(st.just(0.0), st.floats(0, 200)),
)
works = st.one_of(
    st.just(Work()),
    st.lists(remainings, min_size=1, max_size=3).map(lambda parts: work_of(parts)),
)
speculations = st.one_of(st.none(), st.builds(Speculation, st.floats(1, 3), st.integers(1, 3)))
profiles = st.builds(
    lambda tp, slots, kv: replace(PROFILES[tp], slots=slots, kv_capacity_tokens=kv),
    st.sampled_from(sorted(PROFILES)),
    st.integers(1, 4),
    st.one_of(st.just(0), st.integers(30_000, 300_000)),
)
engines = st.builds(LoadedEngine, profiles, works, speculations)


def plus(work: Work, remaining_tokens: float, context_tokens: float, p90_tokens: float = 0.0) -> Work:
    """The work plus one more trajectory."""
    more = replace(work)
    more.add(remaining_tokens, context_tokens, p90_tokens)
    return more


def work_of(trajectories: Sequence[Remaining], before: Work | None = None) -> Work:
    """The work there was plus these trajectories, prefills and tools included."""
    work = before or Work()
    for one in trajectories:
        work = plus(work, one.output_tokens, one.mean_context_tokens)
        work.prefill_tokens += one.prefill_tokens
        work.tool_s = max(work.tool_s, one.tool_s)
    return work


def finish_of(engine: LoadedEngine, trajectories: Sequence[Remaining]) -> float:
    """The estimate, fed one trajectory at a time, with speculation as its docstring defines it."""
    work = work_of(trajectories, engine.work)
    if engine.speculation and engine.work.total_tokens == 0:
        lengths = sorted((one.output_tokens for one in trajectories), reverse=True) + [0.0] * 4
        few = lengths[engine.speculation.max_batch]
        work = replace(work, longest_tokens=few + (lengths[0] - few) / engine.speculation.speedup)
    return estimate_finish_s(engine.profile, work)


def all_cuts(length: int, num_groups: int) -> Iterator[list[tuple[int, int]]]:
    """Every way to cut a list into contiguous groups, including empty ones."""
    for inner in combinations_with_replacement(range(length + 1), num_groups - 1):
        yield list(zip((0, *inner), (*inner, length), strict=True))


def coding_rollout(num_trajectories: int, seed: int, law: str = "coding") -> list[Remaining]:
    """A rollout before its first turn, with true lengths."""
    return [
        Remaining(
            one.output_tokens,
            one.context_tokens,
            sum(turn.new_tokens for turn in one.turns),
            one.context_tokens,
            one.tool_s,
        )
        for one in draw(law_named(law), num_trajectories, seed).trajectories
    ]


def engines_of(tps: Sequence[int], profiles_by_tp: dict[int, EngineProfile] = PROFILES) -> list[LoadedEngine]:
    return [LoadedEngine(profiles_by_tp[tp]) for tp in tps]
