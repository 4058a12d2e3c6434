"""One round's policy update from scored rollouts.

The artifact's content is `policy.json`, the fingerprint of the new policy. Weights and optimizer
lie under `state/` where `checkpoint_every` asks for them; between, a policy is made again from
its parent, rollouts and scores, and must come out with the same fingerprint.

With `lora` the rounds train one adapter over the policy before the first of them, and PPO's critic is one over the
reward model. An adapter is small: every round keeps it, as content under `adapter/` and with its moments in `state/`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from stages.common.models import ADAPTER, load_policy, load_rounded, load_scorer, recall, remember, token_ids
from stages.common.settings import stored_as
from stages.common.tables import read_table
from stages.contract.definition import Context, Reads, Stage
from stages.contract.sources import user_digests
from stages.sampling.groups import chosen_groups, read_scored, refills
from stages.store.artifacts import Artifact
from stages.training.adapters import based, lora_config, name_of
from stages.training.fit import optimizer_of
from stages.update.settings import Config
from tuning.rows import ScoreRow

NAME = "update"


def source_digests(config: Config) -> dict[str, str]:
    """Hashes of the code of a user's algorithm. Raises ValueError for one that is not there."""
    from tuning.algorithms import registry

    return {} if registry.find(config.algorithm) else user_digests(config.algorithm, "rl.update.algorithm")


def loads(config: Config) -> tuple[str, ...]:
    """The module of a built-in algorithm, which is loaded by name: one algorithm's code is no part of another's key."""
    from tuning.algorithms import registry

    entry = registry.find(config.algorithm)
    return (f"tuning.algorithms.{entry.module}",) if entry else ()


@dataclasses.dataclass
class State:
    """A policy under training: dense parameters, and with `lora` the adapter that is merged in them.

    The critic then is a trainable tree of `tuning.models.lora`, not dense.
    """

    config: Any
    params: Any
    opt_state: Any
    critic: Any = None
    critic_opt: Any = None
    adapter: Any = None
    coefficients: Any = None
    """`tuning.algorithms.diagnostics.Coefficients` of the next round; None: as the settings have them."""

    @property
    def trainer(self) -> Any:
        return (self.opt_state, self.critic, self.critic_opt, self.adapter)


class ReplayDiffers(RuntimeError):
    """A policy made again from its rollouts has other bits than the one recorded."""


def run(ctx: Context) -> dict[str, Any]:
    from tuning.models.peft import save_adapter

    state, metrics = _advance(ctx)
    content = {"fingerprint": _mark(state), "round": ctx.config.round}
    if ctx.config.kl_target is not None or ctx.config.entropy_target is not None:
        content |= dataclasses.asdict(state.coefficients)
    (ctx.out / "policy.json").write_text(json.dumps(content) + "\n")
    if ctx.config.lora is not None:
        below = name_of(_start(ctx.config, ctx.inputs["policy"]))
        save_adapter(ctx.out / ADAPTER, state.adapter, lora_config(ctx.config.lora), below)
    if ctx.config.store_state or ctx.config.lora is not None:
        _store(ctx, state)
    remember(ctx, "decoder:new", (state.config, state.params))
    remember(ctx, "trainer:new", state.trainer)
    return metrics


def restore(ctx: Context, artifact: Artifact) -> tuple[Any, Any]:
    """(DecoderConfig, parameters) of an update artifact, from its state or made again from its parents."""
    state = _state(ctx, artifact)
    remember(ctx, f"trainer:{artifact.digest}", state.trainer)
    return remember(ctx, f"decoder:{artifact.digest}", (state.config, state.params))


def _mark(state: State) -> str:
    """The fingerprint of a policy: of its parameters and, where there is one, of the adapter among them."""
    from tuning.models.huggingface import fingerprint

    whole = fingerprint(state.params)
    if state.adapter is None:
        return whole
    return hashlib.sha256(f"{whole}{fingerprint(state.adapter)}".encode()).hexdigest()


def _store(ctx: Context, state: State) -> None:
    from tuning.models import huggingface
    from tuning.training.checkpoint import save_tree

    folder = ctx.out / "state"
    if state.adapter is None:
        huggingface.save_decoder(folder / "model", state.config, state.params, token_ids(ctx.inputs["tokenizer"]))
    save_tree(folder / "trainer", state.trainer)


