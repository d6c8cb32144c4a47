"""Plots: well-formed SVG with each number at its place on the axis."""

import re
from xml.etree import ElementTree

import pytest

from simulator.chart import GREY, RED, Axis
from simulator.plots import Bar, Curve, EngineUse, Panel, Predicted, ablation, calibration, completion, timeline

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for shape in root.iter(f"{SVG}text"):
        assert 0 <= float(shape.attrib["x"]) <= width and 0 <= float(shape.attrib["y"]) <= height
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return [shape.text or "" for shape in root.iter(f"{SVG}text")]


def shape_titled(root: ElementTree.Element, title: str) -> ElementTree.Element:
    """The one shape with this title."""
    found = [shape for shape in root.iter() if shape.findtext(f"{SVG}title") == title]
    assert len(found) == 1, title
    return found[0]


def corners(shape: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+) ([-\d.]+)", shape.attrib["d"])]


def gridlines(root: ElementTree.Element) -> dict[str, float]:
    """The labels of the x axis: the pixel of each tick."""
    middles = [shape for shape in root.iter(f"{SVG}text") if shape.attrib.get("text-anchor") == "middle"]
    return {shape.text or "": float(shape.attrib["x"]) for shape in middles}


@pytest.mark.parametrize("is_log", [False, True])
def test_an_axis_is_monotone_and_clamps_to_its_ends(is_log: bool) -> None:
    """Values beyond an end are put on it. There are at least three ticks, all within the axis."""
    axis = Axis(10.0, 5_000.0, 400.0, 100.0, is_log)
    assert [axis.at(value) for value in (1.0, 10.0, 5_000.0, 9_999.0)] == [400.0, 400.0, 100.0, 100.0]
    pixels = [axis.at(value) for value in axis.ticks()]
    assert len(pixels) >= 3 and pixels == sorted(pixels, reverse=True)
    assert Axis(0.0, 0.0, 5.0, 9.0).at(3.0) == 5.0


def test_equal_factors_are_equal_steps_on_a_log_axis() -> None:
    """Equal differences are equal steps on a linear one."""
    log, linear = Axis(1.0, 10_000.0, 0.0, 400.0, is_log=True), Axis(0.0, 40.0, 0.0, 400.0)
    assert [log.at(10.0**n) for n in range(5)] == pytest.approx([0, 100, 200, 300, 400])
    assert [linear.at(10.0 * n) for n in range(5)] == pytest.approx([0, 100, 200, 300, 400])


def test_a_completion_curve_ends_with_its_last_trajectory() -> None:
    """Half the height at the median, the top at the makespan, and the bound to the left of both."""
    ours, theirs = Curve("heddle & co", [100.0, 200.0]), Curve("verl", [float(n) for n in range(1, 1_001)])
    root = parsed(completion([ours, theirs], 80.0, "Done <soon>"))
    first, middle, last = corners(shape_titled(root, "heddle & co: done"))
    many = corners(shape_titled(root, "verl: done"))
    assert middle[0] - first[0] == pytest.approx((last[0] - first[0]) / 2, abs=0.2)
    assert last[0] - first[0] == pytest.approx((many[-1][0] - first[0]) / 5, abs=0.2)
    assert middle[1] == pytest.approx((first[1] + last[1]) / 2, abs=0.2)
    assert len(many) < 400 and many[-1][1] == last[1] < first[1]
    bounds = [corners(shape) for shape in root.iter(f"{SVG}path") if shape.attrib["stroke"] == RED]
    assert bounds[0][0][0] - first[0] == pytest.approx(0.8 * (middle[0] - first[0]), abs=0.2)
    assert {"bound 80 s", "heddle & co, 200 s", "verl, 1,000 s", "Done <soon>"} <= set(texts(root))


def test_a_completion_curve_shows_its_tail_on_a_log_scale() -> None:
    """From all to a tenth is as far as from a tenth to a hundredth, and each of the last trajectories is a corner."""
    root = parsed(completion([Curve("verl", [float(n) for n in range(1, 1_001)])], 80.0, "Done"))
    tail = corners(shape_titled(root, "verl: open"))
    start, end = tail[0], tail[-1]
    by_second = {round((x - start[0]) / (end[0] - start[0]) * 1_000): y for x, y in tail}
    assert by_second[900] - start[1] == pytest.approx(by_second[990] - by_second[900], abs=0.3)
    assert by_second[999] == pytest.approx(end[1], abs=0.3) and len(tail) > 100


