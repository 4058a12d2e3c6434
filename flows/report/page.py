"""A run's report: one HTML page without scripts or links, which needs no network.

It reads the run's record, manifests, logs and tables. A sentence replaces a section that the run lacks (it failed, has
no rounds, its artifacts are not in the store), so that every run has a report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf.flows.records import WHOLE, find_run, readable_runs, summary_of
from rlhf.flows.report.advice import run_warnings
from rlhf.flows.report.charts import Chart, round_charts, step_charts
from rlhf.flows.report.decisions import decision_rows, outcome
from rlhf.flows.report.episodes import episodes
from rlhf.flows.report.formats import LABELS, duration, show, visible, when
from rlhf.flows.report.measures import Series, number, round_series
from rlhf.flows.report.reference_levels import level_notes, levels_of
from rlhf.flows.report.run_view import RunView, section
from rlhf.flows.report.samples import round_samples, samples
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.keys import published

TRAINED = {"sft": "SFT", "distill": "Distillation", "preference": "Preference", "reward": "Reward model"}
"""Supervised stages with their titles."""


def write_report(store: Store, run_name: str) -> str:
    """Write `<store>/runs/<run_name>/report.html`; return its absolute path or URL. Raises UnknownRun."""
    page = render(store, find_run(store, run_name))
    # Errors may quote file names that are not valid Unicode.
    store.write_bytes(page.encode(errors="replace"), "runs", run_name, "report.html")
    return store.address("runs", run_name, "report.html")


def render(store: Store, record: Mapping[str, Any]) -> str:
    """Return the page as text."""
    return rendered("report.html.j2", view(store, record))


def rendered(template: str, values: Mapping[str, Any]) -> str:
    """Return a page of a template."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent / "templates")
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters |= {"num": show, "duration": duration, "when": when, "visible": visible}
    return jinja.get_template(template).render(values)


