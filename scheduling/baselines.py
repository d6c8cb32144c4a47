"""How other systems place turns and move trajectories, each as its source describes it.

These policies use loads and caches, not predictions; those that use predictions are in buckets.py and ranks.py.
"""

from collections.abc import Iterable, Sequence

from scheduling.order import TurnFacts
from scheduling.placement import EngineFacts

# verl* in the Heddle paper's evaluation (arXiv 2603.28101): it gives up affinity when the largest load is this many
# times the smallest.
HYBRID_LOAD_RATIO = 32
# Defaults of sglang-router 0.3 (`--balance-abs-threshold`, `--balance-rel-threshold`, `--cache-threshold`).
CACHE_AWARE_LOAD_DIFFERENCE = 64
CACHE_AWARE_LOAD_RATIO = 1.5
CACHE_AWARE_MATCH_SHARE = 0.3
# Headroom that vLLM Router's program scheduling requires of a migration (docs/program_scheduling.md).
STEALING_RATIO = 1.2


def round_robin_turns(turn: TurnFacts, engines: Sequence[EngineFacts]) -> EngineFacts:
    """Each turn goes to the next engine, wherever its KV is."""
    return engines[turn.ordinal % len(engines)]


def round_robin_trajectories(turn: TurnFacts, engines: Sequence[EngineFacts]) -> EngineFacts:
    """Each new trajectory goes to the next engine: verl's affinity, with a sticky policy (arXiv 2603.28101)."""
    return engines[turn.trajectory_ordinal % len(engines)]


def least_loaded(turn: TurnFacts, engines: Sequence[EngineFacts]) -> EngineFacts:
    """The engine with the fewest turns: slime's choice for every turn (arXiv 2603.28101)."""
    return min(engines, key=_num_turns)


def fewest_trajectories(turn: TurnFacts, engines: Sequence[EngineFacts]) -> EngineFacts:
    """The engine with the fewest live trajectories: vLLM Router's `sticky_least_loaded`, with a sticky policy."""
    return min(engines, key=lambda engine: (engine.num_trajectories, engine.num_turns))


def most_free_kv(turn: TurnFacts, engines: Sequence[EngineFacts]) -> EngineFacts:
    """The engine with the most free KV tokens: where ThunderAgent starts and resumes (its scheduler/router.py)."""
    return max(engines, key=lambda engine: engine.profile.kv_capacity_tokens - engine.kv_claimed)


def power_of_two(turn: TurnFacts, engines: Sequence[EngineFacts]) -> EngineFacts:
    """The less loaded of two engines drawn from the turn's number: `power_of_two` of both routers."""
    drawn = turn.ordinal * 2_654_435_761 % 2**32  # Knuth's multiplicative hash: the same draw in every replay
    first = drawn % len(engines)
    second = (first + 1 + drawn // len(engines) % max(len(engines) - 1, 1)) % len(engines)
    return least_loaded(turn, (engines[first], engines[second]))


def cache_aware(turn: TurnFacts, engines: Sequence[EngineFacts]) -> EngineFacts:
    """The engine with the longest cached prefix, unless loads differ too much: sglang-router's `cache_aware`.

    A trajectory's prefix is where its last turn ran; that of a first turn is where a sibling's first turn went. If too
    little would match, the engine with the least claimed KV takes the turn.
    """
    least, most = min(map(_num_turns, engines)), max(map(_num_turns, engines))
    if most - least > CACHE_AWARE_LOAD_DIFFERENCE and most > CACHE_AWARE_LOAD_RATIO * least:
        return least_loaded(turn, engines)
    if turn.num_turns:
        matching = [engine for engine in engines if engine.engine_id == turn.home]
        matched_tokens = turn.context_tokens
    else:
        matching = [engine for engine in engines if turn.group_id in engine.prompts]
        matched_tokens = turn.prompt_tokens
    if matching and matched_tokens > CACHE_AWARE_MATCH_SHARE * turn.prompt_tokens:
        return least_loaded(turn, matching)
    return min(engines, key=lambda engine: engine.kv_claimed)


def round_robin_or_least_loaded(turn: TurnFacts, engines: Sequence[EngineFacts]) -> EngineFacts:
    """Round robin while loads are alike, else the least loaded: where verl* starts a trajectory (arXiv 2603.28101)."""
    return least_loaded(turn, engines) if _is_unbalanced(engines) else round_robin_trajectories(turn, engines)


def to_least_loaded_if_unbalanced(
    turn: TurnFacts, home: EngineFacts, candidates: Iterable[EngineFacts], fleet: Sequence[EngineFacts]
) -> EngineFacts | None:
    """verl*: affinity, but the least loaded engine while loads differ too much (arXiv 2603.28101)."""
    if not _is_unbalanced(fleet):
        return None
    target = min(candidates, key=_num_turns, default=None)
    return target if target is not None and target.num_turns < home.num_turns else None


def steal_kv_load(
    turn: TurnFacts, home: EngineFacts, candidates: Iterable[EngineFacts], fleet: Sequence[EngineFacts]
) -> EngineFacts | None:
    """The engine with the least KV load, if the home has clearly more: work stealing by load alone.

    It knows nothing of the work to come, and so fills engines that were left empty for the longest trajectories.
    """
    target = min(candidates, key=lambda engine: engine.kv_share, default=None)
    if target is None:
        return None
    share_with_it = target.kv_share + turn.prompt_tokens / (target.profile.kv_capacity_tokens or 1)
    return target if home.kv_share > STEALING_RATIO * share_with_it else None


def _num_turns(engine: EngineFacts) -> int:
    return engine.num_turns


def _is_unbalanced(engines: Sequence[EngineFacts]) -> bool:
    most, least = max(map(_num_turns, engines)), min(map(_num_turns, engines))
    return most > HYBRID_LOAD_RATIO * max(least, 1)
