"""Supervised fine-tuning: the likelihood of completions given prompts, token mean over each step.

Of a conversation every assistant turn is trained, its end-of-turn token included; the data's masks say which tokens.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from stages.common.models import load_policy, remember, token_ids
from stages.common.settings import Fitted, Optimizer
from stages.contract.definition import Context, Reads, Stage
from stages.training.adapters import fit
from stages.training.examples import Table
from stages.training.fit import Task


class Config(Fitted):
    """Supervised fine-tuning."""

    tokens_per_step: Annotated[int, Field(ge=1)] | None = None
    """Tokens of one optimizer step, prompts included, in place of examples_per_step: it takes the examples that fit."""
    optimizer: Optimizer = Optimizer(learning_rate=1e-4, schedule="linear", warmup_steps=2)
    """The optimizer."""


def run(ctx: Context) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from tuning.losses.aggregate import aggregate
    from tuning.losses.sft import nll
    from tuning.models import huggingface
    from tuning.models.decoder import decoder_graph
    from tuning.training.forward import logps_and_entropy

    config, base = load_policy(ctx, ctx.inputs["base"])
    graph = decoder_graph(config)
    table = Table(ctx, ctx.inputs["data"], "sft")

    def make_loss(compute: Any) -> Any:
        def loss(params: Any, batch: dict[str, jax.Array], frozen: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            logps, _ = logps_and_entropy(graph, params, batch, 1.0, compute)
            mask, n = batch["mask_CT"], batch["n_tokens"]
            value = aggregate(nll(logps), mask, "token-mean", n_tokens=n, n_sequences=jnp.ones(()))
            return value, {"nll": -jnp.sum(logps), "tokens": jnp.sum(mask)}

        return loss

    task = Task(
        make_loss=make_loss,
        examples=table.examples,
        tokens_per_step=ctx.config.tokens_per_step,
        summary=lambda s: {"loss": s["nll"] / s["tokens"], "tokens": s["tokens"]},
    )
    params, metrics = fit(ctx, task, config, base, ctx.config)
    huggingface.save_decoder(ctx.out / "model", config, params, token_ids(ctx.inputs["tokenizer"]))
    remember(ctx, "decoder:new", (config, params))
    return metrics | {"examples": len(table)}


STAGE = Stage(
    "sft",
    1,
    Config,
    run,
    section="sft",
    title="SFT",
    makes="policy",
    reads={"base": Reads("policy"), "data": Reads("data", ("sft/",)), "tokenizer": Reads("tokenizer")},
    headline=("loss {loss:.4f}", "{steps} steps", "{tokens_per_second:.0f} tok/s"),
)
