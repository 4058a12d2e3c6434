"""Growth of cost: tokens of a step, length of a sequence, completions of a round and vocabulary.

`python -m tests.bench.growth --write` measures every size in a process of its own: processor seconds of calls behind
the first one, the peak of memory above the idle process, programs, and what can be counted. What any size costs is the
smallest one's, and is subtracted. The command fails where a figure grows faster than its quantity by
more than half from one size to the next (one that is counted: by a hundredth), where programs grow, or memory that is
meant to be flat. Some figures have a reason to grow faster, up to the square: they are named with it.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import growth_of

RESULTS = Path(__file__).parent / "results" / "growth.json"
MEASURED, COUNTED = 1.5, 1.01
"""How much faster than the quantity a figure may grow from one size to the next."""
ATTENTION = "attention looks at each pair of tokens of a sequence"


@dataclasses.dataclass(frozen=True)
class Series:
    """Sizes of one quantity, and how figures may grow with it."""

    quantity: str
    count: str
    """Its name on the axis, and among the figures where it is one."""
    sizes: tuple[int, ...]
    linear: tuple[str, ...] = ()
    """Seconds and memory."""
    counted: tuple[str, ...] = ()
    """What is in proportion to the quantity, and exact."""
    flat: tuple[str, ...] = ()
    known: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Figures that may grow as the square, and why."""

    @property
    def shown(self) -> list[str]:
        """Figures that are drawn."""
        return [*self.linear, *self.known, *self.counted]


SERIES = {
    "tokens": Series(
        "tokens", "tokens", (4, 40, 400), ("step_seconds",), flat=("step_memory_mb", "step_programs")
    ),
    "packing": Series(
        "tokens", "examples", (160, 1600, 16000), ("packing_seconds", "packing_memory_mb"),
    ),
    "length": Series(
        "length", "length", (64, 4096, 16384), ("logps_memory_mb", "step_memory_mb"),
        flat=("logps_programs", "step_programs"),
        known={"logps_seconds": ATTENTION, "step_seconds": ATTENTION},
    ),
    "completions": Series(
        "completions", "completions", (160, 1600, 16000),
        ("score_seconds", "update_seconds", "score_memory_mb", "update_memory_mb"),
        ("stored_mb", "stored_requests", "requests"), ("score_programs", "update_programs"),
    ),
    "requests": Series(
        "completions", "requests", (64, 640, 6400), ("rollout_seconds",), flat=("rollout_memory_mb", "rollout_programs")
    ),
    "vocabulary": Series(
        "vocabulary", "vocabulary", (1000, 8000, 32000, 128000), ("step_seconds", "token_seconds", "step_memory_mb"),
        flat=("step_programs", "token_programs"),
    ),
}  # fmt: skip
SECONDS = 1800
"""The longest that one size may take."""
COLUMNS = 7
"""Of the picture."""
QUANTITIES = tuple(dict.fromkeys(series.quantity for series in SERIES.values()))


def child(series: str, size: int) -> dict[str, Any]:
    """The figures of one size, of a process of its own."""
    command = [sys.executable, "-m", "tests.bench.growth", "--child", series, str(size)]
    found = json.loads(subprocess.check_output(command, text=True, timeout=SECONDS).splitlines()[-1])
    return {SERIES[series].count: size} | found


def grown(rows: Sequence[Mapping[str, Any]], count: str, name: str) -> list[tuple[float, float]]:
    """How much a figure has grown from each size to the next but from the first, and the quantity, both above those of
    the first."""
    first, *rest = rows
    found = []
    for before, after in itertools.pairwise(rest):
        # What is nothing beside the rest cannot be compared: it counts as a tenth of what any size takes.
        least = max(before[name] - first[name], 0.1 * first[name], 1e-9)
        times = (after[count] - first[count]) / (before[count] - first[count])
        found.append(((after[name] - first[name]) / least, times))
    return found


def power(rows: Sequence[Mapping[str, Any]], count: str, name: str) -> float:
    """By which power of the quantity a figure grows from the last size but one to the last."""
    more, times = grown(rows, count, name)[-1]
    return round(math.log(max(more, 1e-9)) / math.log(times), 2)


