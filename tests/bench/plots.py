"""Pictures of figures over a number of things."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = 7


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
        from matplotlib.ticker import NullFormatter

        counts, values = [row[self.count] for row in self.rows], [row[name] for row in self.rows]
        axes.loglog(counts, values, marker="o")
        if name == self.flat:
            axes.set(yscale="linear", ylim=(0, 1.2 * max(values) or 1))
        else:
            axes.loglog(counts, [values[-1] * one / counts[-1] for one in counts], ":", color="grey")
        # Those of less than a decade would lie on one another.
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(name.replace("_", " "), fontsize=9)
        axes.set_xlabel(self.count)


def over(rows: Sequence[Mapping[str, Any]], count: str, names: Sequence[str], path: Path, flat: str = "") -> None:
    """One row of panels."""
    grid([Panels(rows, count, names, flat)], path)


def grid(panels: Sequence[Panels], path: Path) -> None:
    """The figures of all, in rows of COLUMNS."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [(one, name) for one in panels for name in one.shown]
    columns = min(COLUMNS, len(drawn))
    rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(2.4 * columns, 3 if rows == 1 else 2.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    places = iter(figure.subplots(rows, columns, squeeze=False).flat)
    for one, name in drawn:
        one.draw(next(places), name)
    for axes in places:
        axes.set_axis_off()
    figure.savefig(path, dpi=110)
