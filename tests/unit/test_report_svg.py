"""Axes and curves: round ticks, gaps, spikes that survive thinning, stairs, marks, bars."""

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepzero.monitor.report import svg

finite = st.floats(-1e12, 1e12, allow_nan=False)


def chart(lines, **options):
    """A line chart, parsed once to see that it is XML."""
    drawn = svg.chart("x", "Title", lines, "step", "{:g}".format, **options)
    ElementTree.fromstring(drawn)
    return drawn


def paths(drawn):
    return re.findall(r'<path class="line" d="([^"]*)"', drawn)


@given(finite, finite)
def test_ticks_are_few_round_and_inside(a, b):
    low, high = min(a, b), max(a, b)
    found = svg.ticks(low, high)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        return  # nothing between the two that a label could tell apart
    assert 2 <= len(found) <= 10
    slack = 1e-6 * (high - low)
    assert all(low - slack <= value <= high + slack for value in found)
    steps = {round(y - x, 12) for x, y in itertools.pairwise(found)}
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.one_of(st.none(), finite)), min_size=1, max_size=3000))
def test_thinning_keeps_the_highest_and_the_lowest(points):
    thin = svg.thin(points, limit=50)
    assert len(thin) <= max(50, 75)
    if values := [y for _, y in points if y is not None]:
        kept = [y for _, y in thin if y is not None]
        assert (max(kept), min(kept)) == (max(values), min(values))


def test_a_missing_value_is_a_gap():
    points = [(1, 1.0), (2, 2.0), (3, None), (4, math.nan), (5, 1.0), (6, 1.5)]
    (path,) = paths(chart([svg.Line("loss", points, "c1")]))
    assert path.count("M") == 2
    assert "nan" not in path


@pytest.mark.parametrize("points", [[], [(1, None)], [(1, math.inf), (2, math.nan)]])
def test_nothing_to_draw_is_no_chart(points):
    assert svg.chart("x", "T", [svg.Line("loss", points, "c1")], "step", str) == svg.bar_chart("b", "T", []) == ""


def test_few_values_have_an_axis():
    drawn = chart([svg.Line("loss", [(1, 5.0)], "c1")])
    assert 'cx="223"' in drawn and not paths(drawn), "one value is a dot in the middle"
    (path,) = paths(chart([svg.Line("scale", [(1, 0.0), (2, 0.0)], "c1")], zero=True))
    assert {float(y) for y in re.findall(r" ([\d.]+)", path)} == {svg.HEIGHT - svg.BOTTOM}


def test_crosses_stand_where_steps_were_skipped_and_words_are_escaped():
    drawn = chart([svg.Line("<b>\x1b&", [(1, 1.0), (3, 2.0)], "c1")], crosses=[2.0])
    assert drawn.count('class="cross"') == 1
    assert f"M{svg.Frame((1, 3), (1, 2)).across(2) - 3:.1f} " in drawn
    assert "<title>&lt;b&gt;?&amp;</title>" in drawn


def test_layers_stand_on_each_other_in_steps():
    values = {"low": (10, 10, 10), "high": (0, 30, 0)}
    drawn = chart([svg.Line(name, list(enumerate(sizes)), "c1", "area") for name, sizes in values.items()])
    low, high = re.findall(r'<path class="area" d="M([^"]*)Z"', drawn)
    frame = svg.Frame((0, 2), (0, 40))
    corners = [(frame.across(x), frame.up(y)) for x, y in ((1, 10), (1, 40), (2, 40), (2, 10))]
    assert "L".join(f"{x:.1f} {y:.1f}" for x, y in corners) in high
    assert low.count("L") == 3, "what does not change needs its four corners alone"


def test_marks_that_touch_share_their_words():
    marks = [(10.0, "2"), (99.0, "3"), (99.5, "4"), (100.0, "5")]
    drawn = chart([svg.Line("a", [(0, 1), (100, 1)], "c1", "area")], marks=marks)
    assert drawn.count('class="mark"') == 4
    assert re.findall(r">([2345·]+)</text>", drawn) == ["2", "3·4·5"]


def test_bars_end_where_they_are_measured_and_are_marked_where_expected():
    drawn = svg.bar_chart("b", "T", [("one", 50, 100, ""), ("two", 25, None, "")])
    ElementTree.fromstring(drawn)
    assert re.findall(r'width="([\d.]+)" height="11"', drawn) == ["190", "95"]
    assert re.findall(r'class="expected" x1="([\d.]+)"', drawn) == ["384"]
