"""Tables of the measurements: medians with their spread, and ratios to another server in the same repeat."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.peers import DIRECT

Sample = dict[str, float]
# The samples of a server by its name, None for a repeat that failed.
Samples = Mapping[str, Sequence[Sample | None]]


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, and the cell of the server with this name."""

    title: str
    cell: Callable[[str, Samples], str]


def plain(title: str, key: str, scale: float = 1.0, digits: int = 0) -> Column:
    """The median."""

    def cell(name: str, samples: Samples) -> str:
        values = [sample[key] * scale for sample in samples[name] if sample and key in sample]
        return f"{statistics.median(values):,.{digits}f}" if values else "-"

    return Column(title, cell)


def cost(title: str, key: str, base: str | Sequence[str], ratio: str = "x") -> tuple[Column, Column]:
    """The median with its spread, and the ratio to the base, or to the cheapest of several."""
    bases = (base,) if isinstance(base, str) else tuple(base)

    def cell(name: str, samples: Samples) -> str:
        return "-" if name == DIRECT else _spread([sample[key] for sample in samples[name] if sample])

    def relative(name: str, samples: Samples) -> str:
        if name == DIRECT:
            return "-"
        ratios = []
        for number, sample in enumerate(samples[name]):
            others = [_at(samples, other, number) for other in bases]
            costs = [other[key] for other in others if other]
            if sample and costs:
                ratios.append(sample[key] / min(costs))
        return f"{statistics.median(ratios):.2f}" if ratios else "-"

    return Column(title, cell), Column(ratio, relative)


def added(title: str, key: str) -> Column:
    """The difference to the backend's own figure."""

    def cell(name: str, samples: Samples) -> str:
        if name == DIRECT:
            return f"itself {_spread([sample[key] for sample in samples[name] if sample])}"
        differences = []
        for number, sample in enumerate(samples[name]):
            direct = _at(samples, DIRECT, number)
            if sample and direct:
                differences.append(sample[key] - direct[key])
        return _spread(differences)

    return Column(title, cell)


def _at(samples: Samples, name: str, number: int) -> Sample | None:
    own = samples.get(name, ())
    return own[number] if number < len(own) else None


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    digits = 1 if statistics.median(values) < 30 else 0
    middle = f"{statistics.median(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def table(columns: Sequence[Column], samples: Samples, failures: Mapping[str, str]) -> str:
    """Markdown: a row for each server, and a sentence for each that failed."""
    titles = ["server", *(column.title for column in columns)]
    lines = [_row(titles), "|---" * len(titles) + "|"]
    lines += [_row([name, *(column.cell(name, samples) for column in columns)]) for name in samples]
    if failures:
        lines += ["", *(f"* {name}: {reason.replace('|', '/')}" for name, reason in failures.items())]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write(path: Path, name: str, text: str) -> None:
    """Put the text between the marks of that name in a file. Raises ValueError if the file has none."""
    begin, end = f"<!-- bench:{name}:begin -->", f"<!-- bench:{name}:end -->"
    before, found, rest = path.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"{path} has no {begin} ... {end}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")