def _continues(config: Config, artifact: Artifact) -> bool:
    """Whether an update of `config` goes on with the trainer of `artifact`, and not afresh from its policy."""
    return artifact.stage == NAME and artifact.manifest["config"].get("lora") == config.model_dump(mode="json")["lora"]


def _start(config: Config, policy: Artifact) -> Artifact:
    """The artifact whose policy was the first that this run of updates, ending in `policy`, began with."""
    while _continues(config, policy):
        policy = _input(policy, "policy")
    return policy


def _bases(ctx: Context) -> tuple[Any, Any]:
    """What lies frozen under the adapters of policy and critic; None where all parameters are trained."""
    config: Config = ctx.config
    if config.lora is None:
        return None, None
    start = _start(config, ctx.inputs["policy"])
    policy = based(ctx, start.digest, "decoder", lambda: load_policy(ctx, start), config)
    if not config.needs_critic:
        return policy, None
    reward = ctx.inputs["reward"]
    return policy, based(ctx, reward.digest, "scalar", lambda: load_scorer(ctx, reward), config)


def _merged(ctx: Context, adapter: Any) -> tuple[Any, Any]:
    """(DecoderConfig, dense parameters) of an adapter that was trained in the context `ctx`."""
    from tuning.models.lora import merge

    config, params = load_policy(ctx, _start(ctx.config, ctx.inputs["policy"]))
    return config, merge(config, "decoder", params, adapter, lora_config(ctx.config.lora))


def _state(ctx: Context, artifact: Artifact) -> State:
    """The training state after the update `artifact`."""
    kept, trainer = recall(ctx, f"decoder:{artifact.digest}"), recall(ctx, f"trainer:{artifact.digest}")
    if kept is not None and trainer is not None:
        return State(kept[0], kept[1], *trainer)
    own = _context_of(ctx, artifact)
    if artifact.has("state/"):
        from tuning.models.huggingface import load_decoder
        from tuning.training.checkpoint import load_tree

        folder: Path = artifact.local("state/")
        if own.config.lora is None:
            config, params = load_decoder(folder / "model")
            return State(config, params, *load_tree(folder / "trainer", _fresh(own, config, params).trainer))
        start = load_policy(ctx, _start(own.config, artifact))
        trainer = load_tree(folder / "trainer", _fresh(own, *start).trainer)
        return State(*_merged(own, trainer[-1]), *trainer)
    ctx.log(f"replaying the update of round {artifact.manifest['config']['round']} from its stored rollouts")
    try:
        state, _ = _advance(own)
    finally:
        own.close()
    wanted = json.loads(artifact.local("policy.json").read_text())["fingerprint"]
    found = _mark(state)
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
    inputs = {name: _input(artifact, name) for name in artifact.manifest["inputs"]}
    config = Config.model_validate_json(json.dumps(artifact.manifest["config"]))
    return dataclasses.replace(
        ctx, config=config, inputs=inputs, seed=artifact.manifest["seed"], out=ctx.work / "replay", progress=_silent
    )


def _input(artifact: Artifact, name: str) -> Artifact:
    ref = artifact.manifest["inputs"][name]
    found = artifact.store.get(ref["stage"], ref["key"])
    if found is None:
        raise RuntimeError(f"{artifact.url} cannot be replayed: its input {name} ({ref['stage']}) is gone")
    return found


def _silent(done: int, total: int, unit: str, **metrics: float) -> None:
    pass


def _fresh(ctx: Context, config: Any, params: Any) -> State:
    """The state before the first update: new optimizers and, with `lora`, new adapters."""
    import jax

    from tuning.models.lora import tune
    from tuning.training.step import copy

    lora = ctx.config.lora
    # The adapter is the same over any form of the frozen kernels.
    plain = None if lora is None else dataclasses.replace(lora_config(lora), quantize="none")

    def trainable(role: Any, model: Any, weights: Any) -> Any:
        # What is trained is donated; all else stays shared with what the worker keeps.
        return copy(weights if plain is None else tune(model, role, weights, plain, seed=ctx.seed)[0])

    trained = trainable("decoder", config, params)
    opt_state = jax.jit(optimizer_of(ctx.config.optimizer, 1).init)(trained)
    state = State(config, trained, opt_state) if lora is None else State(config, params, opt_state, adapter=trained)
    if ctx.config.needs_critic:
        state.critic = trainable("scalar", *load_scorer(ctx, ctx.inputs["reward"]))
        state.critic_opt = jax.jit(optimizer_of(ctx.config.critic.optimizer, 1).init)(state.critic)
    return state


