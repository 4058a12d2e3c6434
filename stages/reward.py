"""A Bradley-Terry reward model: one score a completion, learned from preference pairs."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from stages.base import Context, execution_setting
from stages.models import load_policy, remember, token_ids
from stages.settings import Compute, Optimizer, Trained
from stages.tables import read_rows, write_rows
from stages.training import Task, fit

NAME = "reward"
VERSION = 1


class Config(Trained):
    """A reward model over all parameters of the base model."""

    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the pairs."""
    examples_per_step: Annotated[int, Field(ge=1)] = 16
    """Pairs of one optimizer step."""
    centering: Annotated[float, Field(ge=0)] = 0.01
    """Weight of (chosen + rejected)^2, which holds scores near zero."""
    heldout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the pairs kept out of training to report accuracy and calibration."""
    optimizer: Optimizer = Optimizer(learning_rate=3e-5, schedule="linear", warmup_steps=2)
    """The optimizer."""
    compute: Compute = Compute()
    """How to compute."""
    checkpoint_every: int = execution_setting(8, ge=1)
    """Steps between checkpoints."""


def run(ctx: Context) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import pyarrow as pa

    from tuning.evaluation.statistics import calibration_error
    from tuning.losses.preference import bradley_terry
    from tuning.models import huggingface
    from tuning.rewards.learned import score_groups
    from tuning.training.batch import Group
    from tuning.training.forward import scalar_graph, scores

    config, base = load_policy(ctx, ctx.inputs["base"])
    graph = scalar_graph(config)
    data = ctx.inputs["data"]
    rows = read_rows(data, "preference/")
    if data.has("heldout_preference/"):
        train, held = rows, read_rows(data, "heldout_preference/")
    else:
        # Rows are in the order of a hash of their content: a slice is a random sample.
        count = int(len(rows) * ctx.config.heldout_fraction)
        train, held = rows[count:], rows[:count]

    def pair(row: dict[str, Any], number: int) -> Group:
        return Group(row["prompt_ids"], [row["chosen_ids"], row["rejected_ids"]], [2 * number, 2 * number + 1])

    margins = np.asarray([r["margin"] or 0.0 for r in train], np.float32)
    if margins.any():
        ctx.log("pairs carry margins, but this stage trains without them")

    def make_loss(compute: Any) -> Any:
        def loss(params: Any, batch: dict[str, jax.Array], frozen: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            chosen, rejected = scores(graph, params, batch, compute).reshape(-1, 2).T
            valid = batch["mask_CT"][::2, 0] > 0
            # Empty slots read position 0 twice: their difference is 0 and finite, then masked.
            losses = jnp.where(valid, bradley_terry(chosen, rejected, centering=ctx.config.centering), 0.0)
            right = jnp.where(valid, chosen > rejected, False)
            value = jnp.sum(losses) / batch["n_groups"]
            return value, {"bt": jnp.sum(losses), "right": jnp.sum(right).astype(jnp.float32), "pairs": jnp.sum(valid)}

        return loss

    task = Task(
        make_loss=make_loss,
        groups=lambda numbers: [pair(train[i], k) for k, i in enumerate(numbers)],
        size=len(train),
        longest=max(max(len(r["chosen_ids"]), len(r["rejected_ids"])) for r in train),
        summary=lambda s: {"loss": s["bt"] / s["pairs"], "accuracy": s["right"] / s["pairs"]},
    )
    params, metrics = fit(ctx, task, huggingface.scalar_head_params(config, base), ctx.config)
    huggingface.save_decoder(ctx.out / "model", config, params, token_ids(ctx.inputs["tokenizer"]))
    metrics |= {"pairs": len(train), "heldout_pairs": len(held)}
    if held:
        found = score_groups(config, params, [pair(r, i) for i, r in enumerate(held)], dtype=ctx.config.compute.dtype)
        gaps = found[::2] - found[1::2]
        metrics["heldout_accuracy"] = float((gaps > 0).mean())
        metrics["calibration_error"] = calibration_error(gaps)
        write_rows(
            ctx.out / "heldout" / "part-00000.parquet",
            [
                {"id": r["id"], "chosen_score": float(found[2 * i]), "rejected_score": float(found[2 * i + 1])}
                for i, r in enumerate(held)
            ],
            pa.schema([("id", pa.string()), ("chosen_score", pa.float32()), ("rejected_score", pa.float32())]),
        )
    remember(ctx, "scorer:new", (config, params))
    return metrics
