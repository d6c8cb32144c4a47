"""Makespans that no policy can beat, so that regret is a number. Optimistic: the rest may be out of reach for any
policy.

There are two bounds, and the larger one counts:

* the critical path: the longest trajectory alone on its best engine, with its tools;
* the work: no engine has more than its time. A decoded token costs what it adds to its step, and its share of the
  step's base. Within one step, the shares of the slots and the shares of the KV cache each sum to at most 1, and so
  does any mixture of both. Siblings share the KV of their prompt, so only a trajectory's own KV has a share. Prompts
  are prefilled once per group, and everything else only when it is new.

On a fleet of unlike engines the work is shared out fractionally. Any weights on the engines whose shares of the total
sum to 1 give a bound; the best weights are searched. For the best fleet of a given number of GPUs, each turn costs
GPU-seconds on the engines that are cheapest for it, so the bound also holds for fleets that change. A turn is assumed
to run on one engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.simulated.features import Speculation
from scheduling.cost import EngineProfile
from simulator.agent import shared_preambles
from workloads.trajectories import Trajectory

Floats = NDArray[np.float64]

KV_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Mixtures of KV and slot shares that are tried."""

NUM_WEIGHT_STEPS = 200


@dataclass(frozen=True, slots=True)
class _Turns:
    """All turns as columns: owner, decoded tokens, contexts, and, in thousands, prompt tokens to prefill."""

    owner: NDArray[np.int64]
    decoded: Floats
    kv_products: Floats  # sum over the decoded tokens of the context they are made with
    own_kv_products: Floats  # the same without the group's prompt
    new_ktokens: Floats
    before_ktokens: Floats
    tool_s: Floats


def fleet_bound_s(
    trajectories: Sequence[Trajectory], fleet: Sequence[EngineProfile], speculation: Speculation | None = None
) -> float:
    """Seconds below which no policy can finish these trajectories on this fleet."""
    kinds = list(dict.fromkeys(fleet))
    numbers = np.array([fleet.count(kind) for kind in kinds], dtype=float)
    turns = _columns(trajectories)
    path_s = _critical_path_s(turns, kinds, speculation)
    costs = [np.stack([_work_s(turns, kind, share, speculation) for kind in kinds]) for share in KV_SHARES]
    # Weights by their GPUs are those of the best fleet's bound, which is therefore never above this one.
    weights = np.array([kind.tp for kind in kinds], dtype=float)
    return max([path_s, *(_shared_out_s(cost, numbers, weights) for cost in costs)])


def best_fleet_bound_s(
    trajectories: Sequence[Trajectory],
    profiles: Sequence[EngineProfile],
    gpus: int,
    speculation: Speculation | None = None,
) -> float:
    """The same for any fleet of `gpus` GPUs whose engines have these profiles."""
    turns = _columns(trajectories)
    path_s = _critical_path_s(turns, profiles, speculation)
    works = [
        _least([profile.tp * _work_s(turns, profile, share, speculation) for profile in profiles]).sum() / gpus
        for share in KV_SHARES
    ]
    return float(max([path_s, *works]))


def _columns(trajectories: Sequence[Trajectory]) -> _Turns:
    rows: list[tuple[float, ...]] = []
    preamble_of = shared_preambles(trajectories)
    prefilled: set[str] = set()
    preambles: set[int] = set()
    for owner, trajectory in enumerate(trajectories):
        context, preamble = 0, preamble_of[trajectory.group_id]
        for index, turn in enumerate(trajectory.turns):
            prompt = turn.new_tokens if context else trajectory.context_tokens
            before, context = context, context + prompt
            if not before and preamble in preambles:
                before = preamble
            new = context - before
            if not index:
                new = 0 if trajectory.group_id in prefilled else new
                prefilled.add(trajectory.group_id)
                preambles.add(preamble)
            decoded = turn.output_tokens - 1  # the first token comes with the prefill
            products = decoded * context + decoded * (decoded + 1) / 2
            own_products = products - decoded * trajectory.context_tokens
            tool_s = turn.tool_s if index < len(trajectory.turns) - 1 else 0.0  # nothing waits for the last tool
            rows.append((owner, decoded, products, own_products, new / 1000, before / 1000, tool_s))
            context += turn.output_tokens
    owner_column, *columns = np.array(rows, dtype=float).T
    return _Turns(owner_column.astype(np.int64), *columns)


