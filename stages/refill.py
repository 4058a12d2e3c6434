"""Refills: further prompts of a round for those without a signal (dynamic sampling of DAPO, arXiv:2503.14476).

A refill samples the number of prompts that it expects to need; without a need its table is empty. They are the next in
the order of refills (`rlhf.stages.sampling.order`) that the round does not have. The update takes the first informative
groups and counts all others (`rlhf.stages.sampling.groups`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf.stages.common.tables import batches, rows_at
from rlhf.stages.contract.definition import Context, Reads, Stage
from rlhf.stages.sampling.groups import NAMED, missing_prompts, read_scored
from rlhf.stages.sampling.order import prompts_of_refill
from rlhf.stages.sampling.rows import FOLDER, Draw, room_of, sample_rows
from rlhf.stages.sampling.settings import Rollout, loads, sources
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning.rows import CompletionRow, PromptRow, write_table


class Config(Rollout):
    """Sampling as in the round's rollouts."""

    number: Annotated[int, Field(ge=1)] = 1
    """Number of the refill in the round."""
    start: Annotated[int, Field(ge=0)] = 0
    """Its position in the order of refills: after all earlier refills of the run."""
    truncated: Literal["keep", "mask", "mask-loss"] = "keep"
    """Treatment of completions cut off at max_tokens; the recipe takes it from rl.update.truncated."""


def run(ctx: Context) -> dict[str, Any]:
    """Write the rollout table; return counts of prompts, completions and tokens."""
    config: Config = ctx.config
    scored = read_scored(ctx.inputs, NAMED)
    groups, drawn = scored.totals(config.truncated), {row.prompt_id for row in scored.rollouts}
    data = ctx.inputs["data"]
    total, used = unusable(data, drawn, room_of(ctx, config.max_tokens))
    seed = ctx.seed if config.order_seed is None else config.order_seed
    # A prompt that the round refused is not replaced.
    missing = missing_prompts(groups, scored.prompts)
    chosen = rows_at(data, "prompts/", PromptRow, prompts_of_refill(missing, total, config.start, seed, used))
    if not chosen:
        # Later stages read a table, even an empty one.
        if ctx.is_primary:
            write_table(ctx.out / FOLDER / "part-00000.parquet", [], CompletionRow.schema())
        return {"prompts": 0, "completions": 0, "tokens": 0}
    # After the places of the round and of earlier refills, each of which has at most `prompts` prompts.
    places = enumerate(chosen, start=config.number * config.prompts)
    rows = sample_rows(ctx, list(places), Draw.of(config, config.completions, config.temperature, routing=True))
    return {"prompts": len(chosen), "completions": len(rows), "tokens": sum(len(r.token_ids) for r in rows)}


def unusable(data: Artifact, drawn: Collection[str], room: float) -> tuple[int, set[int]]:
    """Return the number of prompts, and the numbers of those that the round has or that are longer than `room`.

    A refill skips a prompt that is too long; it does not refuse it, as a round does.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    total, used, names = 0, set[int](), pa.array(sorted(drawn), pa.string())
    for batch in batches(data, "prompts/", ("id", "prompt_ids")):
        there = pc.is_in(batch["id"], value_set=names).to_numpy(zero_copy_only=False)
        long = pc.list_value_length(batch["prompt_ids"]).to_numpy(zero_copy_only=False) > room
        used |= set((total + np.flatnonzero(there | long)).tolist())
        total += batch.num_rows
    return total, used


STAGE = Stage(
    "refill",
    1,
    Config,
    run,
    loads=loads,
    sources=sources,
    work="sample",
    title="refill",
    makes="rollouts",
    reads={
        "policy": Reads("policy"),
        "tokenizer": Reads("tokenizer"),
        "data": Reads("data", ("prompts/",)),
        "rollouts": Reads("rollouts"),
        "scores": Reads("scores"),
        "refills": Reads("refill_*"),
    },
    headline=("{prompts} prompts",),
)
