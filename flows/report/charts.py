"""Small charts of a run's numbers, drawn with matplotlib: SVG in the colours of the page, and a PNG for Prefect.

Drawing loads matplotlib, without pyplot, which would keep every figure in memory.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf.flows.report.formats import show
from rlhf.flows.report.measures import ENDS, MAIN, MEASURES, PASS_RATES, PHASES, Measure, Series, number, round_series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PNG_LIMIT = 120_000
"""Longest URL of `curves_png_data`, in characters."""
STACKS = {
    "prompts": (PASS_RATES, "Prompts by their totals", "prompts",
                "share of completions whose total is above the middle of the round's lowest and highest: under a "
                "fifth, to four fifths, over"),
    "episodes": (tuple(ENDS), "Episodes by their end", "episodes", "by themselves, by a limit, or failed: no reward"),
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
"""Metrics that supervised stages log at every step."""

DOTS_UP_TO = 40
"""Most points with dots; more would hide the line."""
WIDTH, HEIGHT = 230.4, 126.0
"""Size of a chart in the page, in points."""
COLOURS = {
    "#0b66c3": "var(--series-1)", "#d9730d": "var(--series-2)", "#128a6a": "var(--series-3)", "#1b2430": "var(--ink)",
}  # fmt: skip
"""Colours of a chart, and the page's variables for them, which depend on light or dark mode."""
*_, INK = COLOURS
STYLE: Any = {
    "font.size": 8, "font.sans-serif": ["DejaVu Sans"], "axes.formatter.limits": (-3, 4),
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "grid.color": INK, "grid.alpha": 0.15,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Chart:
    """A line, or stacked bars of several series, over rounds or steps. Every chart has at least one number."""

    title: str
    unit: str
    note: str
    x: Sequence[int]
    series: Mapping[str, Sequence[float | None]]
    """Values by name, one for each of `x`; several are stacked bars."""
    over: str = "round"
    share: bool = False
    least: float = 0.0
    """Least range of the axis (`Measure.least`)."""
    main: bool = False
    """Whether it is one of the first charts of the page."""

    @property
    def legend(self) -> list[str]:
        """Names of the parts of a bar; empty for a line."""
        return list(self.series) if len(self.series) > 1 else []

    @property
    def totals(self) -> list[float]:
        """The known numbers; a bar's parts are added up."""
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
        """The text alternative of the chart."""
        totals = self.totals
        text = f"{self.title} in {self.unit} over {len(self.x)} {self.over}s: first {show(totals[0])}, "
        text += f"last {show(totals[-1])}, lowest {show(min(totals))}, highest {show(max(totals))}"
        return f"{text}; bars stacked by {', '.join(self.series)}." if self.legend else f"{text}."

    def draw(self, axes: Axes) -> None:
        """Draw the chart in the axes of a figure; a missing value is a gap."""
        from matplotlib.ticker import MaxNLocator

        totals, colours = self.totals, iter(COLOURS)
        if self.legend:
            totals, floors = [0.0, *totals], [0.0] * len(self.x)
            for values in self.series.values():
                heights = [v or 0.0 for v in values]
                axes.bar(self.x, heights, bottom=floors, color=next(colours))
                floors = [floor + height for floor, height in zip(floors, heights, strict=True)]
        else:
            (line,) = self.series.values()
            dots = "." if len(self.x) <= DOTS_UP_TO else ""
            axes.plot(self.x, [math.nan if v is None else v for v in line], color=next(colours), marker=dots)
        across, up = (self.x[0] - 0.6, self.x[-1] + 0.6), limits(totals, self.share, self.least)
        axes.set(xlabel=self.over, ylabel=self.unit, xlim=across, ylim=up)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        axes.grid(axis="y")

    @property
    def svg(self) -> str:
        """The chart as an SVG element of the page."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        # Ids come from the salt: a page has many charts.
        with rc_context(STYLE | {"svg.fonttype": "none", "svg.hashsalt": repr(self)}):
            figure, out = Figure(figsize=(WIDTH / 72, HEIGHT / 72)), io.StringIO()
            self.draw(figure.add_axes((0.19, 0.25, 0.79, 0.66)))
            figure.savefig(out, format="svg", transparent=True)
        # Drop the head of the file, before the first definitions.
        body = re.sub(r'<g id="[^"]*"', "<g", out.getvalue().partition("</defs>")[2])
        for colour, of_page in COLOURS.items():
            body = body.replace(colour, of_page)
        return f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}">{body}'


def round_charts(series: Series) -> list[Chart]:
    """Return a chart of each measure that a round has, one of every other reward, and the stacked bars."""
    rounds = [int(n) for n in series["round"] if n is not None]
    # The judging reward is the pass rate: one chart is enough.
    names = [key for key, values in series.items() if key.startswith("reward_") and values != series["pass_rate"]]
    rewards = [
        Measure(key, "score", f"Reward “{key.removeprefix('reward_')}”", "mean", "before its weight", least=0.2)
        for key in names
    ]
    charts = []
    for m in (*MEASURES[:2], *rewards, *MEASURES[2:]):
        points = [(n, v) for n, v in zip(rounds, series[m.key], strict=True) if v is not None]
        if points:
            at, values = zip(*points, strict=True)
            charts.append(Chart(m.title, m.unit, m.note, at, {m.key: values}, "round", m.share, m.least, m.key in MAIN))
    for name, (parts, title, unit, note) in STACKS.items():
        stack = {part: series[f"{name}_{part}"] for part in parts}
        if any(v is not None for values in stack.values() for v in values):
            charts.append(Chart(title, unit, note, rounds, stack))
    return charts


def step_charts(lines: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Return charts over steps, from the metrics lines of a supervised stage."""
    charts = []
    for m in STEP_MEASURES:
        points = [(line["step"], number(line[m.key])) for line in lines if "step" in line and m.key in line]
        if any(v is not None for _, v in points):
            steps, values = zip(*points, strict=True)
            charts.append(Chart(m.title, m.unit, m.note, steps, {m.key: values}, "step", m.share))
    return charts


def limits(values: Sequence[float], share: bool, least: float = 0.0) -> tuple[float, float]:
    """Return the ends of an axis: 0 to 1 for a share, from 0 if that is near, else close around the values.

    least: the least range, so that a meaningless change looks small.
    """
    low, high = min(values), max(values)
    # A share is a mean of floats, which may exceed 1 by rounding.
    if share and low >= -1e-3 and high <= 1 + 1e-3:
        return 0.0, 1.0
    if 0 <= low <= max(0.6 * high, least - high):
        return 0.0, max(1.06 * high, least) or 1.0
    margin = max(0.05 * (high - low), 1e-3 * abs(high), (least - (high - low)) / 2)
    return low - margin, high + margin


def curves_png_data(record: Mapping[str, Any]) -> str | None:
    """Return reward, pass rate, KL and entropy as a `data:` URL of a PNG; None without rounds or if it is too long."""
    titles = [m.title for m in MEASURES[:4]]
    charts = [chart for chart in round_charts(round_series(record)) if chart.title in titles]
    if not charts:
        return None
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure, out = Figure(figsize=(8, 4.6), layout="constrained", facecolor="white"), io.BytesIO()
        for number, chart in enumerate(charts, 1):
            chart.draw(figure.add_subplot(2, 2, number, title=chart.title))
        figure.savefig(out, format="png", dpi=80)
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return url if len(url) < PNG_LIMIT else None