def test_a_timeline_shows_how_full_each_engine_was_and_when() -> None:
    """An engine that is almost empty for one half and almost full for the other is a pale strip and a dark one."""
    halves = EngineUse([0.0, 50.0], [0.05, 0.9], [0.0, 1.0])
    full = EngineUse([0.0], [1.0], [0.5])
    root = parsed(timeline([Panel("ours", 100.0, [halves, full]), Panel("theirs", 200.0, [full])], "KV"))
    pale, dark, over = (shape_titled(root, f"ours {shade}") for shade in ("#eef3f8", "#1f4d79", "#a33c3c"))
    ticks = gridlines(root)
    (pale_x, pale_y), (dark_x, dark_y), (over_x, over_y) = (corners(shape)[0] for shape in (pale, dark, over))
    assert (pale_x, dark_x, over_x) == (pytest.approx(70), pytest.approx(ticks["50"], abs=0.2), pytest.approx(70))
    assert pale_y == dark_y < over_y
    lengths = [float(shape.attrib["d"].rpartition("h")[2]) for shape in (pale, dark, over)]
    assert lengths == pytest.approx([ticks["50"] - 70, ticks["50"] - 70, ticks["100"] - 70], abs=0.3)
    area = corners(shape_titled(root, "ours running"))
    bottom, top = area[0][1], area[0][1] - 56
    shares = [(bottom - y) / (bottom - top) for _, y in area]
    assert shares[10] == pytest.approx(0.25, abs=0.01) and shares[-3] == pytest.approx(0.75, abs=0.01)
    assert "theirs: 200 s" in texts(root)


def test_an_ablation_bar_spans_one_to_its_mean_and_has_a_whisker() -> None:
    """To the right if the mechanism pays, to the left in another colour if it does not. The whisker spans the seeds."""
    bars = [Bar("without order", 0.9, 0.8, 1.1), Bar("without residency", 1.5, 1.2, 1.8)]
    root = parsed(ablation([("coding", bars)], "Worth", "ratios"))
    one = corners(shape_titled(root, "1"))[0][0]
    costs, pays = shape_titled(root, "without order: 0.900"), shape_titled(root, "without residency: 1.500")
    left, right = float(costs.attrib["x"]), float(pays.attrib["x"]) + float(pays.attrib["width"])
    assert float(costs.attrib["x"]) + float(costs.attrib["width"]) == pytest.approx(one, abs=0.2)
    assert float(pays.attrib["x"]) == one
    assert (right - one) / (one - left) == pytest.approx(5.0, rel=0.02)
    assert costs.attrib["fill"] != pays.attrib["fill"]
    whisker = corners(shape_titled(root, "without residency spread"))
    assert [x - one for x, _ in whisker] == pytest.approx([(right - one) * 0.4, (right - one) * 1.6], abs=0.5)
    assert "x1.50" in texts(root) and "x0.90" in texts(root)


def test_calibration_shows_exact_predictions_on_the_diagonal() -> None:
    """Ten times too much is one power of ten above it. Coverage is the share within the P90."""
    exact = Predicted(0, [10.0, 100.0, 1_000.0], [20.0, 200.0, 500.0], [10.0, 100.0, 1_000.0])
    wrong = Predicted(4, [1_000.0], [10.0], [100.0])
    root = parsed(calibration([exact, wrong], "Predictions"))
    on_line, above = corners(shape_titled(root, "step 0")), corners(shape_titled(root, "step 4"))
    (left, bottom), (_, middle), (right, top) = on_line
    assert middle == pytest.approx((bottom + top) / 2, abs=0.2)
    assert above[0][1] == pytest.approx(top, abs=0.2)
    assert right > left and above[0][0] > right
    assert exact.covered_share == pytest.approx(2 / 3) and wrong.covered_share == 0.0
    assert any("66.7 % of true totals" in line for line in texts(root))


def test_a_large_rollout_makes_a_small_file() -> None:
    """Each plot of 6,400 trajectories and 64 engines stays under 100 KB."""
    ends = [n * 0.1 for n in range(6_400)]
    use = EngineUse([float(n) for n in range(640)], [(n % 100) / 99 for n in range(640)], [0.5] * 640)
    step = Predicted(0, [n + 1.0 for n in range(6_400)], [1e9] * 6_400, [n + 1.0 for n in range(6_400)])
    plots = (
        completion([Curve(name, ends) for name in "abcd"], 10.0, "t"),
        timeline([Panel(name, 640.0, [use] * 64) for name in "ab"], "t"),
        calibration([step, step], "t"),
    )
    for svg in plots:
        parsed(svg)
        assert len(svg) < 100_000
    assert GREY in plots[0]
