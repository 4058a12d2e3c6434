"""The output of a run on the console: a line for each stage and round, live progress, a closing table."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rlhf.flows.graph.build import Node
from rlhf.flows.report.advice import learned_rewards, round_warnings
from rlhf.flows.report.measures import round_series
from rlhf.flows.report.reference_levels import levels_of, verdict
from rlhf.flows.report.terminal import LastingConsole, log_width
from rlhf.stages.contract.definition import Stage
from rlhf.stages.contract.registry import by_section
from rlhf.stages.contract.registry import stage as find_stage
from rlhf.stages.worker import protocol

if TYPE_CHECKING:
    from rlhf.stages.common.verdicts import Difference

LINE_SECONDS = 10.0


class ConsoleReporter:
    """Live bars on a terminal, a line every ten seconds elsewhere; of each stage that is at work."""

    def __init__(self, console: Console | None = None):
        self.console = console or LastingConsole(highlight=False, markup=False, width=log_width())
        self._lock = threading.RLock()
        self._bars: Progress | None = None
        """On a terminal, while a stage is at work."""
        self._at_work: dict[str, _AtWork] = {}
        self._rounds: dict[str, _Round] = {}
        self._nodes: dict[str, dict[str, Any]] = {}
        self._warned: set[str] = set()

    def stage_started(self, node: Node) -> None:
        with self._lock:
            # Of a try that has failed.
            self._left(node.name)
            at = self._at_work[node.name] = _AtWork(time.monotonic())
            if self.console.is_terminal:
                if self._bars is None:
                    self._bars = _bars(self.console)
                    self._bars.start()
                at.bar = self._bars.add_task(node.name, total=None, count="", detail="")
            # A round has one line, at its end.
            elif not node.name.startswith("round-"):
                self._print(f"  {node.name:<18} started")

    def progress(self, node: Node, event: protocol.Progress) -> None:
        done, total, unit = event.done, event.total, event.unit
        detail = "  ".join(f"{k.replace('_per_second', '/s')} {v:,.4g}" for k, v in event.metrics.items())
        with self._lock:
            at = self._at_work[node.name]
            # The first step compiles: how long the others take is known from the second on.
            at.first = at.first or (time.monotonic(), done)
            if self._bars is not None and at.bar is not None:
                count = f"{done}/{total} {unit}"
                self._bars.update(at.bar, completed=done, total=total, count=count, detail=detail)
            elif at.is_due():
                since, before = at.first
                each = (time.monotonic() - since) / (done - before) if done > before else None
                left = "" if each is None else f"{each * (total - done):.0f} s left  "
                self._print(f"  {node.name:<18} {done}/{total} {unit}  {left}{detail}")

    def compiling(self, node: Node) -> None:
        """Says why nothing moves, as often as progress would be told, and since when."""
        with self._lock:
            at = self._at_work[node.name]
            if self._bars is not None and at.bar is not None:
                self._bars.update(at.bar, detail="compiling")
            elif at.is_due():
                self._print(f"  {node.name:<18} compiling, {time.monotonic() - at.started:.0f} s since its start")

    def line(self, text: str) -> None:
        self._print(f"  {text}", "dim")

    def _print(self, text: str | Text, style: str = "") -> None:
        """Prints a text as it is: a completion or a path may have what Rich takes for its own tags."""
        # Not cut into lines where no terminal shows it: scripts read them.
        self.console.print(text if isinstance(text, Text) else Text(text, style), soft_wrap=True)

    def stage_ended(self, node: Node, state: str, manifest: dict[str, Any], seconds: float) -> None:
        with self._lock:
            self._left(node.name)
            if node.name.startswith("round-"):
                self._round(node, state, manifest, seconds)
                return
            figures = _figures(find_stage(node.stage), state, manifest)
            # Also what a run has finished that was killed.
            maker = f"  of {run}" if state == "hit" and (run := manifest.get("run")) else ""
            self._print(_line(node.name, state == "hit", seconds, figures + maker))

    def _left(self, name: str) -> None:
        """Takes away the bar of a stage that is not at work any more, and the last one's place."""
        at = self._at_work.pop(name, None)
        if self._bars is None:
            return
        if at is not None and at.bar is not None:
            self._bars.remove_task(at.bar)
        if not self._at_work:
            self._bars.stop()
            self._bars = None

    def run_ended(self) -> None:
        """Shows the stages of rounds that have no line, since their policy update was not wanted or has failed."""
        with self._lock:
            for name in list(self._at_work):
                self._left(name)
            for line in self._rounds.values():
                for text in line.nodes:
                    self._print(text)
                line.nodes.clear()

    def _round(self, node: Node, state: str, manifest: dict[str, Any], seconds: float) -> None:
        """Collects the nodes of a round; the policy update, its last, prints their figures in one line."""
        name, part = node.name.split(".")
        stage = find_stage(node.stage)
        if part == "evaluate":
            # Of the policy that the round has made: behind the round's line.
            judged = _line(node.name, state == "hit", seconds, stage.figures(manifest["metrics"]))
            self._print(judged)
            return
        line = self._rounds.setdefault(name, _Round())
        line.nodes.append(_line(node.name, state == "hit", seconds, _figures(stage, state, manifest)))
        line.seconds += seconds
        line.cached &= state == "hit"
        # Refills and baselines have scores of their own: the line shows those of the round's rollouts.
        if part == stage.name:
            line.figures.append(_figures(stage, state, manifest))
        # Manifests have `config` and `metrics` as the entries of a record do, which `round_series` reads.
        self._nodes[node.name] = manifest
        if stage.makes == "policy":
            figures = "  ".join(f for f in line.figures if f)
            self._print(_line(name, line.cached, line.seconds, figures))
            line.nodes.clear()
            self._warn(name, manifest["config"])

    def _warn(self, name: str, update: dict[str, Any]) -> None:
        """Prints each warning once, in the first round that it applies to."""
        scored = self._nodes.get(f"{name}.score", {}).get("config", {})
        record = {"nodes": self._nodes, "recipe": {"rl": {"score": scored}}}
        series = round_series(record)
        learned = learned_rewards(scored.get("rewards", {}))
        for warning in round_warnings(series, update, learned):
            if warning.title not in self._warned:
                self._warned.add(warning.title)
                self._print(f"! {warning.title}: {warning.text}", "yellow")


