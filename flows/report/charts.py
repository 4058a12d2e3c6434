"""Small charts of a run's numbers and the graph of its stages: their content, and the place of every mark.

The page's template draws a chart as SVG in the page's own colours and font, light or dark. `curves_png_data`
is a picture of the main curves for Prefect. It alone needs matplotlib, and does without pyplot, which would keep
every figure in memory.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flows.report.formats import show
from flows.report.measures import ENDS, MAIN, MEASURES, PASS_RATES, PHASES, Measure, Series, number, round_series

PNG_LIMIT = 120_000
"""Characters that the URL of `curves_png_data` stays below."""
STACKS = {
    "prompts": (PASS_RATES, "Prompts by their totals", "prompts",
                "share of completions whose total is above the middle of the round's lowest and highest: under a "
                "fifth, to four fifths, over"),
    "episodes": (tuple(ENDS), "Episodes by their end", "episodes", "of their own, by a limit, or failed: no reward"),
    "seconds": (PHASES, "Seconds by phase", "seconds", "when the round was made, here or in an earlier run"),
}  # fmt: skip
"""Parts, title, unit and note of the charts whose bars add up the series `<name>_<part>`."""
STEP_MEASURES = (
    Measure("loss", "", "Loss", "nats", "training batch, before the step"),
    Measure("heldout_loss", "", "Held-out loss", "nats", "examples kept out of training, after the step"),
    Measure("heldout_accuracy", "", "Held-out accuracy", "share", "pairs kept out of training, ranked rightly", True),
    Measure("accuracy", "", "Pair accuracy", "share", "training pairs ranked rightly", True),
    Measure("grad_norm", "", "Gradient norm", "norm", "before clipping"),
)
"""Metrics that stages which train on examples log at every step."""

DOTS_UP_TO = 40
"""Points that are marked by dots; more would hide the line."""
MOST_POINTS = 400
"""About two for each unit of width; more would make the page large and look the same."""
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Frame(NamedTuple):
    """The canvas of a chart and the plot inside it, in units of the SVG."""

    width: float = 230.0
    height: float = 126.0
    left: float = 42.0
    right: float = 226.0
    top: float = 7.0
    bottom: float = 98.0


FRAME = Frame()

Points = list[tuple[float, float | None]]
"""Places in units of the SVG; None in the place of a missing value."""


class Tick(NamedTuple):
    """A place on an axis, in units of the SVG, and its label."""

    at: float
    text: str


@dataclasses.dataclass(frozen=True)
class Chart:
    """A line, or bars that add up several series, over rounds or steps. Every chart has a number at least."""

    title: str
    unit: str
    note: str
    x: Sequence[int]
    series: Mapping[str, Sequence[float | None]]
    """Values by name, one for each of `x`; the chart is stacked bars where there are several."""
    over: str = "round"
    share: bool = False
    least: float = 0.0
    """The least range of the axis (`Measure.least`)."""
    main: bool = False
    """Whether it is one of those to look at first."""

    @property
    def legend(self) -> list[str]:
        """Names of the parts of a bar."""
        return list(self.series) if self.stacked else []

    @property
    def stacked(self) -> bool:
        return len(self.series) > 1

    @property
    def totals(self) -> list[float]:
        """The numbers at hand, those of a bar added up."""
        columns = zip(*self.series.values(), strict=True)
        known = [[v for v in column if v is not None] for column in columns]
        return [sum(column) for column in known if column]

    @property
    def ends(self) -> str:
        """First and last value."""
        totals = self.totals
        return show(totals[0]) if len(totals) == 1 else f"{show(totals[0])} → {show(totals[-1])}"

    @property
    def label(self) -> str:
        """The chart in a sentence: its text alternative."""
        totals = self.totals
        text = f"{self.title} in {self.unit} over {len(self.x)} {self.over}s: first {show(totals[0])}, "
        text += f"last {show(totals[-1])}, lowest {show(min(totals))}, highest {show(max(totals))}"
        return f"{text}; bars stacked by {', '.join(self.series)}." if self.stacked else f"{text}."

    @property
    def drawing(self) -> Drawing:
        """The marks of the chart, for the template."""
        # Bars need half their width beside the first and the last; a single point stands in the middle.
        margin = max(0.6 if self.stacked else 0.0, 0.02 * (self.x[-1] - self.x[0])) or 0.5
        across = _Scale(self.x[0] - margin, self.x[-1] + margin, FRAME.left, FRAME.right)
        totals = self.totals
        low, high = limits([0.0, *totals] if self.stacked else totals, self.share, self.least)
        up = _Scale(low, high, FRAME.bottom, FRAME.top)
        dots: Points = []
        if self.stacked:
            paths = _bars(self.x, self.series, across, up)
        else:
            (values,) = self.series.values()
            points = [(across(x), None if v is None else up(v)) for x, v in zip(self.x, values, strict=True)]
            paths = [_line(thinned(points))]
            dots = [p for p in points if p[1] is not None and len(points) <= DOTS_UP_TO]
        # A power of ten in the unit keeps the labels of very small numbers short.
        largest = max(abs(low), abs(high))
        power = math.floor(math.log10(largest)) if 0 < largest < 2e-3 else 0
        unit = f"10{str(power).translate(SUPERSCRIPT)} {self.unit}" if power else self.unit
        rows = [Tick(up(v), _tick_text(v / 10.0**power)) for v in ticks(low, high, 5)]
        columns = [Tick(across(v), _tick_text(v)) for v in ticks(across.low, across.high, 6, whole=True)]
        return Drawing(unit, columns, rows, paths, dots)


class Drawing(NamedTuple):
    """A chart in units of the SVG."""

    unit: str
    columns: list[Tick]
    rows: list[Tick]
    paths: list[str]
    """Path data of the line, or of the bars of each series."""
    dots: Points
    frame: Frame = FRAME


# -- which charts there are --------------------------------------------------------------------


def round_charts(series: Series) -> list[Chart]:
    """A chart of each measure that any round has, with every reward on its own, then the stacked bars."""
    rounds = [int(n) for n in series["round"] if n is not None]
    rewards = []
    for key, values in series.items():
        # The judging reward is the pass rate: one chart of it is enough.
        if key.startswith("reward_") and values != series["pass_rate"]:
            title = f"Reward “{key.removeprefix('reward_')}”"
            rewards.append(Measure(key, "score", title, "mean", "before its weight", least=0.2))
    charts = []
    for m in (*MEASURES[:2], *rewards, *MEASURES[2:]):
        known = [v is not None for v in series[m.key]]
        # Evaluations may be many rounds apart: the line joins them. In other series a missing value is a gap.
        shown = known if m.phase == "evaluate" else [True] * len(known)
        if any(known):
            values = list(itertools.compress(series[m.key], shown))
            at = list(itertools.compress(rounds, shown))
            line, first = {m.key: values}, m.key in MAIN
            charts.append(Chart(m.title, m.unit, m.note, at, line, share=m.share, least=m.least, main=first))
    for name, (parts, title, unit, note) in STACKS.items():
        stack = {part: series[f"{name}_{part}"] for part in parts}
        if any(v is not None for values in stack.values() for v in values):
            charts.append(Chart(title, unit, note, rounds, stack))
    return charts


def step_charts(lines: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Charts over steps, from the metrics lines of a stage that trains on examples."""
    charts = []
    for m in STEP_MEASURES:
        points = [(line["step"], number(line[m.key])) for line in lines if "step" in line and m.key in line]
        if any(v is not None for _, v in points):
            steps, values = zip(*points, strict=True)
            charts.append(Chart(m.title, m.unit, m.note, steps, {m.key: values}, "step", m.share))
    return charts


