"""Rollouts behind one server and another: what each run came to, and a table of all.

A run has a seed, which is its workload, so runs of one seed are pairs. What engines count themselves is the same
however busy the machine was; times are not, and are compared within pairs, which were made one after the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Counts:
    """What vLLM servers count from their start.

    Args:
        prompt_tokens: of all requests.
        computed_tokens: of these, such as were not found in the prefix cache when the request was begun.
        preemptions: requests whose KV was taken from them while they ran; it is computed again, and counted nowhere.
        steps: of the engine, those that made tokens.
    """

    prompt_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    steps: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Counts)))


def counts(page: str) -> Counts:
    """What the page of `/metrics` says. Raises KeyError where it is no vLLM's."""
    seen: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = f"{sample.name}/{sample.labels.get('source', '')}"
            seen[name] = seen.get(name, 0.0) + sample.value
    return Counts(
        int(seen["vllm:prompt_tokens_total/"]),
        int(seen["vllm:prompt_tokens_by_source_total/local_compute"]),
        int(seen["vllm:num_preemptions_total/"]),
        int(seen["vllm:iteration_tokens_total_count/"]),
    )


@dataclass(frozen=True, slots=True)
class Run:
    """One rollout behind one server.

    Args:
        engine_cpu_s: processor time of the engines' processes.
    """

    case: str
    server: str
    seed: int
    makespan_s: float
    mean_trajectory_s: float
    counts: Counts
    engine_cpu_s: float
    num_failed_turns: int

    def to_json(self) -> dict[str, Any]:
        """Of types that JSON has."""
        return asdict(self)


def run_of(record: dict[str, Any]) -> Run:
    """What `to_json` gave."""
    return Run(**record | {"counts": Counts(**record["counts"])})


def order(names: Sequence[str], repeat: int) -> list[str]:
    """In which order servers are played: each begins in its turn, so that none is always the first or the last."""
    start = repeat % len(names)
    return [*names[start:], *names[:start]]


def table(runs: Sequence[Run], first: str) -> str:
    """Markdown: a row for each server, times beside those of `first` in runs of the same seed."""
    own = {run.seed: run for run in runs if run.server == first}
    lines = [
        "| server | makespan, s | x | mean trajectory, x | engines' processors, x | prompt tokens computed | x "
        "| in the cache | preemptions | engine steps | failed turns |",
        "|---" * 11 + "|",
    ]
    for server in dict.fromkeys(run.server for run in runs):
        of_server = sorted((run for run in runs if run.server == server), key=lambda run: run.seed)
        paired = [(run, own[run.seed]) for run in of_server if run.seed in own]
        cells = [
            server,
            spread([run.makespan_s for run in of_server], 0),
            _beside(paired, lambda run: run.makespan_s),
            _beside(paired, lambda run: run.mean_trajectory_s),
            _beside(paired, lambda run: run.engine_cpu_s),
            spread([run.counts.computed_tokens for run in of_server], 0),
            _beside(paired, lambda run: run.counts.computed_tokens),
            f"{_share_cached(of_server):.0%}",
            spread([run.counts.preemptions for run in of_server], 0),
            spread([run.counts.steps for run in of_server], 0),
            str(sum(run.num_failed_turns for run in of_server)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: Sequence[float], digits: int) -> str:
    """The median, and in brackets the least and the most."""
    if not values:
        return "-"
    middle, least, most = (f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"


def _beside(pairs: Sequence[tuple[Run, Run]], figure: Callable[[Run], float]) -> str:
    return spread([figure(run) / figure(first) for run, first in pairs if figure(first)], 2)


def _share_cached(runs: Sequence[Run]) -> float:
    prompt_tokens = sum(run.counts.prompt_tokens for run in runs)
    return 1 - sum(run.counts.computed_tokens for run in runs) / prompt_tokens if prompt_tokens else 0.0
