"""A run's report: one HTML page without scripts or links that needs no network.

Everything comes from the run's record, manifests, logs and tables. What a run lacks (it failed,
has no rounds, its artifacts are not in the store) is left out with a sentence, so that every run
has a report.
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
from rlhf.flows.report.reference_levels import guess, levels_of, verdict
from rlhf.flows.report.run_view import RunView, section
from rlhf.flows.report.samples import round_samples, samples
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.keys import published

TRAINED = {"sft": "SFT", "distill": "Distillation", "preference": "Preference", "reward": "Reward model"}
"""Stages that train on examples, with their titles."""


def write_report(store: Store, run_name: str) -> str:
    """Writes `<store>/runs/<run_name>/report.html` and returns its absolute path or URL.

    Raises UnknownRun where the store has no such run.
    """
    page = render(store, find_run(store, run_name))
    # Errors may quote file names that are not valid Unicode; the page is written all the same.
    store.write_bytes(page.encode(errors="replace"), "runs", run_name, "report.html")
    return store.address("runs", run_name, "report.html")


def render(store: Store, record: Mapping[str, Any]) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent / "templates")
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"num": show, "duration": duration, "when": when, "visible": visible}
    return found.get_template("report.html.j2").render(view(store, record))


def view(store: Store, record: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the template reads, by name."""
    run = RunView(store, record)
    series = round_series(record)
    evaluations = run.evaluations()
    decided = record.get("decision")
    compared = section(lambda: run.differences(list(evaluations)))
    stages = run.stages()
    rounds = [int(n) for n in series["round"] if n is not None]
    return {
        "record": record,
        "labels": LABELS,
        "summary": run.summary(stages),
        "known": {name: [v for v in values if v is not None] for name, values in series.items()},
        "warnings": run_warnings(record, series, evaluations, compared.content or {}),
        "failures": [(n, e.get("error", "")) for n, e in run.nodes.items() if e["state"] == "failed"]
        or [("The run", error) for error in [record.get("error")] if error],
        "evaluation": _evaluation(run, evaluations),
        "compared": compared,
        "decision": {"outcome": outcome(decided), "rows": decision_rows(record)} if decided else None,
        "chosen": run.nodes["select"]["metrics"] if "digest" in run.nodes.get("select", {}) else None,
        "charts": round_charts(series) if rounds else [],
        "numbers": _numbers(series),
        "training": [_training(run, name) for name in TRAINED if name in run.nodes and run.nodes[name].get("metrics")],
        "samples": section(lambda: samples(run, list(evaluations))),
        "rollouts": section(lambda: round_samples(run, rounds)),
        "episodes": section(lambda: episodes(run, rounds, list(evaluations))),
        "stages": stages,
        # At least the last row's end: a run that was killed has no end of its own.
        "total": max([run.took() or 0.0, *(row.end for row in stages)]) or 1.0,
        "runs": section(lambda: _runs(store, record["recipe"]["name"])),
        "provenance": _provenance(run),
        "audit": run.store.read_json("runs", run.record["name"], "audit.json"),
    }


