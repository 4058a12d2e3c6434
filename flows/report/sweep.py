"""The comparison of a sweep's settings: held-out scores, paired differences from the first setting, and a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf.flows.records import SWEEP, SWEEPS, status_of
from rlhf.flows.report.charts import Chart, round_charts
from rlhf.flows.report.measures import number, round_series
from rlhf.flows.report.page import rendered
from rlhf.flows.report.run_view import RunView, section
from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import ArtifactError, Store

if TYPE_CHECKING:
    from rlhf.stages.tools.paired_evaluations import Paired

Setting = dict[str, Any]
ALONE = "with one seed the intervals are of these policies alone; add seed=0..2 to compare the settings"


def label_of(setting: Mapping[str, Any]) -> str:
    """Return the values of a setting in one text."""
    return "  ".join(f"{place}={value}" for place, value in setting["values"].items()) or "the recipe"


def note_of(sweep: Mapping[str, Any]) -> str:
    """Return the meaning of the intervals."""
    if len(sweep["settings"]) < 2:
        return ""
    seeds = max(len(setting["runs"]) for setting in sweep["settings"])
    also = "; they cover other problems and other seeds" if seeds > 1 else f"; {ALONE}"
    return f"{_comparisons(sweep)} intervals against the first setting hold together at 95 %{also}"


def _comparisons(sweep: Mapping[str, Any]) -> int:
    # Halving chooses by the data when a setting is compared for the last time.
    return (len(sweep["settings"]) - 1) * len(sweep["settings"][0]["nodes"])


def conclude(store: Store, sweep: dict[str, Any]) -> str:
    """Fill in the results of a sweep's settings, write its record and page, and return the page's address."""
    page = sweep_page(store, sweep)
    store.write_json(sweep, SWEEPS, sweep["name"], SWEEP)
    store.write_bytes(page.encode(errors="replace"), SWEEPS, sweep["name"], "report.html")
    return store.address(SWEEPS, sweep["name"], "report.html")


def sweep_page(store: Store, sweep: dict[str, Any]) -> str:
    """Fill in the results so far of a sweep's settings, and return its page.

    A setting gets `node` (its last evaluation that all its runs have; None without one), `scores` by seed, their mean
    `score`, `statuses`, and `difference` from the first setting or the `reason` that there is none.
    """
    views = {name: RunView(store, runs.read(store, name) or {}) for name in sweep["runs"]}
    for setting in sweep["settings"]:
        of = [views[name] for name in setting["runs"]]
        done = [node for node in setting["nodes"] if _has(views, setting, node)]
        scores = [_score(view, done[-1]) for view in of] if done else []
        setting |= {"node": done[-1] if done else None, "scores": scores, "statuses": _statuses(store, of)}
        setting["score"] = sum(filter(None, scores)) / len(scores) if scores else None
        setting |= {"difference": None, "reason": "" if done else "not evaluated"}
    _compare(views, sweep)
    charts = [chart for setting in sweep["settings"] for chart in _rewards(views[setting["runs"][0]], setting)]
    values = {"sweep": sweep, "note": note_of(sweep), "charts": charts, "label_of": label_of}
    return rendered("sweep.html.j2", values)


def _score(view: RunView, node: str) -> float | None:
    return number((view.nodes.get(node, {}).get("metrics") or {}).get("score"))


def _has(views: Mapping[str, RunView], setting: Setting, node: str) -> bool:
    """Whether all runs of a setting have the scores of an evaluation."""
    return all(_score(views[name], node) is not None for name in setting["runs"])


def _statuses(store: Store, views: Sequence[RunView]) -> list[str]:
    return list(dict.fromkeys(status_of(v.record, store) if v.record else "not run" for v in views))


def _rewards(view: RunView, setting: Setting) -> list[Chart]:
    charts = round_charts(round_series(view.record))[:1]
    return [dataclasses.replace(chart, title=f"{chart.title}, {label_of(setting)}") for chart in charts]


def _compare(views: Mapping[str, RunView], sweep: dict[str, Any]) -> None:
    """Fill in the differences."""
    from rlhf.stages.tools.paired_evaluations import against_first

    first, *others = sweep["settings"]
    compared, pairs = [], []
    for setting in others:
        found = section(partial(_pairs, views, first, setting))
        if found.content is None:
            setting["reason"] = setting["reason"] or found.missing.partition(": ")[2]
        else:
            compared.append(setting)
            pairs.append(found.content)
    for setting, difference in zip(compared, against_first(pairs, _comparisons(sweep)), strict=True):
        setting["difference"] = dataclasses.asdict(difference) | {"verdict": difference.verdict}


def _pairs(views: Mapping[str, RunView], first: Setting, setting: Setting) -> list[Paired]:
    """Return for each seed the pair of both settings in their last common evaluation.

    Raises ArtifactError or ValueError if they cannot be compared.
    """
    from rlhf.stages.tools.paired_evaluations import paired

    # Of the last rung that both have reached.
    rungs = zip(first["nodes"], setting["nodes"], strict=True)
    both = [nodes for nodes in rungs if _has(views, first, nodes[0]) and _has(views, setting, nodes[1])]
    if not both:
        raise ArtifactError("the first setting was not evaluated")
    found = [
        paired(views[old].stored(both[-1][0]), views[new].stored(both[-1][1]))
        for old, new in zip(first["runs"], setting["runs"], strict=True)
    ]
    # It raises ValueError without a problem that has a score on both sides.
    if lacking := [pair.reason for pair in found if pair.difference is None]:
        raise ArtifactError(lacking[0])
    return found
