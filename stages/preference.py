"""Preference optimisation: the policy learns from judged completions without a reward model (DPO and its relatives).

Both completions of a pair follow their prompt, which is computed once. Log-probabilities of the reference are computed
once, before training; ORPO, SimPO and CPO need none. The reference is the policy before this stage; with
`lora.quantize` it has the quantised kernels. KTO learns from completions that are labelled good or bad, or from split
pairs. Its reference point is the step's mean log-ratio on completions of other prompts (Ethayarajh et al.,
arXiv:2402.01306).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from rlhf.stages.common.models import load_frozen, save_model
from rlhf.stages.common.settings import Fitted, Optimizer, refuse_unused, stored_as, with_defaults
from rlhf.stages.contract.definition import Context, Reads, Stage
from rlhf.stages.training.adapters import fit, load_start, restore
from rlhf.stages.training.examples import train_and_heldout
from rlhf.stages.training.fit import Task
from rlhf.tuning import multihost
from rlhf.tuning.algorithms import settings as core

if TYPE_CHECKING:
    import numpy as np

    from rlhf.tuning.data.reading import Examples
    from rlhf.tuning.models.config import DecoderConfig
    from rlhf.tuning.training.batch import Group


Scorer = Callable[..., "np.ndarray"]
"""(parameters, groups, like) -> log p of each completion, as `rlhf.tuning.training.completions.per_completion`."""


class Config(Fitted, core.Preference):  # type: ignore[misc]
    """Preference optimisation; an example is a pair, for KTO a completion."""

    heldout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the examples kept out of training to measure on, if the data holds out none;
    drawn by group, so that completions of one prompt are on one side."""
    optimizer: Optimizer = Optimizer(learning_rate=1e-6, schedule="linear", warmup_steps=2)
    """The optimizer."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_loss(cls, values: Any) -> Any:
        return with_defaults(values, "loss", core.LOSS_DEFAULTS)

    @model_validator(mode="after")
    def _meaningful(self) -> Config:
        refuse_unused(self, "loss", core.LOSS_USES)
        if self.loss == "exo-pair" and self.label_smoothing == 0:
            raise ValueError("exo-pair needs a label_smoothing above 0")
        if self.loss == "kto" and self.examples_per_step < 2:
            raise ValueError("kto takes its reference point from the step: examples_per_step must be 2 or more")
        return self


def run(ctx: Context) -> dict[str, Any]:
    """Trains the policy; returns metrics of the last step and of the held-out examples, before and after."""
    from rlhf.tuning.algorithms.preference import scorer
    from rlhf.tuning.device import choose
    from rlhf.tuning.mesh import mesh_of
    from rlhf.tuning.training.completions import per_completion

    config: Config = ctx.config
    model, start = load_start(ctx, ctx.inputs["policy"])
    kind = stored_as(config.lora)
    reference = load_frozen(ctx, ctx.inputs["reference"], kind)[1] if config.needs_reference else None
    device = choose(config.compute.dtype)
    budget = config.compute.tokens_per_micro_batch or device.row_tokens_per_step

    def logps(
        params: Any, groups: Sequence[Group], like: Sequence[Group] | None = None, ld_alpha: float = config.ld_alpha
    ) -> np.ndarray:
        forward = scorer(model, ld_alpha, device.compute)
        # whole: a pair stays in neighbouring slots, where `ld_alpha` looks for the other side.
        on = mesh_of(params)
        return per_completion(lambda batch: forward(params, batch), groups, budget, like=like, whole=True, mesh=on)

    task = (_labelled if config.unpaired else _pairs)(ctx, model, config, logps, reference)
    params, metrics = fit(ctx, task, model, start, config)
    save_model(ctx, "decoder", model, params)
    return metrics | {"examples": len(task.examples)}


def _kept(ctx: Context, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """Read an array that an earlier try left in `ctx.work`, or make it."""
    import numpy as np

    path = ctx.work / name / "values.npy"
    if multihost.from_primary(path.is_file):
        ctx.log(f"resumed: the {name.replace('-', ' ')} were there")
        return np.asarray(np.load(io.BytesIO(multihost.bytes_from_primary(path.read_bytes))))
    made = make()
    if ctx.is_primary:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(".values.npy")
        np.save(partial, made)
        # Renamed when complete: the next try must not read half a file.
        partial.rename(path)
        ctx.saved()
    return made


def _pairs(ctx: Context, model: DecoderConfig, settings: core.Preference, logps: Scorer, reference: Any) -> Task:
    """Return the task on pairs."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from rlhf.tuning.algorithms.preference import pair_losses, pair_summary, preference_loss
    from rlhf.tuning.evaluation.statistics import win_rate
    from rlhf.tuning.models.decoder import decoder_graph

    train, held = train_and_heldout(
        ctx, ctx.inputs["data"], "preference", ctx.config.heldout_fraction, ctx.config.heldout_examples
    )
    groups, held_groups = train.examples, held.examples
    known = held_known = None
    if reference is not None:
        known = _kept(ctx, "reference-logps", lambda: logps(reference, groups)).reshape(-1, 2)
        held_known = logps(reference, held_groups) if held else None

    def columns(params: Any, examples: list[int], packed: list[Any]) -> list[dict[str, Any]]:
        assert known is not None
        # Completions of a step are numbered by pair: chosen, rejected, chosen, ...
        return [{"reference_C": p.gather(known[examples].reshape(-1))} for p in packed]

    def measure(params: Any) -> dict[str, float]:
        policy_logps = logps(params, held_groups)
        lengths = held_groups.lengths_NC.reshape(-1).astype(np.float32)
        weighs = settings.sft_weight and settings.ld_alpha < 1
        whole = logps(params, held_groups, ld_alpha=1.0) if weighs else None
        judged = pair_losses(settings, *jax.tree.map(jnp.asarray, (policy_logps, lengths, held_known, whole)))
        losses, chosen, rejected = map(np.asarray, judged)
        pairs = policy_logps.reshape(-1, 2)
        return {
            "pairs": len(held),
            "loss": float(losses.mean()),
            "accuracy": win_rate(chosen, rejected),
            "margin": float((chosen - rejected).mean()),
            "chosen_logps": float(pairs[:, 0].mean()),
            "rejected_logps": float(pairs[:, 1].mean()),
            "ranking": win_rate(pairs[:, 0], pairs[:, 1]),
        }

    return Task(
        make_loss=lambda compute: preference_loss(decoder_graph(model), settings, compute),
        examples=groups,
        columns=None if reference is None else columns,
        summary=pair_summary,
        measure=measure if held else None,
    )


