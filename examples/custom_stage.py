"""A stage in one file: of equal completions of a prompt, only the first ones keep their score.

A stage has three parts: settings, a function `run(ctx)` that reads input artifacts and writes files below `ctx.out`,
and a `Stage` that describes it. As a program this file tries the stage on the first round of a finished run, in a
temporary folder; the store stays as it is:

    python examples/custom_stage.py .rlhf RUN

To make it a stage of every run, copy the file to `stages/filter.py`, and give it a field of the recipe and a node of
the graph: docs/guides/a-stage.md. Then it is cached, planned, resumed and reported as every other stage.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rlhf.stages.contract.definition import Context, Reads, Stage, StageConfig


class Config(StageConfig):
    """Which scores stay."""

    copies: Annotated[int, Field(ge=1)] = 1
    """Equal completions of a prompt that keep their score."""


def run(ctx: Context) -> dict[str, Any]:
    """Writes the scores without those of repetitions; returns how many were dropped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # One row a completion, in the same order in both tables.
    rollouts = pq.read_table(ctx.inputs["rollouts"].local("rollouts/"), columns=["prompt_id", "token_ids"])
    scores = pq.read_table(ctx.inputs["scores"].local("scores/"))
    seen: Counter[Any] = Counter()
    totals, failures = scores["total"].to_pylist(), scores["failure"].to_pylist()
    for row, (prompt, tokens) in enumerate(zip(*(c.to_pylist() for c in rollouts.columns), strict=True)):
        seen[prompt, tuple(tokens)] += 1
        if seen[prompt, tuple(tokens)] > ctx.config.copies:
            totals[row], failures[row] = None, "repeats another completion"
    for name, values in (("total", totals), ("failure", failures)):
        at = scores.schema.get_field_index(name)
        scores = scores.set_column(at, scores.schema.field(at), pa.array(values, scores.schema.field(at).type))
    (ctx.out / "scores").mkdir()
    pq.write_table(scores, ctx.out / "scores" / "part-00000.parquet")
    return {"completions": len(totals), "dropped": sum(max(n - ctx.config.copies, 0) for n in seen.values())}


STAGE = Stage(
    "filter",
    1,
    Config,
    run,
    section="rl.filter",
    title="scores without repetitions",
    makes="scores",
    reads={"rollouts": Reads("rollouts"), "scores": Reads("scores")},
    headline=("{dropped} dropped",),
)


def attempt(store_url: str, run_name: str, out: Path, **settings: Any) -> dict[str, Any]:
    """Runs the stage on the first round of a run; the stage's metrics."""
    from rlhf.stages.store import runs
    from rlhf.stages.store.artifacts import Store

    store = Store(store_url)
    record = runs.read(store, run_name)
    if record is None:
        raise SystemExit(f"{store_url} has no run {run_name}; `rlhf runs` lists the runs of a store")
    inputs = {}
    for name, stage in {"rollouts": "rollout", "scores": "score"}.items():
        artifact = store.get(stage, record["nodes"][f"round-000.{stage}"]["key"])
        assert artifact is not None
        inputs[name] = artifact
    context = Context(
        Config(**settings),
        inputs,
        out,
        work=out,
        seed=0,
        progress=lambda done, total, unit, **metrics: None,
        log=print,
        memory={},
    )
    return STAGE.run(context)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        metrics = attempt(sys.argv[1], sys.argv[2], Path(folder))
    print(STAGE.figures(metrics), metrics)
