"""Plots of simulated rollouts: pure functions from numbers to SVG text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.chart import (
    BLUE,
    BROWN,
    GREEN,
    GREY,
    INK,
    RED,
    Axis,
    bars,
    box,
    card,
    dots,
    frame,
    gridline,
    legend,
    line,
    text,
)

_WIDTH = 980.0
# From pale to dark: how full an engine is, in fifths.
_SHADES = ("#eef3f8", "#c6d8e8", "#8fb2d1", "#4f83b1", "#1f4d79")
_OVERFULL = "#a33c3c"
_BINS = 160
_MAX_DOTS = 1_500  # of a panel; of more trajectories every n-th is shown


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy's trajectories.

    Args:
        ended_at: when each of them ended.
    """

    label: str
    ended_at: Sequence[float]


@dataclass(frozen=True, slots=True)
class EngineUse:
    """How full one engine was.

    Args:
        at: sample times, ascending; a value holds until the next.
        kv_share: share of its KV cache in use; as long as `at`.
        running_share: share of its slots in use; as long as `at`.
    """

    at: Sequence[float]
    kv_share: Sequence[float]
    running_share: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """The engines of one rollout."""

    label: str
    makespan_s: float
    engines: Sequence[EngineUse]


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio and its smallest and largest over the seeds."""

    label: str
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Predicted:
    """The predictions before one step: totals, 90th percentiles, and true values, in columns of equal length."""

    step: int
    totals: Sequence[float]
    p90s: Sequence[float]
    true: Sequence[float]

    @property
    def covered_share(self) -> float:
        """Share of true totals that are not above their predicted 90th percentile; 0.9 if the percentile is
        calibrated."""
        return sum(true <= p90 for true, p90 in zip(self.true, self.p90s, strict=True)) / max(len(self.true), 1)


def completion(curves: Sequence[Curve], bound_s: float, title: str) -> str:
    """Trajectories over time, one curve per policy, and the bound as a line.

    The left plot shows how many are done. The right one shows how many are not, on a log scale that shows the tail.
    """
    height = 440.0
    end_s = 1.02 * max(max(curve.ended_at) for curve in curves)
    fewest = 100 / max(len(curve.ended_at) for curve in curves)
    colours = (BLUE, BROWN, GREY, GREEN)
    left, right = Axis(0, end_s, 70, 480), Axis(0, end_s, 560, _WIDTH - 30)
    done, open_ = Axis(0, 100, height - 60, 116), Axis(fewest, 100, height - 60, 116, is_log=True)
    shapes = frame(left, done, "virtual seconds", "done, %") + frame(right, open_, "virtual seconds", "not yet done, %")
    for x, y in ((left, done), (right, open_)):
        shapes.append(line([(x.at(bound_s), y.start), (x.at(bound_s), y.end)], RED, is_dashed=True))
    shapes.append(
        text(left.at(bound_s) - 6, done.start - 8, f"bound {bound_s:,.0f} s", anchor="end", fill=RED, size=12)
    )
    # The first curve is the one the page is about, so it is drawn last.
    for curve, colour in reversed(list(zip(curves, colours, strict=False))):
        corners = _corners(curve)
        for x, y, kind in ((left, done, "done"), (right, open_, "open")):
            points = [(x.at(at), y.at(share if kind == "done" else 100 - share)) for at, share in corners]
            shapes.append(line(points, colour, title=f"{curve.label}: {kind}"))
    entries = [(c, f"{curve.label}, {max(curve.ended_at):,.0f} s") for curve, c in zip(curves, colours, strict=False)]
    return card(_WIDTH, height, title, [*legend(70, 68, entries), *shapes])


def timeline(panels: Sequence[Panel], title: str) -> str:
    """Each engine as a strip over time: how much of its KV is used. Below, the share of all engines' slots that run a
    turn."""
    x = Axis(0, 1.02 * max(panel.makespan_s for panel in panels), 70, _WIDTH - 30)
    shades = ("KV to 20 %", "40 %", "60 %", "80 %", "98 %", "full")
    shapes = legend(70, 72, zip((*_SHADES, _OVERFULL), shades, strict=True))
    top = 96.0
    for panel in panels:
        strip = min(18.0, 210.0 / len(panel.engines))
        shapes.append(text(70, top + 12, f"{panel.label}: {panel.makespan_s:,.0f} s", weight=600))
        shapes += _strips(panel, x, top + 20, strip)
        top += 20 + strip * len(panel.engines) + 24
        shapes += _running(panel, x, top)
        top += 100
    for value in x.ticks():
        shapes.append(text(x.at(value), top, f"{value:,.0f}", anchor="middle", fill="#556", size=12))
    shapes.append(text((x.start + x.end) / 2, top + 20, "virtual seconds", anchor="middle", fill="#445"))
    return card(_WIDTH, top + 36, title, shapes)


def ablation(groups: Sequence[tuple[str, Sequence[Bar]]], title: str, subtitle: str) -> str:
    """Bars of makespan ratios from the line of 1, with whiskers from the smallest to the largest seed."""
    everything = [bar for _, group in groups for bar in group]
    low, high = min([0.95, *(bar.low for bar in everything)]), max([1.05, *(bar.high for bar in everything)])
    rows = sum(len(group) + 1.6 for _, group in groups)
    height = 150 + 24 * rows
    x = Axis(low - 0.02 * (high - low), high + 0.02 * (high - low), 250, _WIDTH - 90)
    y = Axis(0, 1, height - 60, 76)
    shapes = [shape for value in x.ticks() for shape in gridline(x, y, value, f"x{value:.3g}")]
    top = 92.0
    for label, group in groups:
        shapes.append(text(24, top + 12, label, weight=600))
        top += 24
        for bar in group:
            shapes += _bar(bar, x, top)
            top += 24
        top += 0.6 * 24
    shapes.append(line([(x.at(1), y.start), (x.at(1), y.end)], INK, width=1.5, title="1"))
    return card(_WIDTH, height, title, shapes, subtitle)


def calibration(steps: Sequence[Predicted], title: str) -> str:
    """Predicted against true totals, one panel per step; a prediction on the diagonal is exact."""
    everything = [value for step in steps for value in (*step.totals, *step.true)]
    low, high = max(1.0, min(everything)), max(everything)
    height, gap = 500.0, 80.0
    side = (_WIDTH - 70 - 30 - gap * (len(steps) - 1)) / len(steps)
    shapes: list[str] = []
    for number, step in enumerate(steps):
        left = 70 + number * (side + gap)
        x = Axis(low, high, left, left + side, is_log=True)
        y = Axis(low, high, height - 60, 100, is_log=True)
        shapes += frame(x, y, "true total, tokens", f"predicted before turn {step.step}, tokens")
        every = -(-len(step.true) // _MAX_DOTS)
        pairs = list(zip(step.true, step.totals, strict=True))[::every]
        shapes.append(dots(((x.at(true), y.at(total)) for true, total in pairs), BLUE, f"step {step.step}"))
        shapes.append(line([(x.at(low), y.at(low)), (x.at(high), y.at(high))], RED, width=1.5, is_dashed=True))
        words = f"{100 * step.covered_share:.1f} % of true totals within the predicted P90 (wanted: 90 %)"
        shapes.append(text(left, 72, words, fill="#445", size=12))
    return card(_WIDTH, height, title, shapes)


def _corners(curve: Curve) -> list[tuple[float, float]]:
    """Points of time and percentage done: every n-th of many trajectories, and each of the last hundred."""
    ends = sorted(curve.ended_at)
    every = max(1, len(ends) // 200)
    numbers = sorted({*range(every - 1, len(ends), every), *range(max(0, len(ends) - 100), len(ends))})
    return [(0.0, 0.0), *((ends[n], 100 * (n + 1) / len(ends)) for n in numbers)]


def _strips(panel: Panel, x: Axis, top: float, strip: float) -> list[str]:
    """Pieces of one shade are joined, and all pieces of a shade are one element, for small files."""
    pieces: dict[str, list[tuple[float, float, float]]] = {}
    width_s = panel.makespan_s / _BINS
    for number, engine in enumerate(panel.engines):
        middle = top + strip * (number + 0.5)
        shades = [_shade(_value_at(engine.at, engine.kv_share, (n + 0.5) * width_s)) for n in range(_BINS)]
        began = 0
        for n in range(1, _BINS + 1):
            if n == _BINS or shades[n] != shades[began]:
                start = x.at(began * width_s)
                pieces.setdefault(shades[began], []).append((start, middle, x.at(n * width_s) - start))
                began = n
    return [bars(them, shade, height=strip * 0.86, title=f"{panel.label} {shade}") for shade, them in pieces.items()]


def _running(panel: Panel, x: Axis, top: float) -> list[str]:
    """The mean share of slots that run a turn."""
    y = Axis(0, 1, top + 56, top)
    width_s = panel.makespan_s / _BINS
    points = []
    for n in range(_BINS + 1):
        shares = [_value_at(engine.at, engine.running_share, n * width_s) for engine in panel.engines]
        points.append((x.at(n * width_s), y.at(sum(shares) / len(shares))))
    area = [(x.at(0), y.at(0)), *points, (x.at(panel.makespan_s), y.at(0))]
    return [
        text(60, y.at(1) + 4, "100 %", anchor="end", fill="#556", size=12),
        text(60, y.at(0) + 4, "0", anchor="end", fill="#556", size=12),
        text(70, y.at(1) - 6, "slots that run a turn, all engines", fill="#556", size=12),
        line([(x.start, y.at(0)), (x.end, y.at(0))], "#d4d4dc", width=1),
        line(area, BLUE, width=1.5, fill=_SHADES[1], title=f"{panel.label} running"),
    ]


def _bar(bar: Bar, x: Axis, top: float) -> list[str]:
    ends = sorted((x.at(1), x.at(bar.mean)))
    colour = BLUE if bar.mean >= 1 else BROWN
    middle = top + 8
    return [
        text(240, top + 12, bar.label, anchor="end"),
        box(ends[0], top, ends[1] - ends[0], 16, colour, f"{bar.label}: {bar.mean:.3f}"),
        line([(x.at(bar.low), middle), (x.at(bar.high), middle)], INK, width=1.5, title=f"{bar.label} spread"),
        text(x.at(max(bar.high, bar.mean)) + 8, top + 13, f"x{bar.mean:.2f}", fill="#445"),
    ]


def _value_at(at: Sequence[float], values: Sequence[float], instant: float) -> float:
    index = bisect_right(at, instant) - 1
    return values[index] if index >= 0 else 0.0


def _shade(share: float) -> str:
    return _OVERFULL if share > 0.985 else _SHADES[min(int(share * len(_SHADES)), len(_SHADES) - 1)]