def above(rows: Sequence[Mapping[str, Any]], series: Series) -> dict[str, str]:
    """What grows faster than the quantity though no more than its square, for a known reason: power and reason."""
    found = {}
    for name, reason in series.known.items():
        if any(more > MEASURED * times for more, times in grown(rows, series.count, name)):
            found[name] = f"power {power(rows, series.count, name)} of {series.count}: {reason}"
    return found


def faults(rows: Sequence[Mapping[str, Any]], series: Series) -> list[str]:
    """What grows faster than it should, of rows in their order."""
    found = []
    bounds = {name: (1, MEASURED) for name in series.linear} | {name: (2, MEASURED) for name in series.known}
    for name, (square, more) in (bounds | {name: (1, COUNTED) for name in series.counted}).items():
        for (times_figure, times), row in zip(grown(rows, series.count, name), rows[2:], strict=True):
            if times_figure > more * times**square:
                found.append(f"{name}: {times_figure:.1f} times for {times:.1f} at {row[series.count]} {series.count}")
    for name in series.flat:
        # The smallest size may need less, as one micro-batch does.
        most = max(row[name] for row in rows[:2])
        slack = 0 if name.endswith("programs") else max(16.0, 0.33 * most)
        if rows[-1][name] > most + slack:
            found.append(f"{name}: {most} to {rows[-1][name]} at {rows[-1][series.count]} {series.count}")
    return found


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Figures as they are printed and kept: four digits."""
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in row.items()}


def panels(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[tuple[str, str, list[Any], list[Any], bool]]:
    """Of each figure: its name, its quantity, sizes and values, and whether it is meant to grow."""
    for name, found in rows.items():
        series = SERIES[name]
        # Zeros have no place on logarithmic axes.
        drawn = [row for row in found if all(row[figure] > 0 for figure in series.shown)]
        flat = [figure for figure in series.flat if figure.endswith("mb")][:1]
        for figure in (*series.shown, *flat):
            grows = figure not in flat
            yield figure, series.count, [row[series.count] for row in drawn], [row[figure] for row in drawn], grows


def picture(rows: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Figures by their quantity on logarithmic axes; dotted lines are proportional to it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    drawn = list(panels(rows))
    height = -(-len(drawn) // COLUMNS)
    figure = Figure(figsize=(2.4 * COLUMNS, 2.3 * height), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(height, COLUMNS, squeeze=False).flat
    for axes, (name, count, counts, values, grows) in zip(places, drawn, strict=False):
        axes.loglog(counts, values, marker="o")
        if grows:
            axes.loglog(counts, [values[-1] * one / counts[-1] for one in counts], ":", color="grey")
        else:
            axes.set(yscale="linear", ylim=(0, 1.2 * max(values) or 1))
        # Those of less than a decade would lie on one another.
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(name.replace("_", " "), fontsize=9)
        axes.set_xlabel(count)
    for axes in figure.axes[len(drawn) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.growth", description=__doc__)
    parser.add_argument("--of", nargs="+", choices=QUANTITIES, default=list(QUANTITIES))
    parser.add_argument(
        "--write", action="store_true", help=f"into {RESULTS.name} and .png, what is not measured stays"
    )
    parser.add_argument("--child", nargs=2, metavar=("SERIES", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(rounded(growth_of.run(args.child[0], int(args.child[1])))), flush=True)
        return
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        # Another size loads what one has compiled.
        os.environ["RLHF_COMPILE_CACHE"] = folder
        for name in (name for name, series in SERIES.items() if series.quantity in args.of):
            series, rows = SERIES[name], []
            for size in series.sizes:
                rows.append(child(name, size))
                print(name, json.dumps(rows[-1]), flush=True)
            found = [f"{name}, {fault}" for fault in faults(rows, series)]
            powers = {figure: power(rows, series.count, figure) for figure in series.shown}
            kept[name] = {"rows": rows, "powers": powers, "above": above(rows, series), "faults": found}
            print(name, json.dumps({key: kept[name][key] for key in ("powers", "above", "faults")}), flush=True)
            failed += found
    if args.write:
        kept = {name: kept[name] for name in SERIES if name in kept}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        picture({name: found["rows"] for name, found in kept.items()}, RESULTS.with_suffix(".png"))
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()
