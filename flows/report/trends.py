"""The runs of a recipe over time: one HTML page with a chart of each number and a table of the runs."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from flows.records import readable_runs, status_of
from flows.report.charts import Chart
from flows.report.formats import LABELS, seconds_at
from flows.report.measures import finished_rounds, number
from flows.report.page import environment
from stages.contract.registry import stage as find_stage
from stages.store import registry
from stages.store.artifacts import Store
from stages.store.reach import versions
from stages.store.registry import RegistryError

FOLDER = "trends"
SAMPLING = ("rollout", "refill", "greedy", "evaluate")
"""Stages that sample."""
KINDS = ("sampling", "training", "rest")
MB = 1e6


@dataclasses.dataclass(frozen=True)
class Night:
    """A run in a row of the table, and in each chart where it is finished."""

    number: int
    """From 1, in the order of their beginnings."""
    name: str
    status: str
    started: str
    seconds: float | None
    scores: Mapping[str, float]
    """By policy."""
    interval: tuple[float | None, float | None]
    """Of the last policy's score."""
    kl: float | None
    length: float | None
    reward: float | None
    made: int
    cached: int
    spent: Mapping[str, float]
    """Seconds by kind of stage."""
    bytes: int
    """Of what it made."""
    named: list[str]
    """Entries of names that stand for its policy: champion 3."""

    @property
    def score(self) -> float | None:
        """That of the last policy."""
        return list(self.scores.values())[-1] if self.scores else None


def nights(store: Store, recipe: str) -> list[Night]:
    """The runs of a recipe, oldest first. Raises ValueError where it has none."""
    records = [record for record in readable_runs(store) if record["recipe"]["name"] == recipe]
    if not records:
        known = sorted({record["recipe"]["name"] for record in readable_runs(store)})
        raise ValueError(f"no runs of a recipe {recipe!r} in {store.shown}; there are {', '.join(known) or 'none'}")
    sizes = {version.ref: version.size for version in versions(store)}
    names = _names(store)
    return [_night(store, i, r, sizes, names.get(r["name"], [])) for i, r in enumerate(records, 1)]


def _names(store: Store) -> dict[str, list[str]]:
    """The entries of the registry by run."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in registry.names(store):
        try:
            for entry in registry.history(store, name):
                found[entry.policy.run].append(f"{name} {entry.number}")
        except RegistryError:
            # `rlhf champions` says what is wrong with it.
            continue
    return found


def _night(
    store: Store, place: int, record: Mapping[str, Any], sizes: Mapping[tuple[str, str, str], int], named: list[str]
) -> Night:
    nodes: Mapping[str, Mapping[str, Any]] = record["nodes"]
    states = Counter(entry.get("state") for entry in nodes.values())
    judged = {name.removeprefix("evaluate."): e["metrics"] for name, e in nodes.items() if _is_judged(name, e)}
    order = [label for label in LABELS if label in judged] + [label for label in judged if label not in LABELS]
    last = judged[order[-1]] if order else {}
    rounds = list(finished_rounds(record).values())
    update, score = ({} if not rounds else rounds[-1].get(p, {}).get("metrics", {}) for p in ("update", "score"))
    spent: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for entry in nodes.values():
        spent[_kind(entry["stage"])] += entry.get("seconds") or 0.0
    made = [(e["stage"], e["key"], e["digest"]) for e in nodes.values() if e["state"] == "made" and "digest" in e]
    ended = record.get("ended")
    return Night(
        number=place,
        name=record["name"],
        status=status_of(dict(record), store),
        started=record["started"],
        seconds=seconds_at(ended) - seconds_at(record["started"]) if ended else None,
        scores={label: judged[label]["score"] for label in order},
        interval=(number(last.get("score_low")), number(last.get("score_high"))),
        kl=number(update.get("kl")),
        length=number(last.get("mean_length")),
        reward=number(score.get("reward")),
        made=states["made"],
        cached=states["hit"],
        spent=spent,
        bytes=sum(sizes.get(ref, 0) for ref in dict.fromkeys(made)),
        named=named,
    )


def _is_judged(name: str, entry: Mapping[str, Any]) -> bool:
    return name.startswith("evaluate.") and number((entry.get("metrics") or {}).get("score")) is not None


def _kind(stage: str) -> str:
    if stage in SAMPLING:
        return "sampling"
    return "training" if find_stage(stage).makes in ("policy", "reward") and stage not in ("base", "select") else "rest"


def charts(found: Sequence[Night]) -> list[Chart]:
    """Charts over the runs that came to their end, refused ones too: without them what is shown would be survivors.

    A number that none of them has is left out.
    """
    done = [night for night in found if night.status in ("finished", "refused")]
    at = [night.number for night in done]
    labels = dict.fromkeys(label for night in done for label in night.scores)
    lines: list[Chart] = []

    def line(title: str, unit: str, note: str, values: list[float | None], least: float = 0.0) -> None:
        if any(value is not None for value in values):
            lines.append(Chart(title, unit, note, at, {title: values}, "run", least=least, main=True))

    for label in labels:
        title = f"Score, {LABELS.get(label, label)}"
        line(title, "score", "held-out problems", [night.scores.get(label) for night in done], 0.2)
    line("KL to the reference", "nats / token", "of the last round", [night.kl for night in done], 0.02)
    line("Reward", "weighted sum", "mean of the last round", [night.reward for night in done], 0.2)
    line("Completion length", "tokens", "of the last policy, held-out problems", [night.length for night in done], 2.0)
    line("Made", "MB", "bytes of the artifacts that the run made", [night.bytes / MB for night in done])
    stack: dict[str, list[float | None]] = {kind: [night.spent[kind] for night in done] for kind in KINDS}
    if any(value for values in stack.values() for value in values):
        lines.append(Chart("Seconds by kind of stage", "seconds", "cached stages take next to none", at, stack, "run"))
    return lines


def render(store: Store, recipe: str) -> str:
    """The page as text. Raises ValueError where the recipe has no runs."""
    found = nights(store, recipe)
    template = environment().get_template("trends.html.j2")
    return template.render(recipe=recipe, nights=found, charts=charts(found), store=store.shown)


def write_trends(store: Store, recipe: str) -> str:
    """Writes the page to the store and returns its path or URL. Raises ValueError as `render`."""
    page = render(store, recipe)
    store.write_bytes(page.encode(errors="replace"), FOLDER, f"{recipe}.html")
    return store.address(FOLDER, f"{recipe}.html")
