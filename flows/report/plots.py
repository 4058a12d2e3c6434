"""Numbers of a run by round, small SVG figures and the drawn stage graph for its report, one PNG for Prefect.

Matplotlib is imported when a figure is drawn, never before, and without pyplot: no window, no
figure that stays behind.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import functools
import hashlib
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

PHASES = ("rollout", "score", "update")
PNG_LIMIT = 120_000
PASSED = ("few", "some", "most")

# Stand-ins that matplotlib writes into the SVG; the page's own colours take their place, light or dark.
INK = "#010203"
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
SERIES = {"#010204": "var(--series-1)", "#010205": "var(--series-2)", "#010206": "var(--series-3)"}


@dataclasses.dataclass(frozen=True)
class Curve:
    """A figure of the report."""

    title: str
    label: str
    """What the figure shows, in words: its text alternative."""
    note: str
    svg: str
    ends: str = ""
    """First and last value."""
    legend: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Measure:
    """A number that every round has."""

    key: str
    title: str
    unit: str
    part: str
    metric: str
    note: str
    share: bool = False


MEASURES = (
    Measure("reward", "Reward", "weighted sum", "score", "reward", "mean of the totals of a round"),
    Measure("pass_rate", "Pass rate", "share", "score", "", "right completions: mean of the reward that judges", True),
    Measure("kl", "KL to the reference", "nats / token", "update", "kl", "how far the policy has moved from its start"),
    Measure("entropy", "Entropy", "nats / token", "update", "entropy", "spread of the next-token distribution"),
    Measure("mean_length", "Completion length", "tokens", "rollout", "mean_length", "mean, end token included"),
    Measure("truncated", "Cut off", "share", "rollout", "truncated", "completions that hit max_tokens", True),
    Measure("mismatch_kl", "Mismatch KL", "nats / token", "update", "mismatch_kl", "sampler against trainer; near 0"),
    Measure("clip_fraction", "Clip fraction", "share", "update", "clip_fraction", "tokens whose ratio was clipped"),
    Measure(
        "zero_variance", "Zero-variance prompts", "share", "score", "zero_variance",
        "prompts whose completions all score alike: no signal", True,
    ),
    Measure("clip_high", "Clipped above", "share", "update", "clip_high", "tokens with a gain past the range"),
    Measure("clip_low", "Clipped below", "share", "update", "clip_low", "tokens with a loss past the range"),
    Measure("effective_sample_size", "Effective sample size", "share", "update", "effective_sample_size",
            "what the weights between sampler and trainer leave", True),
    Measure("ratio_p99", "Ratio, 99 %", "ratio", "update", "ratio_p99", "trainer to sampler, 99 % of the tokens below"),
    Measure("ratio_p01", "Ratio, 1 %", "ratio", "update", "ratio_p01", "trainer to sampler, 1 % of the tokens below"),
    Measure("advantage_spread", "Advantage spread", "std", "update", "advantage_spread", "over the tokens trained on"),
    Measure("value_explained", "Value, explained", "share", "update", "value_explained", "variance of the returns"),
    Measure("grad_norm", "Gradient norm", "norm", "update", "grad_norm", "mean over the steps, before clipping"),
    Measure("tokens_per_second", "Sampling speed", "tokens / s", "rollout", "tokens_per_second", "generated tokens"),
    Measure("train_tokens_per_second", "Training speed", "tokens / s", "update", "tokens_per_second",
            "tokens of prompts and completions, forward passes left out"),
)  # fmt: skip


def judged_reward(recipe: Mapping[str, Any]) -> str | None:
    """The reward whose mean is the pass rate: the evaluation's judge, else exact_match, else the first rule."""
    rewards = ((recipe.get("rl") or {}).get("score") or {}).get("rewards") or {}
    rules = {n: r.get("function") for n, r in sorted(rewards.items()) if r.get("function") != "reward_model"}
    for wanted in ((recipe.get("evaluate") or {}).get("judge"), "exact_match"):
        for name, function in rules.items():
            if function == wanted:
                return name
    return next(iter(rules), None)


