"""Supervised fine-tuning: the likelihood of completions given prompts, token mean over each step.

Of a conversation every assistant turn is trained, its end-of-turn token included; the data's masks say which tokens.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf.stages.common.models import save_model
from rlhf.stages.common.settings import Fitted, Optimizer, refuse_unused
from rlhf.stages.contract.definition import Context, Reads, Stage
from rlhf.stages.training.adapters import fit, load_start, restore
from rlhf.stages.training.examples import train_and_heldout
from rlhf.stages.training.fit import Task


class Config(Fitted):
    """Supervised fine-tuning."""

    tokens_per_step: Annotated[int, Field(ge=1)] | None = None
    """Tokens of one optimizer step, prompts included, in place of examples_per_step: a step takes the examples that
    fit."""
    loss: Literal["nll", "dft"] = "nll"
    """Loss of a token: -log p, or DFT's -p log p, whose p has no gradient (arXiv:2508.05629), as in TRL. Held-out
    examples are measured by -log p."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each target that is spread evenly over the vocabulary, as in transformers."""
    heldout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the examples kept out of training to measure the loss on, if the data holds out none."""
    optimizer: Optimizer = Optimizer(learning_rate=2e-5, schedule="linear", warmup_steps=2)
    """The optimizer."""

    @model_validator(mode="after")
    def _meaningful(self) -> Config:
        refuse_unused(self, "loss", {"label_smoothing": ("nll",)})
        return self


def run(ctx: Context) -> dict[str, Any]:
    """Trains the policy on the data's completions; returns metrics of the last step and the loss on held-out ones."""
    from rlhf.tuning.algorithms.supervised import heldout_loss, sft_loss, sft_summary
    from rlhf.tuning.device import choose
    from rlhf.tuning.losses.sft import dft, nll
    from rlhf.tuning.models.decoder import decoder_graph

    config, base = load_start(ctx, ctx.inputs["base"])
    train, held = train_and_heldout(
        ctx, ctx.inputs["data"], "sft", ctx.config.heldout_fraction, ctx.config.heldout_examples
    )
    device = choose(ctx.config.compute.dtype)
    budget = ctx.config.compute.tokens_per_micro_batch or device.row_tokens_per_step

    def measure(params: Any) -> dict[str, float]:
        return {"loss": heldout_loss(config, params, held.examples, device.compute, budget)}

    task = Task(
        make_loss=lambda compute: sft_loss(
            decoder_graph(config),
            compute,
            {"nll": nll, "dft": dft}[ctx.config.loss],
            ctx.config.label_smoothing,
            config.router_aux,
        ),
        examples=train.examples,
        measure=measure if held else None,
        tokens_per_step=ctx.config.tokens_per_step,
        summary=sft_summary,
    )
    params, metrics = fit(ctx, task, config, base, ctx.config)
    save_model(ctx, "decoder", config, params)
    return metrics | {"examples": len(train)}


STAGE = Stage(
    "sft",
    1,
    Config,
    run,
    restore=restore,
    section="sft",
    title="SFT",
    makes="policy",
    reads={"base": Reads("policy"), "data": Reads("data", ("sft/", "heldout_sft/")), "tokenizer": Reads("tokenizer")},
    headline=(
        "loss {loss:.4f}",
        "held-out {heldout_loss_before:.4f} -> {heldout_loss:.4f}",
        "{steps} steps",
        "{tokens_per_second:.0f} tok/s",
    ),
)
