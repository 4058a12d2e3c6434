"""Distillation: the policy learns a teacher's next-token distributions, on given and on sampled completions.

Generalised knowledge distillation (Agarwal et al., arXiv:2306.13649): a share `on_policy` of the steps samples the
completions from the current policy; the others take those of the SFT data. All prompts are those of the SFT data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf.stages.common.models import (
    limits_of,
    load_frozen,
    load_tokenizer,
    mesh_of,
    save_model,
    stop_ids,
)
from rlhf.stages.common.settings import Fitted, Optimizer, refuse_unused
from rlhf.stages.contract.definition import Context, Reads, Stage
from rlhf.stages.training.adapters import fit, load_start, restore
from rlhf.stages.training.examples import train_and_heldout
from rlhf.stages.training.fit import Task
from rlhf.tuning.settings import Fraction

if TYPE_CHECKING:
    from rlhf.tuning.training.batch import Group


POLICIES = ("base", "sft", "preference", "rl")
"""Teachers that the run itself trains."""


class TokenizersDiffer(ValueError):
    """Teacher and student map tokens to different ids."""


class Config(Fitted):
    """Distillation into the policy."""

    teacher: str = "sft"
    """A policy of this run (base, sft, preference, rl), or another model, named as in base.source."""
    divergence: Literal["forward-kl", "reverse-kl", "jsd"] = "forward-kl"
    """forward-kl, KL(teacher || policy), covers all modes of the teacher; reverse-kl, KL(policy || teacher), seeks one;
    jsd is between."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Weight of the teacher in the mixture of jsd; near 0 like forward-kl, near 1 like reverse-kl."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits of both sides."""
    on_policy: Fraction = 0.5
    """Share of the steps whose completions the policy samples itself (lambda of GKD)."""
    max_tokens: Annotated[int, Field(ge=1)] = 64
    """Longest sampled completion in tokens, EOS included."""
    sampling_temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature at which the policy samples."""
    heldout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the examples kept out of training to measure the divergence on;
    drawn by group, so that completions of one prompt are on one side."""
    optimizer: Optimizer = Optimizer(learning_rate=2e-5, schedule="linear", warmup_steps=2)
    """The optimizer."""

    @model_validator(mode="after")
    def _meaningful(self) -> Config:
        refuse_unused(self, "divergence", {"beta": ("jsd",)})
        return self

    @property
    def weight(self) -> float:
        """beta of the generalised Jensen-Shannon divergence."""
        return {"forward-kl": 0.0, "reverse-kl": 1.0, "jsd": self.beta}[self.divergence]


def run(ctx: Context) -> dict[str, Any]:
    """Train the policy; return its metrics and the held-out divergence per token before and after."""
    import numpy as np

    from rlhf.tuning.algorithms.distillation import distillation_loss, summed_divergence
    from rlhf.tuning.device import choose
    from rlhf.tuning.mesh import mesh_of as placed_on
    from rlhf.tuning.mesh import put_params
    from rlhf.tuning.models.decoder import decoder_graph
    from rlhf.tuning.training.completions import per_completion
    from rlhf.tuning.training.speed import forward_flops

    config: Config = ctx.config
    check_tokenizers(ctx)
    model, start = load_start(ctx, ctx.inputs["policy"])
    teacher_model, teacher = load_frozen(ctx, ctx.inputs["teacher"])
    # Another stage may have loaded it on another mesh.
    teacher = put_params(teacher, mesh_of(ctx))
    train, held = train_and_heldout(ctx, ctx.inputs["data"], "sft", config.heldout_fraction, config.heldout_examples)
    groups, held_groups = train.examples, held.examples
    device = choose(config.compute.dtype)
    budget = config.compute.tokens_per_micro_batch or device.row_tokens_per_step

    def measure(params: Any) -> dict[str, float]:
        """Mean divergence of a held-out token."""
        forward = summed_divergence(model, teacher_model, config.weight, config.temperature, device.compute)
        mesh = placed_on(params)
        divergences = per_completion(lambda batch: forward(params, teacher, batch), held_groups, budget, mesh=mesh)
        # Without masks all tokens of the completion count.
        tokens = sum(sum(g.masks[0]) if g.masks else len(g.completions[0]) for g in held_groups)
        return {"divergence": float(divergences.sum() / tokens)}

    graphs = decoder_graph(model), decoder_graph(teacher_model)
    samples = config.on_policy > 0
    prompt = int(np.diff(groups.prompts_N2).max())
    task = Task(
        make_loss=lambda compute: distillation_loss(graphs, config.weight, config.temperature, compute),
        examples=groups,
        summary=lambda s: {"loss": s["divergence"] / s["tokens"], "tokens": s["tokens"]},
        # The forward pass of the teacher.
        flops=lambda groups: forward_flops(teacher_model, groups),
        sample=_sampler(ctx, model, device) if samples else None,
        measure=measure if held else None,
        judged="divergence",
        # Sampled completions may be longer than all of the data: rows must have room for them.
        longest=samples * config.max_tokens,
        largest=samples * (prompt + config.max_tokens),
    )
    params, metrics = fit(ctx, task, model, start, config, frozen=teacher)
    save_model(ctx, "decoder", model, params)
    return metrics | {"examples": len(train)}


def _sampler(ctx: Context, model: Any, device: Any) -> Any:
    """Return the function (parameters, step, groups) -> groups, with sampled completions in on-policy steps."""
    import numpy as np

    from rlhf.tuning.rollout.engine.placement import replicas_of, sampling_mesh
    from rlhf.tuning.rollout.engine.replicas import engine_over
    from rlhf.tuning.rollout.requests import Sampling
    from rlhf.tuning.training.batch import Group

    config: Config = ctx.config
    # One engine for all steps compiles once.
    mesh = sampling_mesh(config.compute.mesh)
    limits = limits_of(config.compute, device, replicas=replicas_of(mesh))
    engine = engine_over(mesh, model, device.compute.dtype, limits)
    eos = stop_ids(ctx, ctx.inputs["tokenizer"])

    def sample(params: Any, step: int, groups: list[Group]) -> list[Group]:
        # A resumed run decides as an uninterrupted one: each step has its own generator.
        if np.random.default_rng((ctx.seed, step)).random() >= config.on_policy:
            return groups
        sampled = engine.generate(
            params,
            [g.prompt for g in groups],
            samples=1,
            max_tokens=config.max_tokens,
            sampling=Sampling(temperature=config.sampling_temperature),
            eos_ids=eos,
            seed=ctx.seed,
            # Places in the random stream that no other step uses.
            counters=[step * config.examples_per_step + i for i in range(len(groups))],
        )
        return [Group(g.prompt, [c.tokens], g.ids) for g, (c,) in zip(groups, sampled, strict=True)]

    return sample


def check_tokenizers(ctx: Context) -> None:
    """Raise TokenizersDiffer if the teacher has its own tokenizer with other token ids."""
    teacher = ctx.inputs["teacher"]
    if not teacher.has("tokenizer/"):
        return
    own = load_tokenizer(ctx, ctx.inputs["tokenizer"]).get_vocab()
    others = load_tokenizer(ctx, teacher).get_vocab()
    if own == others:
        return
    token = min(t for t in own.keys() | others.keys() if own.get(t) != others.get(t))
    name = (teacher.manifest.get("config") or {}).get("source", teacher.url)
    raise TokenizersDiffer(
        f"distill.teacher {name} has another tokenizer than the policy: {len(others)} and {len(own)} tokens, and "
        f"{token!r} is number {others.get(token)} and {own.get(token)}. Distributions over tokens can be compared "
        "only within one vocabulary: take a teacher of the same model family"
    )


STAGE = Stage(
    "distill",
    1,
    Config,
    run,
    restore=restore,
    section="distill",
    title="distilled",
    makes="policy",
    reads={
        "data": Reads("data", ("sft/", "heldout_sft/")),
        "tokenizer": Reads("tokenizer"),
        "policy": Reads("policy"),
        "teacher": Reads("teacher"),
    },
    headline=("loss {loss:.4f}", "held-out divergence {heldout_divergence_before:.3f} -> {heldout_divergence:.3f}"),
)