def round_series(record: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Lists of equal length by name, one entry a round; None where a round lacks the number.

    Names are `round`, the keys of MEASURES, `reward_<name>` for each reward, and `seconds_<phase>`
    (what making took, in this run or in the one that made it). All lists are empty without rounds.
    """
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for name, entry in record.get("nodes", {}).items():
        match = re.fullmatch(r"round-(\d+)\.(\w+)", name)
        if match and entry.get("metrics"):
            found.setdefault(int(match[1]), {})[match[2]] = entry
    numbers = sorted(found)
    judged = judged_reward(record.get("recipe", {}))

    def column(part: str, metric: str, inside: bool = True) -> list[float | None]:
        entries = [found[n].get(part, {}) for n in numbers]
        return [_number((e.get("metrics", {}) if inside else e).get(metric)) for e in entries]

    series: dict[str, list[Any]] = {"round": numbers}
    for m in MEASURES:
        series[m.key] = column(m.part, m.metric or f"reward_{judged}")
    names = {k for n in numbers for k in found[n].get("score", {}).get("metrics", {}) if k.startswith("reward_")}
    for name in sorted(names - {"reward_std"}):
        series[name] = column("score", name)
    for phase in PHASES:
        series[f"seconds_{phase}"] = column(phase, "made_seconds", inside=False)
    for place, name in enumerate(PASSED):
        rows = [found[n].get("update", {}).get("metrics", {}).get("pass_histogram") for n in numbers]
        series[f"prompts_{name}"] = [None if not r else _share_of_bins(r, place) for r in rows]
    return series


def _share_of_bins(counts: Sequence[int], place: int) -> float:
    """Prompts in the first bin of a histogram of pass rates, in those between, or in the last."""
    return float((counts[0], sum(counts[1:-1]), counts[-1])[place])


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def show(value: float | None, digits: int = 3) -> str:
    """A number for people: three significant digits, thousands kept whole."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def duration(seconds: float | None) -> str:
    """4.2 s, 3 min 20 s, 1 h 05 min."""
    if seconds is None:
        return "–"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


@functools.lru_cache(maxsize=4096)
def seconds_at(text: str) -> float:
    """A moment of a record as seconds."""
    return datetime.datetime.fromisoformat(text).timestamp()


def when(text: str) -> str:
    """A moment in UTC."""
    return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def round_table(series: Mapping[str, list[Any]], most: int = 400) -> dict[str, Any]:
    """The numbers behind the curves as rows; of very long runs, every so many rounds."""
    columns = [k for k, values in series.items() if k != "round" and any(v is not None for v in values)]
    step = -(-len(series["round"]) // most) or 1
    rows = [[series[c][i] for c in ("round", *columns)] for i in range(0, len(series["round"]), step)]
    return {"columns": [c.replace("_", " ") for c in columns], "rows": rows, "step": step}


def round_curves(series: Mapping[str, list[Any]]) -> list[Curve]:
    """One small figure for each measure that any round has, and the seconds by phase."""
    rounds = series["round"]
    curves = []
    components = [
        Measure(k, f"Reward “{k.removeprefix('reward_')}”", "mean", "score", k, "before its weight")
        for k in series
        if k.startswith("reward_") and series[k] != series["pass_rate"]
    ]
    for m in (*MEASURES[:2], *components, *MEASURES[2:]):
        values = series.get(m.key, [])
        if any(v is not None for v in values):
            curves.append(curve(m.title, rounds, values, "round", m.unit, m.note, share=m.share))
    passed = {n: series.get(f"prompts_{n}", []) for n in PASSED}
    if any(v is not None for values in passed.values() for v in values):
        label = f"Stacked bars of prompts by the share of their completions that are right over {len(rounds)} rounds."
        note = "under a fifth of a prompt's completions right, between, over four fifths"
        svg = _bars("passed", rounds, passed, "prompts")
        curves.append(Curve("Prompts by pass rate", label, note, svg, legend=tuple(passed)))
    stacks = {p: series[f"seconds_{p}"] for p in PHASES if any(v is not None for v in series[f"seconds_{p}"])}
    if stacks:
        totals = [sum(v or 0.0 for v in column) for column in zip(*stacks.values(), strict=True)]
        label = f"Stacked bars of seconds by phase ({', '.join(stacks)}) over {len(rounds)} rounds; "
        label += f"a round takes {show(min(totals))} to {show(max(totals))} s in all."
        note = "when the round was made, here or in an earlier run"
        ends = f"{show(totals[0])} → {show(totals[-1])} s" if len(totals) > 1 else f"{show(totals[0])} s"
        curves.append(Curve("Seconds by phase", label, note, _bars("seconds", rounds, stacks), ends, tuple(stacks)))
    return curves


def stage_curves(lines: Sequence[Mapping[str, Any]], place: str) -> list[Curve]:
    """Loss, accuracy and gradient norm by step, from the metrics lines of SFT or the reward model."""
    wanted = (
        ("loss", "Loss", "nats", "training batch, before the step"),
        ("accuracy", "Pair accuracy", "share", "training pairs ranked rightly"),
        ("grad_norm", "Gradient norm", "norm", "before clipping"),
    )
    curves = []
    for key, title, unit, note in wanted:
        points = [(line["step"], _number(line.get(key))) for line in lines if "step" in line and key in line]
        if any(v is not None for _, v in points):
            steps, values = zip(*points, strict=True)
            curves.append(curve(title, steps, values, "step", unit, note, unit == "share", place))
    return curves


def curve(
    title: str,
    x: Sequence[int],
    y: Sequence[float | None],
    over: str,
    unit: str,
    note: str,
    share: bool = False,
    place: str = "round",
) -> Curve:
    """A line over rounds or steps with its text alternative; `place` and title are one of a kind on a page."""
    known = [v for v in y if v is not None]
    ends = show(known[0]) if len(known) == 1 else f"{show(known[0])} → {show(known[-1])}"
    label = f"{title} in {unit} over {len(x)} {over}s: first {show(known[0])}, last {show(known[-1])}, "
    label += f"lowest {show(min(known))}, highest {show(max(known))}."
    return Curve(title, label, note, _line(f"{place} {title}", x, y, over, unit, share), ends)


def graph_places(stages: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Places for drawing the stages, from the top down by depth; each stage has `name` and `from`, sources first."""
    depth: dict[str, int] = {}
    above: dict[str, set[str]] = {}
    layers: dict[int, list[dict[str, Any]]] = {}
    for row in stages:
        name, sources = row["name"], [f for f in row["from"] if f in depth]
        depth[name] = 1 + max((depth[f] for f in sources), default=-1)
        above[name] = set(sources).union(*(above[f] for f in sources))
        layers.setdefault(depth[name], []).append(row)
    if len(layers) < 2:
        return None
    wide, high, gap_x, gap_y = 132, 44, 16, 40
    width = max(len(rows) for rows in layers.values()) * (wide + gap_x) + gap_x
    boxes: dict[str, dict[str, Any]] = {}
    for level, rows in layers.items():
        left = (width - len(rows) * (wide + gap_x) + gap_x) / 2
        for place, row in enumerate(rows):
            boxes[row["name"]] = {"x": left + place * (wide + gap_x), "y": 8 + level * (high + gap_y), "row": row}
    # An arrow that a longer way implies is left out: the drawing stays readable, the table has the keys.
    pairs = [(f, r["name"]) for r in stages for f in r["from"] if f in depth]
    direct = [(a, b) for a, b in pairs if not any(a in above[c] for c, d in pairs if d == b and c != a)]
    middle = wide / 2
    lines = [(boxes[a]["x"] + middle, boxes[a]["y"] + high, boxes[b]["x"] + middle, boxes[b]["y"]) for a, b in direct]
    height = 16 + len(layers) * (high + gap_y) - gap_y
    return {"boxes": list(boxes.values()), "lines": lines, "width": width, "height": height, "wide": wide, "high": high}


# -- drawing -----------------------------------------------------------------------------------


def _style() -> Any:
    return {
        "svg.fonttype": "none", "font.size": 8.5, "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK,
        "axes.linewidth": 0.6, "xtick.color": INK, "ytick.color": INK, "xtick.major.width": 0.6,
        "ytick.major.width": 0.6, "xtick.major.size": 2.5, "ytick.major.size": 2.5, "axes.spines.top": False,
        "axes.spines.right": False, "figure.facecolor": "none", "axes.facecolor": "none", "svg.hashsalt": "rlhf",
        "axes.labelpad": 2.0, "path.simplify": True, "path.simplify_threshold": 0.5, "text.usetex": False,
    }  # fmt: skip


def _axes(over: str, unit: str, largest: float = 1.0) -> tuple[Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(3.2, 1.75))
    axes = figure.add_axes((0.185, 0.215, 0.79, 0.735))
    axes.set_xlabel(over)
    power = math.floor(math.log10(largest)) if 0 < largest < 2e-3 else 0
    scale = 10.0**power
    axes.set_ylabel(f"10{str(power).translate(SUPERSCRIPT)} {unit}" if power else unit)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda v, _: f"{v / scale:.3g}" if abs(v) < 1000 else f"{v / 1000:.3g}k")
    )
    axes.grid(axis="y", color=INK, alpha=0.13, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _line(name: str, x: Sequence[int], y: Sequence[float | None], over: str, unit: str, share: bool) -> str:
    import matplotlib

    with matplotlib.rc_context(_style()):
        known = [v for v in y if v is not None]
        figure, axes = _axes(over, unit, max(map(abs, known)))
        values = [math.nan if v is None else v for v in y]
        few = len(x) <= 40
        axes.plot(x, values, color="#010204", linewidth=1.6, marker="o" if few else None, markersize=2.6, clip_on=False)
        if share and min(known) >= 0 and max(known) <= 1:
            axes.set_ylim(0, 1)
        elif min(known) >= 0 and min(known) < 0.6 * max(known):
            axes.set_ylim(0, 1.06 * max(known))
        elif min(known) == max(known):
            axes.set_ylim(known[0] - max(1e-9, abs(known[0]) * 0.1), known[0] + max(1e-9, abs(known[0]) * 0.1))
        _around(axes, x)
        return _inline(figure, name)


def _bars(name: str, x: Sequence[int], stacks: Mapping[str, Sequence[float | None]], unit: str = "seconds") -> str:
    import matplotlib

    with matplotlib.rc_context(_style()):
        figure, axes = _axes("round", unit)
        floor = [0.0] * len(x)
        for colour, values in zip(SERIES, stacks.values(), strict=False):
            heights = [v or 0.0 for v in values]
            axes.bar(x, heights, 0.8, bottom=floor, color=colour, linewidth=0)
            floor = [a + b for a, b in zip(floor, heights, strict=True)]
        _around(axes, x, 0.6)
        return _inline(figure, name)


def _around(axes: Any, x: Sequence[int], least: float = 0.0) -> None:
    """Limits of the x axis: a single round stands in the middle, and no tick is beside the data."""
    margin = max(least, 0.02 * (x[-1] - x[0])) or 0.5
    axes.set_xlim(x[0] - margin, x[-1] + margin)


def _inline(figure: Any, name: str) -> str:
    """The figure as an `<svg>` to put into a page: no size of its own, the page's colours and font, ids of its own."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", text)
    text = re.sub(r'(<svg[^>]*?)\swidth="[^"]*"\sheight="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.S)
    text = text.replace("xlink:href", "href").replace(INK, "currentColor")
    for stand_in, colour in SERIES.items():
        text = text.replace(stand_in, colour)
    text = re.sub(r"; font-family: [^;\"]*|font-family: [^;\"]*;?", "", text)
    # Several figures share a page: an id is kept only where something points at it, with the figure's mark.
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
    wanted = {a or b for a, b in used}
    mark = "f" + hashlib.sha256(name.encode()).hexdigest()[:6]
    text = re.sub(r'\sid="([^"]+)"', lambda m: f' id="{mark}-{m[1]}"' if m[1] in wanted else "", text)
    text = re.sub(r'href="#', f'href="#{mark}-', text)
    text = text.replace("url(#", f"url(#{mark}-")
    # Two decimals of a point are enough for a drawing; labels, which stand between tags, keep theirs.
    text = re.sub(r"<[^>]+>", lambda m: re.sub(r"(\d\.\d\d)\d+", r"\1", m[0]), text)
    return re.sub(r"\s*\n\s*", " ", text).strip()


def curves_png_data(record: Mapping[str, Any]) -> str | None:
    """Reward, pass rate, KL and entropy as a `data:image/png;base64,` URL below 120 kB; None without rounds."""
    series = round_series(record)
    chosen = [m for m in MEASURES[:4] if any(v is not None for v in series[m.key])]
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
        for place, m in enumerate(chosen):
            axes = figure.add_subplot(2, 2, place + 1)
            values = [math.nan if v is None else v for v in series[m.key]]
            axes.plot(series["round"], values, color="#0b66c3", marker="o", markersize=3, linewidth=1.6)
            axes.set(title=m.title, xlabel="round", ylabel=m.unit)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.grid(alpha=0.25)
            if m.share:
                axes.set_ylim(-0.02, 1.02)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=80)
    data = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return data if len(data) < PNG_LIMIT else None