def _prefill_s(turns: _Turns, profile: EngineProfile) -> Floats:
    after = turns.before_ktokens + turns.new_ktokens
    squares = max(profile.prefill_per_ktoken2_ms, 0.0) * (after**2 - turns.before_ktokens**2)
    return np.asarray((profile.prefill_per_ktoken_ms * turns.new_ktokens + squares) / 1000)


def _critical_path_s(turns: _Turns, profiles: Sequence[EngineProfile], speculation: Speculation | None) -> float:
    """The longest trajectory alone, each turn on the engine that is best for it."""
    # If speculation slows an engine down, a batch too large for it does not speculate.
    faster = max(speculation.speed_up, 1.0) if speculation else 1.0
    alone = []
    for profile in profiles:
        per_token_ms = profile.decode_base_ms + profile.decode_per_sequence_ms
        decode_ms = per_token_ms * turns.decoded + profile.decode_per_kv_ktoken_ms * turns.kv_products / 1000
        # A group's prompt may come from a sibling's cache, so the path does not count it; later prompts are the
        # trajectory's own.
        prefill_s = np.where(turns.before_ktokens > 0, _prefill_s(turns, profile), 0.0)
        alone.append(decode_ms / 1000 / faster + prefill_s)
    return float(np.bincount(turns.owner, _least(alone) + turns.tool_s).max())


def _least(rows: Sequence[Floats]) -> Floats:
    return np.asarray(np.min(np.stack(rows), axis=0))


def _work_s(turns: _Turns, profile: EngineProfile, kv_share: float, speculation: Speculation | None) -> Floats:
    """Least engine seconds that each turn takes if a step's base is shared out by this mixture."""
    own_ms = profile.decode_per_sequence_ms * turns.decoded + profile.decode_per_kv_ktoken_ms * turns.kv_products / 1000
    by_kv = turns.own_kv_products / profile.kv_capacity_tokens
    by_slots = turns.decoded / profile.slots
    decode_ms = own_ms + profile.decode_base_ms * (kv_share * by_kv + (1 - kv_share) * by_slots)
    if speculation:
        small = (own_ms + profile.decode_base_ms * turns.decoded / speculation.max_batch) / speculation.speed_up
        decode_ms = np.minimum(decode_ms, small)
    return np.asarray(decode_ms / 1000 + _prefill_s(turns, profile))


def _shared_out_s(costs: Floats, numbers: Floats, weights: Floats) -> float:
    """Least time in which `numbers` engines of each kind can do work whose `costs` are rows of kinds (fractionally).

    By duality, it is the maximum over weights v with sum(numbers * v) = 1 of sum over the work of min over kinds of v *
    cost. Every v gives a bound, so the search need not be exact; it begins with `weights`.
    """
    loads = weights / (weights * numbers).sum()
    best = 0.0
    for step in range(NUM_WEIGHT_STEPS if len(numbers) > 1 else 1):
        weighted = loads[:, None] * costs
        chosen = weighted.argmin(axis=0)
        best = max(best, float(weighted.min(axis=0).sum()))
        used = np.bincount(chosen, np.take_along_axis(costs, chosen[None], 0)[0], len(numbers)) / numbers
        # A kind that is used more than the others is too cheap.
        loads = loads * np.exp((used / max(used.max(), 1e-12) - 0.5) / (step + 2))
        loads = loads / (loads * numbers).sum()
    return best
