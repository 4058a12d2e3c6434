"""Charts: axes that fit the numbers, lines with gaps, stacked bars, and the colours of the page."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from rlhf.flows.report.charts import Chart, limits


def chart(*columns, over="round", share=False):
    series = {f"part {n}": values for n, values in enumerate(columns)}
    return Chart("Loss", "nats", "a note", range(len(columns[0])), series, over, share)


@pytest.mark.parametrize(
    ("values", "share", "least", "expected"),
    [
        ([0.2, 0.9], True, 0.0, (0.0, 1.0)),
        ([1.0, 1.0000001], True, 0.0, (0.0, 1.0)),
        ([0.2, 1.1], True, 0.0, (0.0, 1.06 * 1.1)),
        ([0.0, 0.0], False, 0.0, (0.0, 1.0)),
        ([10.0, 11.0], False, 0.0, (9.95, 11.05)),
        ([-2.0, -2.0], False, 0.0, (-2.002, -1.998)),
        ([0.532, 0.531], False, 0.2, (0.43155, 0.63145)),
        ([1e-9, 3e-9], False, 1e-3, (0.0, 1e-3)),
        ([0.0, 0.37], False, 0.02, (0.0, 1.06 * 0.37)),
    ],
)
def test_the_axis_fits_the_numbers_and_a_change_that_means_nothing_looks_small(values, share, least, expected):
    assert limits(values, share, least) == pytest.approx(expected, abs=1e-4)


def drawn(chart):
    """The SVG of a chart, taken apart."""
    return ET.fromstring(chart.svg.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1))


def lines(chart):
    """The path data of the chart's line or bars, which have the colours of its series."""
    paths = [p for p in drawn(chart).iter("path") if "id" not in p.attrib and "--series-" in p.attrib["style"]]
    return [p.attrib["d"] for p in paths]


def test_a_missing_value_is_a_gap_in_the_line():
    gap = chart([1.0, 2.0, None, 4.0])
    (path,) = lines(gap)
    assert path.count("M") == 2 and path.count("L") == 1
    assert sum("--series-1" in use.attrib["style"] for use in drawn(gap).iter("use")) == 3


def test_bars_stand_on_each_other():
    stacked = chart([1.0, 3.0], [1.0, None])
    assert stacked.totals == [2.0, 3.0] and stacked.ends == "2 → 3" and stacked.legend == ["part 0", "part 1"]
    bars = [re.findall(r"[\d.]+", path)[1::2] for path in lines(stacked)]
    # The second series begins where the first ends.
    assert len(bars) == 4 and bars[2][0] == bars[0][2] and bars[3][0] == bars[3][2]
    assert "lowest 2, highest 3; bars stacked by part 0, part 1." in stacked.label


def test_a_chart_has_the_colours_of_the_page_and_ids_of_its_own():
    one, two = chart([1.0, 2.0]).svg, chart([1.0, 3.0]).svg
    assert one == chart([1.0, 2.0]).svg and "#" not in re.sub(r'(href=")?#\w{11}\b', "", one)
    ids = [set(re.findall(r' id="([^"]+)"', svg)) for svg in (one, two)]
    assert all(ids) and not ids[0] & ids[1]
    assert "http" not in one and "<style" not in one


def test_importing_the_report_loads_nothing_heavy():
    code = "import sys, rlhf.flows.report.page; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert {"matplotlib", "jax", "numpy"}.isdisjoint(loaded)
    light = {
        f"rlhf.tuning.{name}" for name in ("allowed", "atomic", "errors", "extras", "multihost", "names", "retries")
    }
    assert {name for name in loaded if name.startswith("rlhf.tuning.")} == light