def _evaluation(run: RunView, evaluations: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The policies' scores, with the places of their intervals on one axis in percent; None without policies."""
    if not evaluations:
        return None
    # Scores of a user's judge may lie outside 0 to 1.
    low = min(0.0, *(m["score_low"] for m in evaluations.values()))
    high = max(1.0, *(m["score_high"] for m in evaluations.values()))

    def place(value: float) -> float:
        return round(100 * (value - low) / (high - low), 2)

    rows = []
    for label, m in evaluations.items():
        ends = {"zero": 0.0, "score": m["score"], "low": m["score_low"], "high": m["score_high"]}
        bar = {name: place(value) for name, value in ends.items()}
        cached = run.nodes[f"evaluate.{label}"]["state"] == "hit"
        rows.append({"label": label, "metrics": m, "bar": bar, "rates": _rates(m), "cached": cached})
    # All policies are evaluated on the same problems, so what concerns the problems is the same in each.
    first = next(iter(evaluations.values()))
    constant = None
    if first.get("constant_score") is not None:
        score = first["constant_score"]
        constant = {"score": score, "answer": first["constant_answer"], "at": place(score)}
    levels = levels_of(first)
    blind = first["levels"]["blind"] if levels else None
    return {
        "rows": rows,
        "constant": constant,
        "levels": levels,
        "blind_at": None if blind is None else place(blind),
        "guess": guess(evaluations),
        "against_blind": [text for label, m in evaluations.items() if (text := verdict(label, m))][-1:],
        "first": first,
        "left_out": first.get("not_applicable") or 0,
        "settings": run.record["recipe"].get("evaluate") or {},
        "range": (low, high),
    }


def _rates(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """pass@k, for k that double and for all samples, maj@n, and what tells ability from form, by their titles."""
    samples = metrics.get("samples") or 1
    doubling = {2**i for i in range(samples.bit_length())} | {samples}
    names = {f"pass_at_{k}": f"pass@{k}" for k in sorted(doubling) if k <= samples}
    names |= {f"maj_at_{samples}": f"maj@{samples}", "answered": "With an answer"}
    names |= {"score_of_ended": "Score of those not cut off"}
    rates = {title: metrics.get(name) for name, title in names.items() if name in metrics}
    return rates | {f"Judge “{name}”": m.get("score") for name, m in metrics.get("judges", {}).items()}


def _numbers(series: Series, most: int = 400) -> dict[str, Any]:
    """The numbers behind the charts as rows; of very long runs, every `step` rounds."""
    columns = [name for name, values in series.items() if any(v is not None for v in values)]
    step = -(-len(series["round"]) // most) or 1
    rows = list(zip(*(series[name][::step] for name in columns), strict=True))
    return {"columns": [name.replace("_", " ") for name in columns], "rows": rows, "step": step}


def _training(run: RunView, name: str) -> dict[str, Any]:
    """Charts and closing numbers of a stage that trains on examples."""
    metrics = {k: v for k, v in run.nodes[name]["metrics"].items() if isinstance(v, int | float)}

    def charts() -> list[Chart]:
        lines = run.stored(name).local("logs/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return step_charts([json.loads(line) for line in lines if line.strip()])

    return {"title": TRAINED[name], "metrics": metrics, "charts": section(charts)}


def _runs(store: Store, recipe: str) -> dict[str, Any]:
    """The runs of a recipe, oldest first, and the scores of those that came to their end, refused ones too."""
    rows: list[dict[str, Any]] = []
    for record in readable_runs(store):
        if record["recipe"]["name"] == recipe:
            run = RunView(store, record)
            judged = run.evaluations()
            more = {
                "number": len(rows) + 1,
                "seconds": run.took(),
                "judged": judged,
                "last": list(judged.values())[-1:],
            }
            rows.append(summary_of(record, store) | more)
    done = [row for row in rows if row["status"] in WHOLE and row["judged"]]
    charts = []
    for label in dict.fromkeys(label for row in done for label in row["judged"]):
        scores = [number(row["judged"].get(label, {}).get("score")) for row in done]
        title, at = f"Score, {LABELS.get(label, label)}", [row["number"] for row in done]
        charts.append(Chart(title, "score", "held-out problems", at, {label: scores}, "run", least=0.2))
    return {"rows": rows, "charts": charts if len(done) > 1 else []}


def _provenance(run: RunView) -> dict[str, Any]:
    """Devices, versions and code behind the artifacts.

    Of the rounds only the first and the last are read: all share their code.
    """
    import yaml

    in_rounds = [name for name in run.nodes if name.startswith("round-")]
    others = [name for name in run.nodes if not name.startswith("round-")]
    # About the first and the last round: rollout, score and update are three nodes.
    artifacts = {name: run.artifact(name) for name in [*others, *in_rounds[:3], *in_rounds[-3:]]}
    manifests = {name: artifact.manifest for name, artifact in artifacts.items() if artifact is not None}
    parts = {name: m.get("key_parts", {}) for name, m in manifests.items()}

    def by_value(value_of: Callable[[dict[str, Any]], str | None]) -> dict[str, list[str]]:
        """Nodes by value. A cached stage may have been made elsewhere, or with other versions."""
        nodes: dict[str, list[str]] = {}
        for name, manifest in manifests.items():
            value = value_of(manifest)
            if value is not None:
                nodes.setdefault(value, []).append(name)
        return nodes

    code: dict[str, dict[str, list[str]]] = {}
    for name, part in parts.items():
        for module, fingerprint in part.get("code", {}).items():
            code.setdefault(module, {}).setdefault(fingerprint, []).append(name)
    recipe = published(run.record["recipe"])
    devices = by_value(lambda m: m.get("device"))
    return {
        "manifests": manifests,
        "devices": {device: names for device, names in devices.items() if device != "none"},
        "hosts": by_value(lambda m: m.get("host", "unknown")),
        "versions": by_value(_versions),
        "sources": {name: part["sources"] for name, part in parts.items() if part.get("sources")},
        "code": dict(sorted(code.items())),
        "recipe": yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100),
        "seed": recipe.get("seed"),
        "store": run.store.shown,
    }


def _versions(manifest: Mapping[str, Any]) -> str:
    versions = {"python": manifest.get("python", "?")} | manifest.get("versions", {})
    return ", ".join(f"{name} {version}" for name, version in versions.items())
