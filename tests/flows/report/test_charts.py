"""Charts: axes that fit the numbers, lines with gaps, stacked bars, and the drawn graph of stages."""

import subprocess
import sys

import pytest

from flows.report.charts import FRAME, MOST_POINTS, Chart, limits, stage_graph, thinned, ticks
from flows.report.formats import show


def chart(*columns, over="round", share=False):
    series = {f"part {n}": values for n, values in enumerate(columns)}
    return Chart("Loss", "nats", "a note", range(len(columns[0])), series, over, share)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([0.2, 0.9], True, (0.0, 1.0)),
        ([0.2, 1.1], True, (0.0, 1.06 * 1.1)),
        ([0.0, 0.0], False, (0.0, 1.0)),
        ([10.0, 11.0], False, (9.95, 11.05)),
        ([1.0, 1.0 + 1e-7], False, (0.9, 1.1)),
        ([-2.0, -2.0], False, (-2.2, -1.8)),
    ],
    ids=["share", "more than a share", "zeros", "far from zero", "a constant with noise", "a negative constant"],
)
def test_axis_fits_the_numbers(values, share, expected):
    assert limits(values, share) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "share", "least", "expected"),
    [
        ([1.0, 1.0000001], True, 0.0, (0.0, 1.0)),
        ([0.532, 0.531], False, 0.2, (0.43155, 0.63145)),
        ([1e-9, 3e-9], False, 1e-3, (0.0, 1e-3)),
        ([0.0, 0.37], False, 0.02, (0.0, 1.06 * 0.37)),
    ],
    ids=["a share with rounding", "a change that is none", "noise above zero", "a change"],
)
def test_a_change_that_means_nothing_looks_like_one(values, share, least, expected):
    assert limits(values, share, least) == pytest.approx(expected, abs=1e-3)


def test_ticks_are_round_numbers_inside_the_axis():
    assert ticks(0, 1, 4) == [0, 0.25, 0.5, 0.75, 1]
    assert ticks(-0.05, 11.3, 6, whole=True) == [0, 2, 4, 6, 8, 10]
    assert ticks(-0.5, 0.5, 6, whole=True) == [0]
    assert ticks(0.526, 0.5325, 4) == pytest.approx([0.526, 0.528, 0.53, 0.532])
    assert ticks(0, 48_000, 4) == [0, 20_000, 40_000]


def test_a_missing_value_is_a_gap_in_the_line():
    drawing = chart([1.0, 2.0, None, 4.0]).drawing
    (path,) = drawing.paths
    assert path.count("M") == 2 and path.count("L") == 1 and len(drawing.dots) == 3


def test_marks_stay_inside_the_frame():
    drawing = chart([3.0, -1.0, 2.5, 9.0]).drawing
    assert all(FRAME.left <= x <= FRAME.right and FRAME.top <= y <= FRAME.bottom for x, y in drawing.dots)
    assert all(FRAME.top <= tick.at <= FRAME.bottom for tick in drawing.rows)


def test_labels_of_small_and_large_numbers_are_short():
    small, large = chart([2e-5, 4e-5]).drawing, chart([1000.0, 4000.0]).drawing
    assert small.unit == "10⁻⁵ nats" and [t.text for t in small.rows] == ["0", "1", "2", "3", "4"]
    assert [t.text for t in large.rows] == ["0", "1k", "2k", "3k", "4k"]


def test_the_unit_of_small_values_on_a_wide_axis_is_that_of_the_axis():
    drawing = Chart("KL", "nats", "", [0, 1], {"kl": [1.6e-6, 0.0]}, least=0.02).drawing
    assert (drawing.unit, drawing.rows[0].text, drawing.rows[-1].text) == ("nats", "0", "0.02")
    assert show(1.4e-17) == "0" and show(-1.4e-17) == "0" and show(1.6e-6) == "1.6e-06"


def test_bars_stand_on_each_other():
    stacked = chart([1.0, 3.0], [1.0, None])
    assert stacked.totals == [2.0, 3.0] and stacked.ends == "2 → 3" and stacked.legend == ["part 0", "part 1"]
    assert [path.count("z") for path in stacked.drawing.paths] == [2, 1]
    assert "lowest 2, highest 3; bars stacked by part 0, part 1." in stacked.label


def test_a_long_line_is_thinned_and_keeps_its_spikes():
    points = [(float(x), 0.0) for x in range(20_000)]
    points[777] = (777.0, 5.0)
    points[1234] = (1234.0, -5.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS and {points[777], points[1234]} <= set(kept)
    assert kept == sorted(kept) and thinned(points[:MOST_POINTS]) == points[:MOST_POINTS]


def test_graph_has_no_arrow_that_a_longer_way_implies():
    graph = stage_graph({"base": [], "prepare": ["base"], "sft": ["base", "prepare"], "export": ["sft"]})
    assert graph is not None and len(graph.arrows) == 3
    heights = [graph.boxes[name][1] for name in ("base", "prepare", "sft", "export")]
    assert heights == sorted(heights) and len(set(heights)) == 4
    assert stage_graph({"base": [], "prepare": []}) is None


def test_importing_the_report_loads_nothing_heavy():
    code = "import sys, flows.report.page; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert {"matplotlib", "jax", "numpy"}.isdisjoint(loaded)
    light = {f"tuning.{name}" for name in ("allowed", "atomic", "causes", "extras", "multihost", "names", "retries")}
    assert {name for name in loaded if name.startswith("tuning.")} == light
