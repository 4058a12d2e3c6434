"""A run's report: one HTML page that needs nothing beside itself, no script and no network.

Everything comes from the run's record, manifests, logs and tables. What a run lacks (it failed,
has no rounds, its artifacts are gone) is left out with a sentence, so that a report can always
be written.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.plots import PHASES, round_curves, round_series, show, stage_curves
from flows.runs import find_run
from stages.artifacts import MANIFEST, Artifact, ArtifactError, Store

LABELS = {"base": "base", "sft": "SFT", "rl": "RL"}
STATES = {"hit": "cached", "made": "made", "failed": "failed", "running": "unfinished"}
SAMPLES = 12
LONGEST = 1200
MOST_ROUNDS = 400


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
        "tiles": _tiles(run, series, evaluations),
        "warnings": warnings_of(record, series, evaluations),
        "failures": [(n, e.get("error", "")) for n, e in run.nodes.items() if e.get("state") == "failed"],
        "evaluation": _evaluation(run, evaluations),
        "curves": round_curves(series) if series["round"] else [],
        "numbers": _numbers(series),
        "training": [t for t in (run.training("sft", "SFT"), run.training("reward", "Reward model")) if t],
        "samples": _optional(lambda: _samples(run, list(evaluations))),
        "rollouts": _optional(lambda: _rollouts(run, series["round"])),
        "stages": stages,
        "graph": _graph(stages),
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
        """Metrics by label, in the order base, sft, rl."""
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
        begin = _time(self.record["started"])
        spans = {n: (_time(e["started"]) - begin, e.get("seconds") or 0.0) for n, e in self.nodes.items()}
        ended = _time(self.record["ended"]) - begin if self.record.get("ended") else 0.0
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
        from flows.graph import build
        from flows.recipe import Recipe

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
    seconds = _time(record["ended"]) - _time(record["started"]) if record.get("ended") else None
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


def _tiles(run: Run, series: Mapping[str, list[Any]], evaluations: Mapping[str, Any]) -> list[dict[str, str]]:
    """The four numbers that people ask for first."""
    tiles = []
    if evaluations:
        labels = list(evaluations)
        ends = labels if len(labels) < 3 else [labels[0], labels[-1]]
        names = " → ".join(LABELS.get(k, k) for k in ends)
        value = " → ".join(f"{evaluations[k]['score']:.3f}" for k in ends)
        tiles.append({"title": "Held-out score", "value": value, "note": names})
    for key, title in (("reward", "Reward"), ("kl", "KL to the reference"), ("entropy", "Entropy")):
        known = [v for v in series.get(key, []) if v is not None]
        if known:
            value = show(known[0]) if len(known) == 1 else f"{show(known[0])} → {show(known[-1])}"
            tiles.append({"title": title, "value": value, "note": f"{len(known)} rounds, first to last"})
    return tiles[:4]


def warnings_of(record: Mapping[str, Any], series: Mapping[str, list[Any]], evaluations: Mapping[str, Any]) -> list[str]:
    """What the numbers say went wrong, in words."""
    found = []

    def known(key: str) -> list[float]:
        return [v for v in series.get(key, []) if v is not None]

    entropy, kl, length, flat = known("entropy"), known("kl"), known("mean_length"), known("zero_variance")
    if len(entropy) > 1 and entropy[-1] < 0.1 * entropy[0]:
        found.append(
            f"Entropy collapse: entropy fell from {show(entropy[0])} to {show(entropy[-1])} nats, below a tenth of its "
            "start. The policy hardly varies any more; raise entropy_coef or kl_coef, or lower the learning rate."
        )
    if len(flat) >= 3 and min(flat[-3:]) > 0.9:
        found.append(
            f"Reward saturation: in the last 3 rounds more than 90 % of the prompts (at the end {flat[-1]:.0%}) gave "
            "completions that all score alike, so these rounds taught next to nothing. Use other prompts or stop earlier."
        )
    early = sorted(kl[:3])[len(kl[:3]) // 2] if kl else 0.0
    if len(kl) > 1 and kl[-1] > 0.5 and kl[-1] > 10 * early:
        found.append(
            f"KL blow-up: the KL to the reference grew from {show(early)} to {show(kl[-1])} nats a token. The policy has "
            "left its reference; read the samples before trusting the reward, and raise kl_coef."
        )
    if len(length) > 1 and length[-1] >= 2 * length[0]:
        found.append(
            f"Length: completions grew from {show(length[0])} to {show(length[-1])} tokens on average. Check that the "
            "reward does not simply pay for length."
        )
    limit = (((record.get("recipe") or {}).get("rl") or {}).get("update") or {}).get("max_mismatch_kl") or 0.1
    mismatch = known("mismatch_kl")
    if mismatch and max(mismatch) > limit / 10:
        found.append(
            f"Mismatch: the sampler and the trainer disagree by up to {show(max(mismatch))} nats a token (the run stops "
            f"above {show(limit)}). Compare their dtypes."
        )
    failed = [
        e["metrics"]["failed"] for n, e in record.get("nodes", {}).items()
        if n.endswith(".score") and (e.get("metrics") or {}).get("failed")
    ]  # fmt: skip
    if failed and max(failed) > 0.01:
        found.append(f"Rewards failed: in the worst round {max(failed):.1%} of the completions got no reward.")
    for label, m in evaluations.items():
        if m.get("judge_failures"):
            found.append(f"Judge failures: {m['judge_failures']} judgements of {LABELS.get(label, label)} failed, counted wrong.")
    if evaluations:
        label, last = list(evaluations.items())[-1]
        if last.get("constant_score") is not None and last["score_low"] <= last["constant_score"]:
            found.append(
                f"Not above the baseline: {LABELS.get(label, label)} scores {last['score']:.3f}, and always answering "
                f"{last.get('constant_answer')!r} scores {last['constant_score']:.3f}."
            )
        before = [m for k, m in evaluations.items() if k != label]
        if before and last["score_high"] < before[-1]["score_low"]:
            found.append(f"Worse than before: {LABELS.get(label, label)} scores below the policy that it started from.")
    return found


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
        bar = {"zero": place(0.0), "score": place(m["score"]), "low": place(m["score_low"]), "high": place(m["score_high"])}
        more = {"pass_at": m[passes] if passes else None, "cached": run.nodes[f"evaluate.{label}"]["state"] == "hit"}
        rows.append({"label": label, "metrics": m, "bar": bar} | more)
    first = rows[0]["metrics"]
    constant = first.get("constant_score")
    return {
        "rows": rows,
        "constant": None if constant is None else {"score": constant, "answer": first["constant_answer"], "at": place(constant)},
        "problems": first.get("problems"),
        "samples": first.get("samples"),
        "settings": run.record["recipe"].get("evaluate") or {},
        "range": (low, high),
        "change": _change(evaluations),
    }


def _change(evaluations: Mapping[str, Any]) -> str:
    labels = list(evaluations)
    if len(labels) < 2:
        return ""
    sentences = []
    for other in labels[:-1]:
        a, b = evaluations[other], evaluations[labels[-1]]
        apart = a["score_high"] < b["score_low"] or b["score_high"] < a["score_low"]
        names = f"{LABELS.get(labels[-1], labels[-1])} is {b['score'] - a['score']:+.3f} against {LABELS.get(other, other)}"
        sentences.append(f"{names}; their intervals {'are apart' if apart else 'overlap'}.")
    return " ".join(sentences)


def _numbers(series: Mapping[str, list[Any]]) -> dict[str, Any]:
    """The table behind the curves; of very long runs, every so many rounds."""
    columns = [k for k, values in series.items() if k != "round" and any(v is not None for v in values)]
    step = -(-len(series["round"]) // MOST_ROUNDS) or 1
    rows = [[series[c][i] for c in ("round", *columns)] for i in range(0, len(series["round"]), step)]
    return {"columns": [c.replace("_", " ") for c in columns], "rows": rows, "step": step}


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
        card: dict[str, Any] = {"prompt": row["prompt"], "answer": row["answer"], "change": change[prompt], "policies": []}
        for label in labels:
            mine, marks = texts[label][prompt, shown], scores[label][prompt]
            mean = sum(marks) / len(marks)
            more = {"label": label, "score": marks[shown], "mean": mean, "count": len(marks)}
            card["policies"].append({"text": mine["text"], "stop": mine["stop"]} | more)
        cards.append(card)
    return {"cards": cards, "gained": len(gained), "lost": len(lost), "same": len(same), "ends": (labels[0], labels[-1])}


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


def _graph(stages: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Places for the drawn graph: a layer for each depth, from the top down."""
    depth: dict[str, int] = {}
    for row in stages:
        depth[row["name"]] = 1 + max((depth[f] for f in row["from"] if f in depth), default=-1)
    layers: dict[int, list[dict[str, Any]]] = {}
    for row in stages:
        layers.setdefault(depth[row["name"]], []).append(row)
    if len(layers) < 2:
        return None
    wide, high, gap_x, gap_y = 132, 44, 16, 40
    width = max(len(rows) for rows in layers.values()) * (wide + gap_x) + gap_x
    boxes: dict[str, dict[str, Any]] = {}
    for level, rows in sorted(layers.items()):
        left = (width - len(rows) * (wide + gap_x) + gap_x) / 2
        for place, row in enumerate(rows):
            boxes[row["name"]] = {"x": left + place * (wide + gap_x), "y": 8 + level * (high + gap_y), "row": row}
    # An arrow that a longer way implies is left out: the drawing stays readable, the table has the keys.
    lines = []
    for row in stages:
        for source in row["from"]:
            around = {f for s in row["from"] if s != source for f in _ancestors(stages, s)}
            if source in boxes and source not in around:
                a, b = boxes[source], boxes[row["name"]]
                lines.append((a["x"] + wide / 2, a["y"] + high, b["x"] + wide / 2, b["y"]))
    height = 16 + (max(layers) + 1) * (high + gap_y) - gap_y
    return {"boxes": list(boxes.values()), "lines": lines, "width": width, "height": height, "wide": wide, "high": high}