def view(store: Store, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the template reads, by name."""
    run = RunView(store, record)
    series = round_series(record)
    evaluations = run.evaluations()
    compared = section(lambda: run.differences(list(evaluations)))
    stages = run.stages()
    rounds = [int(n) for n in series["round"] if n is not None]
    decision = record.get("decision")
    return {
        "record": record,
        "labels": LABELS,
        "summary": run.summary(stages),
        "series": series,
        "warnings": run_warnings(record, series, evaluations, compared.content or {}),
        "evaluations": evaluations,
        "rates": {label: _rates(metrics) for label, metrics in evaluations.items()},
        "levels": levels_of(next(iter(evaluations.values()), {})),
        "notes": level_notes(evaluations),
        "compared": compared,
        "decision": {"outcome": outcome(decision), "rows": decision_rows(record)} if decision else None,
        "charts": round_charts(series) if rounds else [],
        "numbers": _numbers(series),
        "training": [_training(run, name) for name in TRAINED if name in run.nodes and run.nodes[name].get("metrics")],
        "samples": section(lambda: samples(run, list(evaluations))),
        "rollouts": section(lambda: round_samples(run, rounds)),
        "episodes": section(lambda: episodes(run, rounds, list(evaluations))),
        "stages": stages,
        # A killed run has no end: take the last row's.
        "total": max([run.took() or 0.0, *(row.end for row in stages)]) or 1.0,
        "runs": section(lambda: _runs(store, record["recipe"]["name"])),
        "provenance": _provenance(run),
        "audit": run.store.read_json("runs", run.record["name"], "audit.json"),
    }


def _rates(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Return pass@k for doubling k and for all samples, maj@n, and scores that tell ability from form, by title."""
    samples = metrics.get("samples") or 1
    doubling = {2**i for i in range(samples.bit_length())} | {samples}
    names = {f"pass_at_{k}": f"pass@{k}" for k in sorted(doubling) if k <= samples}
    names |= {f"maj_at_{samples}": f"maj@{samples}", "answered": "With an answer"}
    names |= {"score_of_ended": "Score of those not cut off"}
    rates = {title: metrics.get(name) for name, title in names.items() if name in metrics}
    return rates | {f"Judge “{name}”": m.get("score") for name, m in metrics.get("judges", {}).items()}


def _numbers(series: Series, most: int = 400) -> dict[str, Any]:
    """Return the numbers of the charts as rows; of very long runs, every `step` rounds."""
    columns = [name for name, values in series.items() if any(v is not None for v in values)]
    step = -(-len(series["round"]) // most) or 1
    rows = list(zip(*(series[name][::step] for name in columns), strict=True))
    return {"columns": [name.replace("_", " ") for name in columns], "rows": rows, "step": step}


def _training(run: RunView, name: str) -> dict[str, Any]:
    """Return charts and final numbers of a supervised stage."""
    metrics = {k: v for k, v in run.nodes[name]["metrics"].items() if isinstance(v, int | float)}

    def charts() -> list[Chart]:
        lines = run.stored(name).local("logs/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return step_charts([json.loads(line) for line in lines if line.strip()])

    return {"title": TRAINED[name], "metrics": metrics, "charts": section(charts)}


def _runs(store: Store, recipe: str) -> dict[str, Any]:
    """Return the runs of a recipe, oldest first, and the scores of those that ended, refused ones too."""
    rows: list[dict[str, Any]] = []
    for record in readable_runs(store):
        if record["recipe"]["name"] == recipe:
            run = RunView(store, record)
            more = {"number": len(rows) + 1, "seconds": run.took(), "judged": run.evaluations()}
            rows.append(summary_of(record, store) | more)
    done = [row for row in rows if row["status"] in WHOLE and row["judged"]]
    charts = []
    for label in dict.fromkeys(label for row in done for label in row["judged"]):
        scores = [number(row["judged"].get(label, {}).get("score")) for row in done]
        title, at = f"Score, {LABELS.get(label, label)}", [row["number"] for row in done]
        charts.append(Chart(title, "score", "held-out problems", at, {label: scores}, "run", least=0.2))
    return {"rows": rows, "charts": charts if len(done) > 1 else []}


def _provenance(run: RunView) -> dict[str, Any]:
    """Return devices, versions and code of the artifacts; of the rounds only the first and the last one."""
    import yaml

    in_rounds = [name for name in run.nodes if name.startswith("round-")]
    others = [name for name in run.nodes if not name.startswith("round-")]
    # About the first and the last round: rollout, score and update are three nodes.
    artifacts = {name: run.artifact(name) for name in [*others, *in_rounds[:3], *in_rounds[-3:]]}
    manifests = {name: artifact.manifest for name, artifact in artifacts.items() if artifact is not None}
    parts = {name: m.get("key_parts", {}) for name, m in manifests.items()}
    code: dict[str, dict[str, list[str]]] = {}
    for name, part in parts.items():
        for module, fingerprint in part.get("code", {}).items():
            code.setdefault(module, {}).setdefault(fingerprint, []).append(name)
    recipe = published(run.record["recipe"])

    def by_value(value_of: Callable[[str], str | None]) -> dict[str, list[str]]:
        """Group nodes by value: a cached stage may come from another host, or from other versions."""
        nodes: dict[str, list[str]] = {}
        for name in manifests:
            if (value := value_of(name)) not in (None, "none"):
                nodes.setdefault(str(value), []).append(name)
        return nodes

    return {
        "manifests": manifests,
        "values": {
            "Device": by_value(lambda name: manifests[name].get("device")),
            "Host": by_value(lambda name: manifests[name].get("host", "unknown")),
            "Versions": by_value(lambda name: _versions(manifests[name])),
        },
        "sources": {name: part["sources"] for name, part in parts.items() if part.get("sources")},
        "code": dict(sorted(code.items())),
        "recipe": yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100),
        "seed": recipe.get("seed"),
        "store": run.store.shown,
    }


def _versions(manifest: Mapping[str, Any]) -> str:
    versions = {"python": manifest.get("python", "?")} | manifest.get("versions", {})
    return ", ".join(f"{name} {version}" for name, version in versions.items())
