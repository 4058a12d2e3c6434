"""Pictures of figures over a number of things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def over(rows: Sequence[Mapping[str, Any]], count: str, names: Sequence[str], path: Path, flat: str = "") -> None:
    """Figures of rows by their number of something, on logarithmic axes: dotted lines are proportional to it.

    flat: a figure that is not meant to grow, on a plain axis.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [*names, *([flat] if flat else [])]
    figure = Figure(figsize=(2.4 * len(shown), 3), layout="constrained")
    FigureCanvasAgg(figure)
    counts = [row[count] for row in rows]
    for axes, name in zip(figure.subplots(1, len(shown)), shown, strict=True):
        values = [row[name] for row in rows]
        axes.loglog(counts, values, marker="o")
        if name == flat:
            axes.set(yscale="linear", ylim=(0, 1.2 * max(values)))
        else:
            axes.loglog(counts, [values[-1] * one / counts[-1] for one in counts], ":", color="grey")
        axes.set_title(name.replace("_", " "), fontsize=9)
        axes.set_xlabel(count)
    figure.savefig(path, dpi=110)
