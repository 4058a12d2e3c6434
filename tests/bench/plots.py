"""Pictures of figures over a number of things."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Panels:
    """Figures of rows by their number of something, on logarithmic axes: dotted lines are proportional to it."""

    rows: Sequence[Mapping[str, Any]]
    count: str
    names: Sequence[str]
    flat: str = ""
    """A figure that is not meant to grow, on a plain axis."""

    @property
    def shown(self) -> list[str]:
        """All figures, in their order."""
        return [*self.names, *([self.flat] if self.flat else [])]

    def draw(self, axes: Any, name: str) -> None:
        """One figure."""
        counts, values = [row[self.count] for row in self.rows], [row[name] for row in self.rows]
        axes.loglog(counts, values, marker="o")
        if name == self.flat:
            axes.set(yscale="linear", ylim=(0, 1.2 * max(values) or 1))
        else:
            axes.loglog(counts, [values[-1] * one / counts[-1] for one in counts], ":", color="grey")
        axes.set_title(name.replace("_", " "), fontsize=9)
        axes.set_xlabel(self.count)


def over(rows: Sequence[Mapping[str, Any]], count: str, names: Sequence[str], path: Path, flat: str = "") -> None:
    """One row of panels."""
    grid([Panels(rows, count, names, flat)], path)


def grid(panels: Sequence[Panels], path: Path) -> None:
    """Several rows of panels, one below the other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = max(len(one.shown) for one in panels)
    figure = Figure(figsize=(2.4 * columns, 3 if len(panels) == 1 else 2.3 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for of_row, one in zip(figure.subplots(len(panels), columns, squeeze=False), panels, strict=True):
        for number, axes in enumerate(of_row):
            if number < len(one.shown):
                one.draw(axes, one.shown[number])
            else:
                axes.set_axis_off()
    figure.savefig(path, dpi=110)
