"""A run's report: one HTML page that needs nothing beside itself, no script and no network.

Everything comes from the run's record, manifests, logs and tables. What a run lacks (it failed,
has no rounds, its artifacts are gone) is left out with a sentence, so that a report can always
be written.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.records import find_run
from flows.report.diagnostics import alarms_of
from flows.report.plots import (
    PHASES,
    duration,
    graph_places,
    round_curves,
    round_series,
    round_table,
    seconds_at,
    show,
    stage_curves,
    when,
)
from stages.store.artifacts import MANIFEST, Artifact, ArtifactError, Store

LABELS = {"base": "base", "sft": "SFT", "distill": "distilled", "preference": "preference", "rl": "RL"}
TRAINED = {"sft": "SFT", "distill": "Distillation", "preference": "Preference", "reward": "Reward model"}
STATES = {"hit": "cached", "made": "made", "failed": "failed", "running": "unfinished"}
SAMPLES = 12
LONGEST = 1200
UNSEEN = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"


def write_report(store: Store, run_name: str) -> str:
    """Writes `<store>/runs/<run_name>/report.html` and returns its absolute path or URL.

    Raises UnknownRun where the store has no such run.
    """
    page = render(store, find_run(store, run_name))
    # Errors may quote file names that are no Unicode; the page is written all the same.
    store.write_bytes(page.encode(errors="replace"), "runs", run_name, "report.html")
    path = store.join("runs", run_name, "report.html")
    return path if store.is_local else store.fs.unstrip_protocol(path)


def render(store: Store, record: dict[str, Any]) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"num": show, "duration": duration, "when": when, "visible": visible}
    return environment.get_template("report.html.j2").render(view(store, record))


def view(store: Store, record: dict[str, Any]) -> dict[str, Any]:
    """What the template shows."""
    run = Run(store, record)
    series = round_series(record)
    evaluations = run.evaluations()
    stages = run.stages()
    return {
        "record": record,
        "labels": LABELS,
        "summary": _summary(run, stages),
        "known": {k: [v for v in values if v is not None] for k, values in series.items()},
        "alarms": alarms_of(record, series, evaluations),
        "failures": [(n, e.get("error", "")) for n, e in run.nodes.items() if e.get("state") == "failed"],
        "evaluation": _evaluation(run, evaluations),
        "curves": round_curves(series) if series["round"] else [],
        "numbers": round_table(series),
        "training": [t for name, title in TRAINED.items() if (t := run.training(name, title))],
        "samples": _optional(lambda: _samples(run, list(evaluations))),
        "rollouts": _optional(lambda: _rollouts(run, series["round"])),
        "stages": stages,
        "graph": graph_places(stages),
        "provenance": _provenance(run),
    }


def _optional(make: Callable[[], Any]) -> dict[str, Any]:
    """{"found": value or None, "missing": why}: an artifact that is gone costs its section, not the report."""
    try:
        return {"found": make(), "missing": ""}
    except (ArtifactError, OSError, KeyError, ValueError) as e:
        return {"found": None, "missing": f"{type(e).__name__}: {e}"}


class Run:
    """A run's record with what the store holds of it."""

    def __init__(self, store: Store, record: dict[str, Any]):
        self.store = store
        self.record = record
        self.nodes: dict[str, dict[str, Any]] = record.get("nodes", {})
        self._artifacts: dict[str, Artifact | None] = {}

    def artifact(self, name: str) -> Artifact | None:
        """The artifact of a finished node. Reads its manifest only: a report never moves a damaged artifact."""
        if name not in self._artifacts:
            entry = self.nodes.get(name, {})
            manifest = None
            if entry.get("state") in ("hit", "made"):
                with contextlib.suppress(ArtifactError, OSError):
                    manifest = self.store.read_json("artifacts", entry["stage"], entry["key"], MANIFEST)
            self._artifacts[name] = Artifact(self.store, manifest) if manifest else None
        return self._artifacts[name]

    def rows(self, name: str, part: str, columns: Sequence[str]) -> list[dict[str, Any]]:
        """Some columns of a table of a node's artifact: token ids and logprobs would cost most of the time."""
        import pyarrow.parquet as pq

        artifact = self.artifact(name)
        if artifact is None:
            raise ArtifactError(f"the artifact of {name} is not in the store")
        files = sorted(artifact.local(part).glob("*.parquet"))
        return [row for path in files for row in pq.read_table(path, columns=list(columns)).to_pylist()]

    def evaluations(self) -> dict[str, dict[str, Any]]:
        """Metrics by label, in the order of `LABELS`."""
        found = {n.removeprefix("evaluate."): e for n, e in self.nodes.items() if n.startswith("evaluate.")}
        ordered = sorted(found, key=lambda k: list(LABELS).index(k) if k in LABELS else len(LABELS))
        return {k: found[k]["metrics"] for k in ordered if "score" in (found[k].get("metrics") or {})}

    def training(self, name: str, title: str) -> dict[str, Any] | None:
        """Curves and closing numbers of a stage that trains on examples; None where the run has none."""
        entry = self.nodes.get(name)
        if entry is None or not entry.get("metrics"):
            return None

        def curves() -> Any:
            artifact = self.artifact(name)
            if artifact is None:
                raise ArtifactError(f"the artifact of {name} is not in the store")
            text = artifact.local("logs/metrics.jsonl").read_text()
            return stage_curves([json.loads(line) for line in text.splitlines() if line.strip()], name)

        metrics = {k: v for k, v in entry["metrics"].items() if isinstance(v, int | float)}
        return {"name": name, "title": title, "metrics": metrics} | _optional(curves)

    def stages(self) -> list[dict[str, Any]]:
        """A row for each node, planned ones that were not reached included; rounds are folded into one row."""
        begin = seconds_at(self.record["started"])
        spans = {n: (seconds_at(e["started"]) - begin, e.get("seconds") or 0.0) for n, e in self.nodes.items()}
        ended = seconds_at(self.record["ended"]) - begin if self.record.get("ended") else 0.0
        total = max([ended, *(s + took for s, took in spans.values())], default=0.0) or 1.0
        edges = self._edges()
        rows: dict[str, dict[str, Any]] = {}
        for name in dict.fromkeys([*edges, *self.nodes]):
            entry = self.nodes.get(name, {})
            start, took = spans.get(name, (0.0, 0.0))
            row = {
                "name": name,
                "stage": entry.get("stage", name.partition(".")[0]),
                "state": STATES.get(entry.get("state", ""), "not reached"),
                "seconds": entry.get("seconds"),
                "made_seconds": entry.get("made_seconds"),
                "key": entry.get("key", ""),
                "digest": entry.get("digest", ""),
                "start": start,
                "end": start + took,
                "from": edges.get(name, []),
                "rounds": [],
            }
            if not name.startswith("round-"):
                rows[name] = row
                continue
            group = rows.setdefault("rounds", {"name": "rounds", "stage": "rollout, score, update", "rounds": []})
            group["rounds"].append(row)
        if "rounds" in rows:
            rows["rounds"] |= _folded(rows["rounds"]["rounds"])
        for row in rows.values():
            row["left"] = round(100 * row["start"] / total, 2)
            row["width"] = round(100 * (row["end"] - row["start"]) / total, 2)
            row["from"] = sorted({"rounds" if f.startswith("round-") else f for f in row["from"]} - {row["name"]})
        return list(rows.values())

    def _edges(self) -> dict[str, list[str]]:
        """Inputs by node, from the recipe; from the record's order alone where the recipe is of another version."""
        from flows.graph.build import build
        from flows.recipe.model import Recipe

        try:
            nodes = build(Recipe.model_validate_json(json.dumps(self.record["recipe"])))
        except ValueError:
            return {name: [] for name in self.nodes}
        return {n.name: sorted({i.node for i in n.inputs.values()}) for n in nodes}