@dataclasses.dataclass
class _AtWork:
    """What is shown of a stage that is at work."""

    started: float
    bar: TaskID | None = None
    first: tuple[float, int] | None = None
    """When it first told its progress, and what that was."""
    told: float = 0.0
    """When it last had a line."""

    def is_due(self) -> bool:
        """Whether it is time for a line of it, which it then gets."""
        now = time.monotonic()
        if now - max(self.told, self.started) <= LINE_SECONDS:
            return False
        self.told = now
        return True


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("[cyan]{task.description:<18}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[detail]}"),
        console=console,
        transient=True,
    )


@dataclasses.dataclass
class _Round:
    """The content of a round's line."""

    seconds: float = 0.0
    cached: bool = True
    figures: list[str] = dataclasses.field(default_factory=list)
    nodes: list[Text] = dataclasses.field(default_factory=list)
    """A line for each of its stages, for a round that does not get to its end."""


def _figures(stage: Stage, state: str, manifest: dict[str, Any]) -> str:
    """The headline of an artifact; what was not made now has no speed."""
    metrics = manifest["metrics"]
    if state == "hit":
        metrics = {name: value for name, value in metrics.items() if not name.endswith("per_second")}
    return stage.figures(metrics)


def _line(name: str, cached: bool, seconds: float, figures: str) -> Text:
    took = "cached" if cached else f"{seconds:.1f} s"
    return Text.assemble(("=" if cached else "+", "green"), f" {name:<18} {took:>9}  {figures}")


def policy_title(label: str) -> str:
    """The title, in tables, of the policy after the recipe's section `label`."""
    titles = (s.title for s in by_section().values() if s.makes == "policy" and s.section.split(".")[0] == label)
    return next(titles, label)


def closing_table(evaluations: Mapping[str, Mapping[str, Any]]) -> Table:
    """The policies side by side, with intervals, the constant answer, and what an environment gives unlearnt."""
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
        table.add_row(policy_title(name), f"{m['score']:.3f}", interval, *rates, *rest)
        # Behind the policy that is not trained, so that those that learn stand below what they must exceed.
        for level in levels if number == 0 else ():
            table.add_row(level.title, f"{level.value:.3f}", style="dim")
    if "constant_score" in first:
        table.add_row(f"always {first['constant_answer']!r}", f"{first['constant_score']:.3f}")
    return table


def level_line(evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    """Whether the last policy is above what one reaches that does not look; empty where no level is known."""
    label, metrics = list(evaluations.items())[-1]
    return verdict(label, metrics)


def difference_lines(differences: Mapping[str, Mapping[str, Difference]]) -> list[str]:
    """A line for each policy and each that it is compared with (`rlhf.stages.common.verdicts.differences`)."""
    compared = {
        f"{policy_title(name)} against {policy_title(other)}": difference_text(found)
        for name, others in differences.items()
        for other, found in others.items()
    }
    width = max(map(len, compared), default=0)
    return [f"{title:<{width}}  {text}" for title, text in compared.items()]


def difference_text(difference: Difference) -> str:
    """A paired difference with its interval and what it means: `better` or `worse` where the interval excludes 0."""
    return f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]  {difference.verdict}"