# -- geometry ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Scale:
    """Values low..high onto start..end of the SVG."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low), 1)


# Shares are means of floats: one that is 1 may be a little above.
ROUNDING = 1e-3


def limits(values: Sequence[float], share: bool, least: float = 0.0) -> tuple[float, float]:
    """Ends of an axis for these values: 0 to 1 for a share, from 0 where that is not far off, else close around.

    least: the least range, below which a change is drawn as small as it is.
    """
    low, high = min(values), max(values)
    if share and low >= -ROUNDING and high <= 1 + ROUNDING:
        return 0.0, 1.0
    if 0 <= low <= max(0.6 * high, least - high):
        return 0.0, max(1.06 * high, least) or 1.0
    largest = max(abs(low), abs(high))
    # Rounding noise around a constant is drawn flat; three digits of a label would not tell its values apart.
    margin = 0.1 * largest if high - low < 1e-3 * largest else 0.05 * (high - low)
    margin = max(margin, (least - (high - low)) / 2)
    return low - margin, high + margin


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten within low..high, at most `most` + 1 of them."""
    least = max((high - low) / most, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(least))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    # The tolerance keeps ticks at the ends, which float division may put just outside.
    step = next(f * power for f in factors if f * power >= least * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _tick_text(value: float) -> str:
    return f"{value / 1000:.5g}k" if abs(value) >= 1000 else f"{value:.5g}"


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most about `most` points: the lowest and the highest of each stretch, so that no spike is lost."""
    stretch = -(-2 * len(points) // most)
    if stretch <= 2:
        return points
    kept: Points = []
    for start in range(0, len(points), stretch):
        known = [(x, y) for x, y in points[start : start + stretch] if y is not None]
        if known:
            kept += sorted({min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])})
        else:
            kept.append((points[start][0], None))
    return kept


def _line(points: Points) -> str:
    """Path data; a missing value is a gap."""
    text, command = "", "M"
    for x, y in points:
        text += "" if y is None else f"{command}{x:g} {y:g}"
        command = "M" if y is None else "L"
    return text


def _bars(x: Sequence[int], series: Mapping[str, Sequence[float | None]], across: _Scale, up: _Scale) -> list[str]:
    """Path data of each series: a bar on top of those of the series before."""
    floors = [0.0] * len(x)
    paths = []
    for values in series.values():
        tops = [floor + (v or 0.0) for floor, v in zip(floors, values, strict=True)]
        paths.append("".join(
            f"M{across(at - 0.4):g} {up(floor):g}V{up(top):g}H{across(at + 0.4):g}V{up(floor):g}z"
            for at, floor, top in zip(x, floors, tops, strict=True)
            if top > floor
        ))  # fmt: skip
        floors = tops
    return paths


# -- the graph of stages -----------------------------------------------------------------------

BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, EDGE = 132.0, 44.0, 16.0, 40.0, 8.0


@dataclasses.dataclass(frozen=True)
class StageGraph:
    """Stages as boxes from the top down, each below all that it has inputs from, in units of the SVG."""

    boxes: dict[str, tuple[float, float]]
    """Upper left corners by name."""
    arrows: list[tuple[float, float, float, float]]
    """Middle of a box's lower side, middle of another's upper side."""
    width: float
    height: float
    box_width: float = BOX_WIDTH
    box_height: float = BOX_HEIGHT


def stage_graph(inputs: Mapping[str, Sequence[str]]) -> StageGraph | None:
    """Places of the stages, given the inputs of each, sources first; None where nothing depends on anything."""
    depth: dict[str, int] = {}
    above: dict[str, set[str]] = {}
    layers: dict[int, list[str]] = {}
    arrows: list[tuple[str, str]] = []
    for name, sources in inputs.items():
        known = [source for source in sources if source in depth]
        depth[name] = 1 + max((depth[source] for source in known), default=-1)
        above[name] = set(known).union(*(above[source] for source in known))
        layers.setdefault(depth[name], []).append(name)
        # An arrow that a longer way implies is left out: the drawing stays readable, the table has the keys.
        implied = set().union(*(above[source] for source in known))
        arrows += [(source, name) for source in known if source not in implied]
    if len(layers) < 2:
        return None
    width = max(map(len, layers.values())) * (BOX_WIDTH + GAP_X) + GAP_X
    boxes = {}
    for level, names in layers.items():
        left = (width - len(names) * (BOX_WIDTH + GAP_X) + GAP_X) / 2
        for place, name in enumerate(names):
            boxes[name] = left + place * (BOX_WIDTH + GAP_X), EDGE + level * (BOX_HEIGHT + GAP_Y)
    lines = []
    for source, target in arrows:
        (x1, y1), (x2, y2) = boxes[source], boxes[target]
        lines.append((x1 + BOX_WIDTH / 2, y1 + BOX_HEIGHT, x2 + BOX_WIDTH / 2, y2))
    height = 2 * EDGE + len(layers) * (BOX_HEIGHT + GAP_Y) - GAP_Y
    return StageGraph(boxes, lines, width, height)


# -- a picture for Prefect ---------------------------------------------------------------------


def curves_png_data(record: Mapping[str, Any]) -> str | None:
    """Reward, pass rate, KL and entropy as a `data:image/png;base64,` URL below PNG_LIMIT; None without rounds."""
    charts = round_charts(round_series(record))
    titles = [m.title for m in MEASURES[:4]]
    chosen = [chart for chart in charts if chart.title in titles]
    if not chosen:
        return None
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8, 4.6), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        for place, chart in enumerate(chosen):
            axes = figure.add_subplot(2, 2, place + 1)
            (series,) = chart.series.values()
            values = [math.nan if v is None else v for v in series]
            axes.plot(chart.x, values, color="#0b66c3", marker="o", markersize=3, linewidth=1.6)
            axes.set(title=chart.title, xlabel=chart.over, ylabel=chart.unit)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.grid(alpha=0.25)
            if chart.share:
                axes.set_ylim(-0.02, 1.02)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=80)
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return url if len(url) < PNG_LIMIT else None