def _folded(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row for all nodes of all rounds."""
    reached = [r for r in rows if r["state"] != "not reached"]
    counts = Counter(r["state"] for r in reached)
    worst = next((s for s in ("failed", "unfinished", "made", "cached") if counts[s]), "not reached")
    done = len({r["name"].split(".")[0] for r in rows if r["name"].endswith(".update") and r["digest"]})
    planned = len({r["name"].split(".")[0] for r in rows})
    return {
        "state": worst,
        "counts": ", ".join(f"{n} {s}" for s, n in counts.items()),
        "done": done,
        "planned": planned,
        "seconds": sum(r["seconds"] or 0.0 for r in reached) if reached else None,
        "made_seconds": sum(r["made_seconds"] or 0.0 for r in reached) if reached else None,
        "key": "",
        "digest": "",
        "start": min((r["start"] for r in reached), default=0.0),
        "end": max((r["end"] for r in reached), default=0.0),
        "from": sorted({f for r in rows for f in r["from"]}),
    }


# -- sections ----------------------------------------------------------------------------------


def _summary(run: Run, stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    record = run.record
    states = Counter(e.get("state") for e in run.nodes.values())
    hits = [e for e in run.nodes.values() if e.get("state") == "hit"]
    seconds = seconds_at(record["ended"]) - seconds_at(record["started"]) if record.get("ended") else None
    return {
        "seconds": seconds,
        "made": states["made"],
        "cached": states["hit"],
        "failed": states["failed"],
        "saved": sum(max(0.0, (e.get("made_seconds") or 0.0) - (e.get("seconds") or 0.0)) for e in hits),
        "missing": [s["name"] for s in stages if s["state"] == "not reached"],
        "unfinished": [s["name"] for s in stages if s["state"] == "unfinished"],
        "all_cached": bool(hits) and states["made"] + states["failed"] + states["running"] == 0,
    }


def _evaluation(run: Run, evaluations: Mapping[str, Any]) -> dict[str, Any] | None:
    if not evaluations:
        return None
    low = min(0.0, *(m["score_low"] for m in evaluations.values()))
    high = max(1.0, *(m["score_high"] for m in evaluations.values()))

    def place(value: float) -> float:
        return round(100 * (value - low) / (high - low), 2)

    rows = []
    for label, m in evaluations.items():
        passes = next((k for k in m if k.startswith("pass_at_")), None)
        bar = {
            "zero": place(0.0),
            "score": place(m["score"]),
            "low": place(m["score_low"]),
            "high": place(m["score_high"]),
        }
        more = {"pass_at": m[passes] if passes else None, "cached": run.nodes[f"evaluate.{label}"]["state"] == "hit"}
        rows.append({"label": label, "metrics": m, "bar": bar} | more)
    first = rows[0]["metrics"]
    constant = first.get("constant_score")
    return {
        "rows": rows,
        "constant": None
        if constant is None
        else {"score": constant, "answer": first["constant_answer"], "at": place(constant)},
        "problems": first.get("problems"),
        "samples": first.get("samples"),
        "settings": run.record["recipe"].get("evaluate") or {},
        "range": (low, high),
    }


def _samples(run: Run, labels: Sequence[str]) -> dict[str, Any] | None:
    """The same held-out prompts under each policy, those first whose score changed."""
    if not labels:
        return None
    texts: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    scores: dict[str, dict[str, list[float]]] = {}
    for label in labels:
        name = f"evaluate.{label}"
        rows = run.rows(name, "rollouts/", ("prompt_id", "sample", "prompt", "answer", "text", "stop"))
        texts[label] = {(r["prompt_id"], r["sample"]): r for r in rows}
        found = scores.setdefault(label, {})
        for v in run.rows(name, "verdicts/", ("prompt_id", "sample", "score")):
            found.setdefault(v["prompt_id"], []).append(v["score"] or 0.0)
    first, last = scores[labels[0]], scores[labels[-1]]
    shared = [p for p in first if all(p in scores[k] for k in labels)]
    change = {p: sum(last[p]) / len(last[p]) - sum(first[p]) / len(first[p]) for p in shared}
    gained = sorted((p for p in shared if change[p] > 1e-6), key=lambda p: -change[p])
    lost = sorted((p for p in shared if change[p] < -1e-6), key=lambda p: change[p])
    same = [p for p in shared if abs(change[p]) <= 1e-6]
    cards = []
    for prompt in chosen_samples(gained, lost, same):
        pairs = list(zip(first[prompt], last[prompt], strict=False))
        shown = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
        row = texts[labels[-1]][prompt, shown]
        card: dict[str, Any] = {"prompt": row["prompt"], "answer": row["answer"], "policies": []}
        for label in labels:
            mine, marks = texts[label][prompt, shown], scores[label][prompt]
            mean = sum(marks) / len(marks)
            more = {"label": label, "score": marks[shown], "mean": mean, "count": len(marks)}
            card["policies"].append({"text": mine["text"], "stop": mine["stop"]} | more)
        cards.append(card)
    counts = {"gained": len(gained), "lost": len(lost), "same": len(same)}
    return {"cards": cards, "ends": (labels[0], labels[-1])} | counts


def chosen_samples(gained: Sequence[str], lost: Sequence[str], same: Sequence[str], count: int = SAMPLES) -> list[str]:
    """Mostly changed prompts, gains and losses in proportion, and some that did not change: no parade of wins."""
    room = max(count - 3, count - len(same)) if gained or lost else 0
    losses = min(len(lost), max(1, round(room * len(lost) / max(1, len(gained) + len(lost)))))
    gains = min(len(gained), room - losses)
    return [*gained[:gains], *lost[: max(losses, room - gains)], *same[: count - room]][:count]


def _rollouts(run: Run, rounds: Sequence[int]) -> list[dict[str, Any]]:
    """Some scored completions of the first and the last round."""
    complete = [n for n in rounds if all(f"round-{n:03d}.{p}" in run.nodes for p in PHASES[:2])]
    found = []
    for number in dict.fromkeys([*complete[:1], *complete[-1:]]):
        name = f"round-{number:03d}"
        if run.artifact(f"{name}.score") is None:
            continue
        scores = run.rows(f"{name}.score", "scores/", ("prompt_id", "sample", "rewards", "total", "failure"))
        marks = {(s["prompt_id"], s["sample"]): s for s in scores}
        rows = run.rows(f"{name}.rollout", "rollouts/", ("prompt_id", "sample", "prompt", "answer", "text", "stop"))
        prompts = list(dict.fromkeys(r["prompt_id"] for r in rows))[:4]
        chosen = [r for p in prompts for r in [r for r in rows if r["prompt_id"] == p][:2]]
        names = sorted(scores[0]["rewards"]) if scores else []
        pairs = [r | marks[r["prompt_id"], r["sample"]] for r in chosen if (r["prompt_id"], r["sample"]) in marks]
        found.append({"round": number, "names": names, "rows": pairs, "count": len(rows)})
    return found


def _provenance(run: Run) -> dict[str, Any]:
    """Where everything came from. Of the rounds only the first and last are read: the others share their code."""
    import yaml

    rounds = [n for n in run.nodes if n.startswith("round-")]
    manifests = {}
    for name in [*(n for n in run.nodes if not n.startswith("round-")), *rounds[:3], *rounds[-3:]]:
        artifact = run.artifact(name)
        if artifact is not None:
            manifests[name] = artifact.manifest

    def gather(what: Callable[[dict[str, Any]], Any]) -> dict[str, list[str]]:
        """Values with the nodes that have them: one value, or the older one of a cached stage too."""
        found: dict[str, list[str]] = {}
        for name, m in manifests.items():
            found.setdefault(what(m), []).append(name)
        return found

    code: dict[str, dict[str, list[str]]] = {}
    for name, m in manifests.items():
        for module, mark in m.get("key_parts", {}).get("code", {}).items():
            code.setdefault(module, {}).setdefault(mark, []).append(name)
    recipe = json.loads(json.dumps(run.record["recipe"]))
    recipe["store"] = redacted(str(recipe.get("store", "")))
    return {
        "manifests": manifests,
        "devices": {k: v for k, v in gather(lambda m: m.get("device", "none")).items() if k != "none"},
        "hosts": gather(lambda m: m.get("host", "unknown")),
        "versions": gather(_versions),
        "sources": {n: found for n, m in manifests.items() if (found := m.get("key_parts", {}).get("sources"))},
        "code": {k: code[k] for k in sorted(code)},
        "recipe": yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100),
        "seed": recipe.get("seed"),
        "store": redacted(run.store.url),
    }


def _versions(manifest: dict[str, Any]) -> str:
    versions = {"python": manifest.get("python", "?")} | manifest.get("versions", {})
    return ", ".join(f"{k} {v}" for k, v in versions.items())


# -- texts -------------------------------------------------------------------------------------


def redacted(url: str) -> str:
    """A store's URL without user and password."""
    return re.sub(r"//[^/@]*@", "//", url)


def visible(text: str | None, longest: int = LONGEST) -> str:
    """A model's text as people can see it: control and direction characters spelled out, cut where it is very long."""
    text = text or ""
    cut = f" … ({len(text) - longest:,} more characters)" if len(text) > longest else ""
    return re.sub(UNSEEN, lambda m: m[0].encode("unicode_escape").decode(), text[:longest]) + cut
