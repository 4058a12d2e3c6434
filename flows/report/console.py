"""Console output of a run: a line for each stage and round, live progress, a closing table."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rlhf.flows.graph.build import Node
from rlhf.flows.report.advice import round_warnings
from rlhf.flows.report.formats import LABELS
from rlhf.flows.report.measures import round_series
from rlhf.flows.report.reference_levels import levels_of
from rlhf.flows.report.terminal import LastingConsole, log_width
from rlhf.stages.contract.definition import Stage
from rlhf.stages.contract.registry import stage as find_stage
from rlhf.stages.worker import protocol

if TYPE_CHECKING:
    from rlhf.stages.common.verdicts import Difference

LINE_SECONDS = 10.0


class ConsoleReporter:
    """Live bars on a terminal, else a line for each running stage every ten seconds."""

    def __init__(self, console: LastingConsole | None = None):
        self.console = console or LastingConsole(highlight=False, markup=False, width=log_width())
        self._lock = threading.RLock()
        self._bars: Progress | None = None
        """While a stage runs; shown on a terminal."""
        self._tasks: dict[str, TaskID] = {}
        self._rounds: dict[str, _Round] = {}
        self._nodes: dict[str, dict[str, Any]] = {}
        self._warned: set[str] = set()

    def stage_started(self, node: Node) -> None:
        with self._lock:
            # Of a failed try.
            self._remove(node.name)
            if self._bars is None:
                self._bars = _bars(self.console)
                self._bars.start()
            now = time.monotonic()
            self._tasks[node.name] = self._bars.add_task(node.name, total=None, count="", detail="", printed=now)
            # A round has one line, at its end.
            if not self.console.is_terminal and not node.name.startswith("round-"):
                self._print(f"  {node.name:<18} started")

    def progress(self, node: Node, event: protocol.Progress) -> None:
        detail = "  ".join(f"{k.replace('_per_second', '/s')} {v:,.4g}" for k, v in event.metrics.items())
        count = f"{event.done}/{event.total} {event.unit}"
        self._update(node.name, completed=event.done, total=event.total, count=count, detail=detail)

    def compiling(self, node: Node) -> None:
        """Explain why nothing moves."""
        self._update(node.name, detail="compiling")

    def _update(self, name: str, **fields: Any) -> None:
        """Update the bar of a stage; without a terminal, print it every LINE_SECONDS."""
        with self._lock:
            bars, task_id = self._bars, self._tasks[name]
            assert bars is not None
            bars.update(task_id, **fields)
            task = next(task for task in bars.tasks if task.id == task_id)
            now, began = time.monotonic(), task.start_time or 0.0
            if not self.console.is_terminal and now - task.fields["printed"] > LINE_SECONDS:
                bars.update(task_id, printed=now)
                # Without the first step, which compiles: rich measures between updates.
                left = "" if task.time_remaining is None else f"{task.time_remaining:.0f} s left"
                parts = (task.fields["count"], left, task.fields["detail"], f"running for {now - began:.0f} s")
                self._print(f"  {name:<18} {'  '.join(filter(None, parts))}")

    def line(self, text: str) -> None:
        self._print(f"  {text}", "dim")

    def _print(self, text: str | Text, style: str = "") -> None:
        """Print a text as it is: a completion or a path may contain Rich's tags."""
        # Scripts read the lines: do not wrap them.
        self.console.print(text if isinstance(text, Text) else Text(text, style), soft_wrap=True)

    def stage_ended(self, node: Node, state: str, manifest: dict[str, Any], seconds: float) -> None:
        with self._lock:
            self._remove(node.name)
            figures = _figures(find_stage(node.stage), state, manifest)
            if node.name.startswith("round-"):
                self._round(node, state, manifest, seconds, figures)
                return
            # The maker may be a killed run.
            maker = f"  of {run}" if state == "hit" and (run := manifest.get("run")) else ""
            self._print(_line(node.name, state == "hit", seconds, figures + maker))

    def _remove(self, name: str) -> None:
        """Remove the bar of a stage."""
        if (task := self._tasks.pop(name, None)) is not None and self._bars is not None:
            self._bars.remove_task(task)
        if not self._tasks and self._bars is not None:
            self._bars.stop()
            self._bars = None

    def run_ended(self) -> None:
        """Print the stages of rounds without a policy update."""
        with self._lock:
            for name in list(self._tasks):
                self._remove(name)
            for text in (text for of_round in self._rounds.values() for text in of_round.nodes):
                self._print(text)
            self._rounds.clear()

    def _round(self, node: Node, state: str, manifest: dict[str, Any], seconds: float, figures: str) -> None:
        """Collect the stages of a round; the policy update, its last, prints their figures in one line."""
        name, part = node.name.split(".")
        stage, line = find_stage(node.stage), _line(node.name, state == "hit", seconds, figures)
        if part == "evaluate":
            # Of the policy that the round has made: after the round's line.
            self._print(line)
            return
        of_round = self._rounds.setdefault(name, _Round())
        of_round.nodes.append(line)
        of_round.seconds += seconds
        of_round.cached &= state == "hit"
        # Not of refills and baselines.
        if part == stage.name and figures:
            of_round.figures.append(figures)
        # A manifest has `config` and `metrics`, as an entry of a record.
        self._nodes[node.name] = manifest
        if stage.makes == "policy":
            self._print(_line(name, of_round.cached, of_round.seconds, "  ".join(of_round.figures)))
            del self._rounds[name]
            self._warn(name, manifest["config"])

    def _warn(self, name: str, update: dict[str, Any]) -> None:
        """Print each warning once, in the first round that it applies to."""
        score = self._nodes.get(f"{name}.score", {}).get("config", {})
        record = {"nodes": self._nodes, "recipe": {"rl": {"score": score, "update": update}}}
        for warning in round_warnings(record, round_series(record)):
            if warning.title not in self._warned:
                self._warned.add(warning.title)
                self._print(f"! {warning.title}: {warning.text}", "yellow")


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("[cyan]{task.description:<18}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[detail]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        # A step may take minutes: rich's default forgets it after 30 s.
        speed_estimate_period=math.inf,
        get_time=time.monotonic,
    )


