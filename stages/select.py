"""The best of several policies by their evaluations: its content is that of the policy that it chose.

A stage that reads the choice has the same key as for the chosen policy itself, so it is a cache hit if it read that
policy before.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

from rlhf.stages.common.models import load_policy
from rlhf.stages.contract.definition import Context, Reads, Stage, StageConfig
from rlhf.stages.store.artifacts import NOT_CONTENT, Artifact

POLICY, EVALUATION = "candidate_", "evaluation_"
"""Prefixes of the inputs, followed by the number of the round."""


class Config(StageConfig):
    """How a policy is chosen."""

    metric: str = "score"
    """A metric of the evaluations, or the name of one of their judges; the highest wins, of equals the earliest."""


def run(ctx: Context) -> dict[str, Any]:
    """Copy the best candidate's content; return its round, and the metric of each candidate."""
    reached = {
        name.removeprefix(EVALUATION): _value(evaluation, ctx.config.metric)
        for name, evaluation in ctx.inputs.items()
        if name.startswith(EVALUATION)
    }
    # max keeps the first of equals: the policy that has moved least.
    best = max(sorted(reached, key=int), key=lambda number: reached[number])
    chosen = ctx.inputs[POLICY + best]
    for path in (f["path"] for f in chosen.manifest["files"] if not f["path"].startswith(NOT_CONTENT)):
        (ctx.out / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(chosen.local(path), ctx.out / path)
    ctx.log(f"round {int(best)} is the best of {len(reached)} by {ctx.config.metric}: {reached[best]:.4g}")
    return {"round": int(best), "metric": ctx.config.metric, "best": reached[best], "candidates": reached}


def _value(evaluation: Artifact, metric: str) -> float:
    """Return a metric of an evaluation. Raises ValueError if it has none."""
    scores = json.loads(evaluation.local("scores.json").read_bytes())
    value = scores["judges"][metric].get("score") if metric in scores.get("judges", {}) else scores.get(metric)
    if value is None:
        raise ValueError(
            f"evaluate.metric_for_best_model: {evaluation.url} has no number for {metric}; it has "
            f"{', '.join(sorted([*scores, *scores.get('judges', {})]))}"
        )
    return float(value)


def restore(ctx: Context, artifact: Artifact) -> tuple[Any, Any]:
    """(DecoderConfig, parameters) of the chosen policy."""
    ref = artifact.manifest["inputs"][f"{POLICY}{artifact.metrics['round']:03d}"]
    chosen = artifact.store.with_digest(ref["stage"], ref["key"], ref["digest"])
    if chosen is None:
        raise RuntimeError(f"{artifact.url} chose {ref['stage']}/{ref['key'][:12]}, which is not in the store any more")
    return load_policy(ctx, chosen)


STAGE = Stage(
    "select",
    1,
    Config,
    run,
    restore=restore,
    draws=lambda config: False,
    processes=lambda config: "primary",
    work="data",
    title="best of RL",
    reads={"candidates": Reads(f"{POLICY}*"), "evaluations": Reads(f"{EVALUATION}*", ("scores.json",))},
    makes="policy",
    headline=("round {round}", "{metric} {best:.3f}"),
)
