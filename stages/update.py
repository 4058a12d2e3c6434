"""One round's policy update from scored rollouts.

The artifact's content is `policy.json`, the fingerprint of the new policy. Weights and optimizer
lie under `state/` where `checkpoint_every` asks for them; between, a policy is made again from
its parent, rollouts and scores, and must come out with the same fingerprint.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stages.artifacts import Artifact
from stages.base import Context, execution_setting
from stages.models import load_policy, load_scorer, recall, remember, token_ids
from stages.settings import Compute, Fraction, Optimizer, Trained
from stages.tables import read_rows
from stages.training import counted, optimizer_of

NAME = "update"
VERSION = 1


class CriticSettings(Trained):
    """The critic of PPO; it starts from the reward model."""

    optimizer: Optimizer = Optimizer(learning_rate=5e-5)
    """Its own optimizer."""
    gamma: Fraction = 1.0
    """Discount of a token step."""
    lam: Fraction = 0.95
    """Lambda of generalised advantage estimation."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Range of the clipped value loss; null: plain."""
    kl_in_reward: Annotated[float, Field(ge=0)] = 0.02
    """Weight of k1 to the reference in the token reward."""


class Config(Trained):
    """The update of one round."""

    algorithm: Literal["grpo", "ppo"] = "grpo"
    """GRPO (no critic) or PPO (critic and GAE)."""
    round: Annotated[int, Field(ge=0)] = 0
    """Number of the round."""
    prompts_per_step: Annotated[int, Field(ge=1)] = 8
    """Prompts, with all their completions, of one optimizer step."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the round's rollouts (mu)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The rollouts' temperature."""
    normalisation: Literal["std", "batch-std", "none"] = "std"
    """Scale of GRPO's advantages; none is Dr. GRPO's."""
    aggregation: Literal["token-mean", "sequence-mean-token-mean", "constant"] = "token-mean"
    """How token losses become one number; constant divides by completions x `constant`."""
    constant: Annotated[float, Field(gt=0)] | None = None
    """Token budget of the aggregation `constant`."""
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    """Ratios below 1 - clip_low stop paying."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """Ratios above 1 + clip_high stop paying."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound c of the loss where the advantage is negative."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the KL to the reference in the loss; 0 for both KL weights loads no reference."""
    kl_kind: Literal["k2", "k3"] = "k3"
    """Estimator of that KL; k1 has no gradient in expectation and is not on offer here."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    importance_max: Annotated[float, Field(ge=1)] | None = 2.0
    """Truncation of the weights between sampler and trainer; null: none."""
    max_mismatch_kl: Annotated[float, Field(gt=0)] = 0.1
    """Mean KL between sampler and trainer past which the run stops."""
    optimizer: Optimizer = Optimizer(learning_rate=2e-5)
    """The policy's optimizer; its state lives through all rounds."""
    critic: CriticSettings = CriticSettings()
    """For PPO."""
    compute: Compute = Compute()
    """How to compute."""
    store_state: bool = execution_setting(False)
    """Whether this round's weights and optimizer are stored; the recipe's checkpoint_every decides."""

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if (self.aggregation == "constant") != (self.constant is not None):
            raise ValueError("aggregation `constant` and a value for `constant` go together")
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model takes part."""
        return self.kl_coef > 0 or (self.algorithm == "ppo" and self.critic.kl_in_reward > 0)


@dataclasses.dataclass
class State:
    """A policy under training."""

    config: Any
    params: Any
    opt_state: Any
    critic: Any = None
    critic_opt: Any = None

    @property
    def trainer(self) -> Any:
        return (self.opt_state, self.critic, self.critic_opt)


class ReplayDiffers(RuntimeError):
    """A policy made again from its rollouts has other bits than the one recorded."""


def run(ctx: Context) -> dict[str, Any]:
    from tuning.models import huggingface

    state, metrics = _advance(ctx)
    mark = huggingface.fingerprint(state.params)
    (ctx.out / "policy.json").write_text(json.dumps({"fingerprint": mark, "round": ctx.config.round}) + "\n")
    if ctx.config.store_state:
        _store(ctx, state)
    remember(ctx, "decoder:new", (state.config, state.params))
    remember(ctx, "trainer:new", state.trainer)
    return metrics


def restore(ctx: Context, artifact: Artifact) -> tuple[Any, Any]:
    """(DecoderConfig, parameters) of an update artifact, from its state or made again from its parents."""
    state = _state(ctx, artifact)
    remember(ctx, f"trainer:{artifact.digest}", state.trainer)
    return remember(ctx, f"decoder:{artifact.digest}", (state.config, state.params))


def _store(ctx: Context, state: State) -> None:
    from tuning.models import huggingface
    from tuning.training.checkpoint import save_tree

    folder = ctx.out / "state"
    huggingface.save_decoder(folder / "model", state.config, state.params, token_ids(ctx.inputs["tokenizer"]))
    save_tree(folder / "trainer", state.trainer)


def _state(ctx: Context, artifact: Artifact) -> State:
    """The training state after `artifact`; an SFT or base model starts afresh."""
    kept, trainer = recall(ctx, f"decoder:{artifact.digest}"), recall(ctx, f"trainer:{artifact.digest}")
    if artifact.stage != NAME:
        config, params = load_policy(ctx, artifact)
        return _fresh(ctx, config, params)
    if kept is not None and trainer is not None:
        return State(kept[0], kept[1], *trainer)
    if artifact.has("state/"):
        from tuning.models.huggingface import load_decoder
        from tuning.training.checkpoint import load_tree

        folder: Path = artifact.local("state/")
        config, params = load_decoder(folder / "model")
        like = _fresh(_context_of(ctx, artifact), config, params)
        return State(config, params, *load_tree(folder / "trainer", like.trainer))
    ctx.log(f"replaying the update of round {artifact.manifest['config']['round']} from its stored rollouts")
    from tuning.models.huggingface import fingerprint

    state, _ = _advance(_context_of(ctx, artifact))
    wanted = json.loads(artifact.local("policy.json").read_text())["fingerprint"]
    found = fingerprint(state.params)
    if found != wanted:
        raise ReplayDiffers(
            f"replaying {artifact.url} gave policy {found[:12]}, recorded is {wanted[:12]}: other hardware or "
            f"libraries than {artifact.manifest['device']} with jax {artifact.manifest['versions']['jax']}; "
            f"`rlhf run RECIPE --force round-{artifact.manifest['config']['round']:03d}.update` makes it again here, "
            "and rl.checkpoint_every: 1 stores every policy"
        )
    return state


def _context_of(ctx: Context, artifact: Artifact) -> Context:
    """The context in which `artifact` was made, within the worker of `ctx`."""
    inputs = {}
    for name, ref in artifact.manifest["inputs"].items():
        found = artifact.store.get(ref["stage"], ref["key"])
        if found is None:
            raise RuntimeError(f"{artifact.url} cannot be replayed: its input {name} ({ref['stage']}) is gone")
        inputs[name] = found
    config = Config.model_validate_json(json.dumps(artifact.manifest["config"]))
    return dataclasses.replace(
        ctx, config=config, inputs=inputs, seed=artifact.manifest["seed"], out=ctx.work / "replay", progress=_silent
    )


def _silent(done: int, total: int, unit: str, **metrics: float) -> None:
    pass


def _fresh(ctx: Context, config: Any, params: Any) -> State:
    import jax

    from tuning.training.step import copy

    state = State(config, params, jax.jit(optimizer_of(ctx.config.optimizer, 1).init)(params))
    if ctx.config.algorithm == "ppo":
        _, critic = load_scorer(ctx, ctx.inputs["reward"])
        state.critic = copy(critic)
        state.critic_opt = jax.jit(optimizer_of(ctx.config.critic.optimizer, 1).init)(state.critic)
    return state


def _advance(ctx: Context) -> tuple[State, dict[str, Any]]:
    """The state after this round, and the round's metrics."""
    from tuning.algorithms.rounds import RoundData, run_round
    from tuning.training.step import copy

    config: Config = ctx.config
    parent = ctx.inputs["policy"]
    # The step donates what it is given: the parent's trainer state leaves the memory.
    state = _state(ctx, parent)
    ctx.memory.pop(f"trainer:{parent.digest}", None)
    if parent.stage == NAME:
        # Nobody needs the last round's policy again; a copy beside the new one would only fill the memory.
        ctx.memory.pop(f"decoder:{parent.digest}", None)
    else:
        state = dataclasses.replace(state, params=copy(state.params))
    rollouts = read_rows(ctx.inputs["rollouts"], "rollouts/")
    scores = read_rows(ctx.inputs["scores"], "scores/")
    if [(r["prompt_id"], r["sample"]) for r in rollouts] != [(s["prompt_id"], s["sample"]) for s in scores]:
        raise RuntimeError("rollouts and scores do not list the same completions in the same order")
    wrong = [r for r in rollouts if r["policy"] != parent.digest]
    if wrong:
        raise RuntimeError(
            f"rollouts come from policy {wrong[0]['policy'][:12]}, the update starts at {parent.digest[:12]}"
        )
    reference = load_policy(ctx, ctx.inputs["reference"])[1] if config.needs_reference else None
    started = time.monotonic()
    state.params, state.opt_state, state.critic, state.critic_opt, metrics = run_round(
        RoundData.from_rows(rollouts, scores),
        settings=config,
        model=state.config,
        optimizers=(optimizer_of(config.optimizer, 1), optimizer_of(config.critic.optimizer, 1)),
        trainer=(state.params, state.opt_state, state.critic, state.critic_opt),
        reference=reference,
        counted=counted,
        progress=ctx.progress,
        record=ctx.metrics_line,
    )
    if metrics.get("mismatch_kl", 0.0) > config.max_mismatch_kl:
        raise RuntimeError(
            f"sampler and trainer disagree: mismatch KL {metrics['mismatch_kl']:.4f} is above "
            f"max_mismatch_kl {config.max_mismatch_kl}; compare dtypes, or raise the limit knowingly"
        )
    return state, metrics | {"seconds_update": round(time.monotonic() - started, 2)}