def _labelled(ctx: Context, model: DecoderConfig, settings: core.Preference, logps: Scorer, reference: Any) -> Task:
    """Return the task on completions with a label."""
    import jax.numpy as jnp
    import numpy as np

    from rlhf.tuning.algorithms.preference import (
        chance_above,
        mismatched,
        unpaired_loss,
        unpaired_losses,
        unpaired_summary,
    )
    from rlhf.tuning.losses.preference import kto_reference_point
    from rlhf.tuning.models.decoder import decoder_graph
    from rlhf.tuning.precision import real
    from rlhf.tuning.training.batch import numbered
    from rlhf.tuning.training.speed import forward_flops

    has_labels = "labelled" in ctx.inputs
    source, part = ("labelled", "labelled") if has_labels else ("data", "preference")

    def mismatched_examples(examples: Examples) -> Examples:
        return examples.with_completions_of(mismatched(examples.prompt_bytes()))

    tables = train_and_heldout(ctx, ctx.inputs[source], part, ctx.config.heldout_fraction, ctx.config.heldout_examples)
    # A pair is a good and a bad completion.
    groups, held_groups = (t.examples if has_labels else t.examples.apart() for t in tables)
    labels, held_labels = (
        np.asarray(t.column("label")) if has_labels else np.tile([True, False], len(t)) for t in tables
    )
    # For KTO's reference point: each prompt with the completion of another one.
    other = mismatched_examples(groups)
    if len(set(labels)) < 2:
        raise ValueError(
            f"all {len(groups)} labels are {bool(labels[0])}: {settings.loss} needs completions of both kinds"
        )
    measured = held_groups if ctx.config.heldout_examples else ()
    prompts = {tuple(group.prompt) for group in measured}
    if len(measured) and min(len(prompts), len(set(held_labels))) < 2:
        raise ValueError(
            f"heldout_examples leaves {len(held_groups)} completions, of {len(prompts)} prompts and "
            f"{len(set(held_labels))} kinds of labels, and {settings.loss} is measured on two of each: raise it"
        )
    known = _kept(ctx, "reference-logps", lambda: logps(reference, groups))
    other_known = _kept(ctx, "mismatched-reference-logps", lambda: logps(reference, other))

    def reference_point(
        params: Any, groups: Sequence[Group], known: np.ndarray, like: Sequence[Group]
    ) -> np.floating[Any]:
        if settings.loss != "kto":
            return real().type(0)
        return real().type(kto_reference_point(logps(params, groups, like), known))

    def columns(params: Any, examples: list[int], packed: list[Any]) -> list[dict[str, Any]]:
        step = numbered([other[i] for i in examples])
        # From the policy of this step, without a gradient.
        kl = reference_point(params, step, other_known[examples], other)
        arrays = {"reference_C": known[examples], "label_C": labels[examples].astype(np.float32)}
        return [{k: p.gather(v) for k, v in arrays.items()} | {"kl": kl} for p in packed]

    # The measurement compares good completions with bad ones.
    both_kinds = len(set(held_labels)) == 2
    if both_kinds:
        held_other = mismatched_examples(held_groups)
        held_known, held_other_known = logps(reference, held_groups), logps(reference, held_other)

    def measure(params: Any) -> dict[str, float]:
        kl = reference_point(params, held_other, held_other_known, held_other)
        policy_logps = logps(params, held_groups)
        judged = unpaired_losses(settings, *map(jnp.asarray, (policy_logps, held_known, held_labels, kl)))
        losses, rewards = map(np.asarray, judged)
        good, bad = rewards[held_labels], rewards[~held_labels]
        return {
            "completions": len(held_groups),
            "loss": float(losses.mean()),
            "accuracy": chance_above(good, bad),
            "margin": float(good.mean() - bad.mean()),
            "kl": float(kl),
            "ranking": chance_above(policy_logps[held_labels], policy_logps[~held_labels]),
        }

    return Task(
        make_loss=lambda compute: unpaired_loss(decoder_graph(model), settings, compute),
        examples=groups,
        columns=columns,
        # The reference point of KTO is a forward pass over as many completions of other prompts.
        flops=lambda groups: forward_flops(model, groups) if settings.loss == "kto" else 0.0,
        summary=unpaired_summary,
        measure=measure if both_kinds else None,
    )


STAGE = Stage(
    "preference",
    1,
    Config,
    run,
    restore=restore,
    section="preference",
    title="preference",
    makes="policy",
    reads={
        "tokenizer": Reads("tokenizer"),
        "policy": Reads("policy"),
        "labelled": Reads(
            "data", ("labelled/", "heldout_labelled/"), when=lambda c, splits: c.unpaired and "labelled" in splits
        ),
        "data": Reads(
            "data",
            ("preference/", "heldout_preference/"),
            when=lambda c, splits: not c.unpaired or "labelled" not in splits,
        ),
        "reference": Reads("policy", when=lambda c, _: c.needs_reference),
    },
    headline=(
        "loss {loss:.4f}",
        "held-out accuracy {heldout_accuracy:.3f}",
        "margin {heldout_margin:.3f}",
        "held-out ranking {heldout_ranking_before:.3f} -> {heldout_ranking:.3f}",
    ),
)
