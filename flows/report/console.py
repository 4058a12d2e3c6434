"""What a person at a terminal sees: a line for each stage and round, live progress, a closing table."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from flows.graph.build import Node
from flows.report.diagnostics import round_warnings
from flows.report.plots import round_series
from stages.worker import protocol

LINE_SECONDS = 10.0


def log_width() -> int | None:
    """Columns where there is no terminal: Rich takes 80, which cuts the line of a round; None on a terminal."""
    return None if sys.stdout.isatty() else 160


class ConsoleReporter:
    """Live bars on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False, width=log_width())
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started = 0.0
        self._last = 0.0
        self._rounds: dict[str, dict[str, Any]] = {}
        self._nodes: dict[str, dict[str, Any]] = {}
        self._told: set[str] = set()
        self._tried: set[str] = set()

    def stage_started(self, node: Node) -> None:
        self._started = self._last = time.monotonic()
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("[cyan]{task.description:<18}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[count]}"),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[detail]}"),
                console=self.console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(node.name, total=None, count="", detail="")
        elif not node.name.startswith("round-"):
            self.console.print(f"  {node.name:<18} started")

    def progress(self, node: Node, event: protocol.Progress) -> None:
        done, total, unit = event.done, event.total, event.unit
        detail = "  ".join(f"{k.replace('_per_second', '/s')} {v:,.4g}" for k, v in event.metrics.items())
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, count=f"{done}/{total} {unit}", detail=detail)
        elif time.monotonic() - self._last > LINE_SECONDS:
            self._last = time.monotonic()
            spent = self._last - self._started
            left = spent / max(done, 1) * (total - done)
            self.console.print(f"  {node.name:<18} {done}/{total} {unit}  {left:.0f} s left  {detail}")

    def line(self, text: str) -> None:
        self.console.print(f"  [dim]{text}[/dim]" if self.console.is_terminal else f"  {text}", markup=True)

    def stage_ended(self, node: Node, state: str, manifest: dict[str, Any], seconds: float) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None
        if node.name.startswith("round-"):
            self._round(node, state, manifest, seconds)
            return
        took = "cached" if state == "hit" else f"{seconds:.1f} s"
        mark = "[green]=[/green]" if state == "hit" else "[green]+[/green]"
        self.console.print(f"{mark} {node.name:<18} {took:>9}  {headline(node.stage, manifest['metrics'])}")

    def _round(self, node: Node, state: str, manifest: dict[str, Any], seconds: float) -> None:
        name, part = node.name.split(".")
        found = self._rounds.setdefault(name, {"seconds": 0.0, "hits": 0})
        found[part] = manifest["metrics"]
        found["seconds"] += seconds
        found["hits"] += state == "hit"
        found["nodes"] = found.get("nodes", 0) + 1
        self._nodes[node.name] = manifest
        if part == "update":
            self.console.print(round_line(name, found))
            self._warn(name, manifest["config"])

    def _warn(self, name: str, update: dict[str, Any]) -> None:
        """Each warning once, in the round in which it comes up."""
        scored = self._nodes.get(f"{name}.score", {}).get("config", {})
        series = round_series({"nodes": self._nodes, "recipe": {"rl": {"score": scored}}})
        for warning in round_warnings(series, update):
            if warning.title not in self._told:
                self._told.add(warning.title)
                self.console.print(f"! {warning.title}: {warning.text}", style="yellow", markup=False)


def round_line(name: str, found: dict[str, Any]) -> str:
    """One RL round in one line."""
    sampled, scored, updated = found.get("rollout", {}), found.get("score", {}), found["update"]
    passed = next((v for k, v in scored.items() if k.startswith("reward_") and "model" not in k), None)
    cells = [
        ("reward", scored.get("reward"), "{:.3f}"),
        ("pass", passed, "{:.3f}"),
        ("KL", updated.get("kl"), "{:.4f}"),
        ("mismatch", updated.get("mismatch_kl"), "{:.1e}"),
        ("clip", updated.get("clip_fraction"), "{:.3f}"),
        ("entropy", updated.get("entropy"), "{:.3f}"),
        ("zero-var", scored.get("zero_variance"), "{:.2f}"),
        ("tok/s", sampled.get("tokens_per_second"), "{:.0f}"),
    ]
    text = "  ".join(f"{n} {form.format(v)}" for n, v, form in cells if v is not None)
    cached = found["hits"] == found["nodes"]
    took = "cached" if cached else f"{found['seconds']:.1f} s"
    mark = "[green]=[/green]" if cached else "[green]+[/green]"
    return f"{mark} {name:<18} {took:>9}  {text}"


def headline(stage: str, metrics: dict[str, Any]) -> str:
    """The figures of a stage that people look at first."""
    match stage:
        case "base":
            return f"{metrics['parameters'] / 1e6:.1f} M parameters"
        case "prepare":
            return "  ".join(f"{k} {v}" for k, v in metrics["rows"].items())
        case "sft":
            return f"loss {metrics['loss']:.4f}  {metrics['steps']} steps  {metrics['tokens_per_second']:.0f} tok/s"
        case "reward":
            held = metrics.get("heldout_accuracy")
            shown = (
                ""
                if held is None
                else f"  held-out accuracy {held:.3f}  calibration error {metrics['calibration_error']:.3f}"
            )
            return f"loss {metrics['loss']:.4f}{shown}"
        case "distill":
            return f"loss {metrics['loss']:.4f}{_before_and_after(metrics, 'divergence')}"
        case "preference":
            held = metrics.get("heldout_accuracy")
            more = "" if held is None else f"  held-out accuracy {held:.3f}  margin {metrics['heldout_margin']:.3f}"
            return f"loss {metrics['loss']:.4f}{more}{_before_and_after(metrics, 'ranking')}"
        case "evaluate":
            return f"score {metrics['score']:.3f} [{metrics['score_low']:.3f}, {metrics['score_high']:.3f}]"
        case "export":
            return f"{metrics['bytes'] / 1e6:.0f} MB"
    return ""


def _before_and_after(metrics: dict[str, Any], name: str) -> str:
    before, after = metrics.get(f"heldout_{name}_before"), metrics.get(f"heldout_{name}")
    return "" if before is None or after is None else f"  held-out {name} {before:.3f} -> {after:.3f}"


def closing_table(evaluations: dict[str, dict[str, Any]]) -> Table:
    """The policies side by side, with intervals and the constant-answer baseline."""
    table = Table(title="Held-out problems", title_justify="left")
    for column in ("policy", "score", "95 % interval", "truncated", "mean length"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name, m in evaluations.items():
        interval = f"{m['score_low']:.3f} to {m['score_high']:.3f}"
        label = {"sft": "SFT", "distill": "distilled", "rl": "RL"}.get(name, name)
        table.add_row(label, f"{m['score']:.3f}", interval, f"{m['truncated']:.2f}", f"{m['mean_length']:.1f}")
    first = next(iter(evaluations.values()))
    if "constant_score" in first:
        table.add_row(f"always {first['constant_answer']!r}", f"{first['constant_score']:.3f}", "", "", "")
    return table