def _advance(ctx: Context) -> tuple[State, dict[str, Any]]:
    """The state after this round, and the round's metrics."""
    from tuning.algorithms.algorithm import Objective
    from tuning.algorithms.diagnostics import Coefficients
    from tuning.algorithms.rounds import run_round
    from tuning.training.batch import counted

    config: Config = ctx.config
    parent = ctx.inputs["policy"]
    data, about = _rollouts(ctx)
    state = _state(ctx, parent) if _continues(config, parent) else _fresh(ctx, *load_policy(ctx, parent))
    # The step donates what it is given: the parent's trainer state leaves the memory.
    ctx.memory.pop(f"trainer:{parent.digest}", None)
    if parent.stage == NAME:
        # Nobody needs the last round's policy again; a copy beside the new one would only fill the memory.
        ctx.memory.pop(f"decoder:{parent.digest}", None)
    coefficients = _coefficients(config, parent) or Coefficients(entropy_coef=config.entropy_coef)
    # The distance to it is 0 while the adapter is.
    reference = (
        load_rounded(ctx, ctx.inputs["reference"], stored_as(config.lora))[1] if config.needs_reference else None
    )
    started = time.monotonic()
    trained, state.opt_state, state.critic, state.critic_opt, metrics = run_round(
        data,
        settings=config,
        model=state.config,
        optimizers=(optimizer_of(config.optimizer, 1), optimizer_of(config.critic.optimizer, 1)),
        trainer=(
            state.params if state.adapter is None else state.adapter,
            state.opt_state,
            state.critic,
            state.critic_opt,
        ),
        bases=_bases(ctx),
        reference=reference,
        counted=counted,
        progress=ctx.progress,
        record=ctx.metrics_line,
        coefficients=coefficients,
    )
    if config.lora is None:
        state.params = trained
    else:
        state.adapter = trained
        _, state.params = _merged(ctx, trained)
    state.coefficients = coefficients.next(Objective.of(config), config, metrics)
    return state, metrics | about | {"seconds_update": round(time.monotonic() - started, 2)}


def _coefficients(config: Config, parent: Artifact) -> Any:
    """What the last round adapted; None where this is the first or nothing is adapted."""
    from tuning.algorithms.diagnostics import Coefficients

    if not _continues(config, parent):
        return None
    kept = json.loads(parent.local("policy.json").read_text())
    names = {f.name for f in dataclasses.fields(Coefficients)}
    return Coefficients(**{n: kept[n] for n in names}) if names <= kept.keys() else None


def _rollouts(ctx: Context) -> tuple[Any, dict[str, Any]]:
    """The round's scored rollouts, those of its refills behind them, and what became of each prompt."""
    from tuning.algorithms.round_data import RoundData

    config: Config = ctx.config
    scored = read_scored(ctx.inputs)
    digest = ctx.inputs["policy"].digest
    wrong = [] if config.off_policy else [row for row in scored.rollouts if row.policy != digest]
    if wrong:
        raise RuntimeError(f"rollouts come from policy {wrong[0].policy[:12]}, the update starts at {digest[:12]}")
    about: dict[str, Any] = {}
    if refills(ctx.inputs):
        scored, about = chosen_groups(scored, config.short_of_groups)
    greedy = read_table(ctx.inputs["greedy_scores"], "scores/", ScoreRow) if config.needs_greedy else None
    return RoundData.from_rows(scored.rollouts, scored.scores, greedy), about


STAGE = Stage(
    "update",
    1,
    Config,
    run,
    sources=source_digests,
    loads=loads,
    restore=restore,
    section="rl.update",
    title="RL",
    makes="policy",
    reads={
        "policy": Reads("policy"),
        "rollouts": Reads("rollouts"),
        "scores": Reads("scores"),
        "refills": Reads("refill_*"),
        "greedy_scores": Reads("greedy_scores", when=lambda c, _: c.needs_greedy),
        "tokenizer": Reads("tokenizer"),
        "reference": Reads("reference", when=lambda c, _: c.needs_reference),
        "reward": Reads("reward", when=lambda c, _: c.needs_critic),
    },
    headline=("KL {kl:.4f}", "mismatch {mismatch_kl:.1e}", "clip {clip_fraction:.3f}", "entropy {entropy:.3f}"),
)