@dataclasses.dataclass
class _Round:
    """The content of a round's line."""

    seconds: float = 0.0
    cached: bool = True
    figures: list[str] = dataclasses.field(default_factory=list)
    nodes: list[Text] = dataclasses.field(default_factory=list)
    """A line for each of its stages, if the round does not end."""


def _figures(stage: Stage, state: str, manifest: dict[str, Any]) -> str:
    """Return the headline of an artifact; a cached one has no speed."""
    metrics = manifest["metrics"]
    if state == "hit":
        metrics = {name: value for name, value in metrics.items() if not name.endswith("per_second")}
    return stage.figures(metrics)


def _line(name: str, cached: bool, seconds: float, figures: str) -> Text:
    took = "cached" if cached else f"{seconds:.1f} s"
    return Text.assemble(("=" if cached else "+", "green"), f" {name:<18} {took:>9}  {figures}")


def closing_table(evaluations: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table of the policies with intervals, the constant answer, and reference levels of the environment."""
    first = next(iter(evaluations.values()))
    judged = f"{first['problems'] - left_out} of " if (left_out := first.get("not_applicable")) else ""
    table = Table(title=f"Held-out problems, {judged}{first['problems']}", title_justify="left")
    tops = [name for name in (f"pass_at_{first['samples']}", f"maj_at_{first['samples']}") if name in first]
    shown = [name.replace("_at_", "@") for name in tops]
    for column in ("policy", "score", "95 % interval", *shown, "cut off", "mean tokens"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    levels = levels_of(first)
    for number, (name, m) in enumerate(evaluations.items()):
        interval = f"{m['score_low']:.3f} to {m['score_high']:.3f}"
        rates = ["" if m.get(top) is None else f"{m[top]:.3f}" for top in tops]
        rest = [f"{m['truncated']:.2f}", f"{m['mean_length']:.1f}"]
        table.add_row(LABELS.get(name, name), f"{m['score']:.3f}", interval, *rates, *rest)
        # After the untrained policy, so that trained ones stand below the levels that they must exceed.
        for level in levels if number == 0 else ():
            table.add_row(level.title, f"{level.value:.3f}", style="dim")
    if "constant_score" in first:
        table.add_row(f"always {first['constant_answer']!r}", f"{first['constant_score']:.3f}")
    return table


def difference_lines(differences: Mapping[str, Mapping[str, Difference]]) -> list[str]:
    """Return a line for each pair of policies (`rlhf.stages.common.verdicts.differences`)."""
    texts = {
        f"{LABELS.get(name, name)} against {LABELS.get(other, other)}": (
            f"{of.mean:+.3f} [{of.low:+.3f}, {of.high:+.3f}]  {of.verdict}"
        )
        for name, others in differences.items()
        for other, of in others.items()
    }
    width = max(map(len, texts), default=0)
    return [f"{title:<{width}}  {text}" for title, text in texts.items()]
