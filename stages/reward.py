"""A Bradley-Terry reward model: one score a completion, learned from preference pairs."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rlhf.stages.common.models import save_model
from rlhf.stages.common.settings import Fitted, Optimizer
from rlhf.stages.common.tables import write_rows
from rlhf.stages.contract.definition import Context, Reads, Stage
from rlhf.stages.training.adapters import fit, load_start, restore
from rlhf.stages.training.examples import Table, train_and_heldout
from rlhf.stages.training.fit import Task


class Config(Fitted):
    """A reward model over the base model; an example is a pair."""

    margin_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the margins that pairs bring; 0 ignores them."""
    centering: Annotated[float, Field(ge=0)] = 0.01
    """Weight of (chosen + rejected)^2, which keeps scores near zero."""
    heldout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the pairs kept out of training to report accuracy and calibration."""
    optimizer: Optimizer = Optimizer(learning_rate=3e-5, schedule="linear", warmup_steps=2)
    """The optimizer."""


def run(ctx: Context) -> dict[str, Any]:
    """Trains the model, writes `heldout/`; returns metrics with held-out accuracy and calibration."""
    import jax.numpy as jnp
    import numpy as np
    import pyarrow as pa

    from rlhf.tuning.algorithms.supervised import reward_loss, reward_summary
    from rlhf.tuning.evaluation.statistics import calibration_error, win_rate
    from rlhf.tuning.losses.preference import bradley_terry
    from rlhf.tuning.models import huggingface
    from rlhf.tuning.models.decoder import scalar_graph
    from rlhf.tuning.precision import real
    from rlhf.tuning.rewards.learned import score_groups

    config, base = load_start(ctx, ctx.inputs["base"])
    train, held = train_and_heldout(
        ctx, ctx.inputs["data"], "preference", ctx.config.heldout_fraction, ctx.config.heldout_examples
    )

    def weighted(table: Table) -> np.ndarray:
        return ctx.config.margin_weight * np.asarray([m or 0.0 for m in table.column("margin")], real())

    margins = weighted(train)

    def columns(params: Any, examples: list[int], packed: list[Any]) -> list[dict[str, Any]]:
        # Both completions of a pair carry its margin.
        return [{"margin_C": p.gather(np.repeat(margins[examples], 2))} for p in packed]

    held_margins = weighted(held)

    def scores_of(params: Any) -> np.ndarray:
        # Chosen completions are at even places, rejected ones at odd.
        return score_groups(config, params, held.examples, dtype=ctx.config.compute.dtype)

    def measure(params: Any) -> dict[str, float]:
        scores = jnp.asarray(scores_of(params))
        losses = bradley_terry(scores[::2], scores[1::2], jnp.asarray(held_margins), ctx.config.centering)
        return {"loss": float(losses.mean()), "accuracy": win_rate(scores[::2], scores[1::2])}

    task = Task(
        make_loss=lambda compute: reward_loss(scalar_graph(config), ctx.config.centering, compute),
        examples=train.examples,
        columns=columns,
        summary=reward_summary,
        measure=measure if held else None,
    )
    start = huggingface.scalar_head_params(config, base)
    params, metrics = fit(ctx, task, config, start, ctx.config, role="scalar")
    save_model(ctx, "scorer", config, params)
    metrics |= {"pairs": len(train), "heldout_pairs": len(held)}
    if held:
        scores = scores_of(params)
        metrics["calibration_error"] = calibration_error(scores[::2] - scores[1::2])
        write_rows(
            ctx.out / "heldout" / "part-00000.parquet",
            [
                {"id": name, "chosen_score": float(scores[2 * i]), "rejected_score": float(scores[2 * i + 1])}
                for i, name in enumerate(held.column("id"))
            ],
            pa.schema([("id", pa.string()), ("chosen_score", pa.float32()), ("rejected_score", pa.float32())]),
        )
    return metrics


STAGE = Stage(
    "reward",
    1,
    Config,
    run,
    restore=restore,
    section="reward",
    title="reward model",
    makes="reward",
    reads={
        "base": Reads("base"),
        "data": Reads("data", ("preference/", "heldout_preference/")),
        "tokenizer": Reads("tokenizer"),
    },
    headline=(
        "loss {loss:.4f}",
        "held-out {heldout_loss_before:.4f} -> {heldout_loss:.4f}",
        "held-out accuracy {heldout_accuracy:.3f}",
        "calibration error {calibration_error:.3f}",
    ),
)