def _ancestors(stages: Sequence[dict[str, Any]], name: str) -> set[str]:
    sources = {s["name"]: s["from"] for s in stages}
    found: set[str] = set()
    queue = [name]
    while queue:
        for source in sources.get(queue.pop(), []):
            if source not in found:
                found.add(source)
                queue.append(source)
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
        "devices": gather(lambda m: m.get("device", "unknown")),
        "hosts": gather(lambda m: m.get("host", "unknown")),
        "versions": gather(lambda m: _pairs({"python": m.get("python", "?")} | m.get("versions", {}))),
        "sources": {n: m["key_parts"]["sources"] for n, m in manifests.items() if m.get("key_parts", {}).get("sources")},
        "code": {k: code[k] for k in sorted(code)},
        "recipe": yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100),
        "seed": recipe.get("seed"),
        "store": redacted(run.store.url),
    }


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in values.items())


# -- texts -------------------------------------------------------------------------------------


def redacted(url: str) -> str:
    """A store's URL without user and password."""
    return re.sub(r"//[^/@]*@", "//", url)


def duration(seconds: float | None) -> str:
    """4.2 s, 3 min 20 s, 1 h 05 min."""
    if seconds is None:
        return "–"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


@functools.lru_cache(maxsize=4096)
def _time(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


def when(text: str | None) -> str:
    """A moment in UTC."""
    if not text:
        return "–"
    return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def visible(text: str | None, longest: int = LONGEST) -> str:
    """A model's text as people can see it: control characters by their pictures, cut where it is very long."""
    text = text or ""
    cut = f" … ({len(text) - longest:,} more characters)" if len(text) > longest else ""
    shown = text[:longest].replace("\x7f", "\u2421")
    return re.sub(r"[\x00-\x08\x0b-\x1f]", lambda m: chr(0x2400 + ord(m[0])), shown) + cut
