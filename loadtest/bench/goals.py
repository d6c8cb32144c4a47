"""What the gateway should cost beside its rivals, and what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loadtest.bench.peers import DIRECT, GATEWAY, PROGRAMS, RUST, STICKY, TOKEN_LEGS, TOKEN_LEGS_TOOLS
from loadtest.bench.tables import Sample, Samples

# The samples of one repeat, by server.
Repeat = Mapping[str, Sample]


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on one figure of a section; `of` raises KeyError if a repeat cannot give it."""

    text: str
    section: str
    bound: float
    of: Callable[[Repeat], float]
    unit: str = "x"


def _ratio(key: str, name: str, base: str) -> Callable[[Repeat], float]:
    return lambda repeat: repeat[name][key] / repeat[base][key]


def _beside_cheapest(key: str, others: Callable[[str], bool]) -> Callable[[Repeat], float]:
    def of(repeat: Repeat) -> float:
        costs = [sample[key] for name, sample in repeat.items() if others(name)]
        if not costs:
            raise KeyError(key)
        return repeat[GATEWAY][key] / min(costs)

    return of


def _added(key: str, scale: float = 1.0) -> Callable[[Repeat], float]:
    return lambda repeat: (repeat[GATEWAY][key] - repeat[DIRECT][key]) * scale


def _is_rival(name: str) -> bool:
    return name != DIRECT and not name.startswith(GATEWAY)


GOALS = (
    Goal(f"CPU per answer, 5.5 KB, vs {STICKY}", "answers", 0.75, _ratio("5.5 KB", GATEWAY, STICKY)),
    Goal(f"CPU per answer, 5.5 KB, vs {PROGRAMS}", "answers", 0.25, _ratio("5.5 KB", GATEWAY, PROGRAMS)),
    Goal("CPU per chunk, vs the best router in Rust", "streams", 1.0, _beside_cheapest("chunk", RUST.__contains__)),
    Goal("CPU per answer, 100 KB, vs the cheapest server", "answers", 1.0, _beside_cheapest("100 KB", _is_rival)),
    Goal("CPU per answer, 1 MB, vs the cheapest server", "answers", 1.0, _beside_cheapest("1 MB", _is_rival)),
    Goal(
        "CPU per answer, an agent's context of 100 KB, vs the best router in Rust",
        "contexts",
        1.0,
        _beside_cheapest("100 KB", RUST.__contains__),
    ),
    Goal("latency added to one answer, P99", "concurrency", 1.0, _added("p99_us 1", 1e-3), " ms"),
    Goal("delay added to 2,000 slow streams, P99", "slow", 20.0, _added("p99 2000"), " ms (a chunk's interval)"),
    Goal(
        "memory with 10,000 idle open streams",
        "memory",
        2**30 / 1e6,
        lambda repeat: repeat[GATEWAY]["before_mb"] + 10 * repeat[GATEWAY]["kb"],
        " MB",
    ),
    Goal("CPU per answer, token legs vs passing through", "answers", 2.0, _ratio("5.5 KB", TOKEN_LEGS, GATEWAY)),
    Goal("the same with tools", "answers", 2.0, _ratio("5.5 KB", TOKEN_LEGS_TOOLS, GATEWAY)),
    Goal("CPU per chunk, token legs vs passing through", "streams", 2.0, _ratio("chunk", TOKEN_LEGS, GATEWAY)),
    Goal("the same with tools", "streams", 2.0, _ratio("chunk", TOKEN_LEGS_TOOLS, GATEWAY)),
)


def goals_table(measured: Mapping[str, Samples]) -> str:
    """Markdown: each goal with the median of the repeats.

    Args:
        measured: by section.
    """
    lines = ["| goal | at most | seen | met |", "|---|---|---|---|"]
    for goal in GOALS:
        seen = _seen(goal, measured.get(goal.section, {}))
        shown, verdict = ("-", "not measured") if seen is None else (f"{seen:,.2f}", _verdict(seen, goal.bound))
        lines.append(f"| {goal.text} | {goal.bound:,.4g}{goal.unit} | {shown} | {verdict} |")
    return "\n".join(lines)


def _verdict(seen: float, bound: float) -> str:
    return "yes" if seen <= bound else "**no**"


def _seen(goal: Goal, samples: Samples) -> float | None:
    values = []
    for number in range(max((len(own) for own in samples.values()), default=0)):
        repeat = {name: own[number] for name, own in samples.items() if number < len(own)}
        try:
            values.append(goal.of({name: sample for name, sample in repeat.items() if sample}))
        except KeyError:
            continue
    return statistics.median(values) if values else None
