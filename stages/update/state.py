"""The state that one round's update passes to the next: its content, where it is kept, and its replay.

    after a round     in the worker's memory: `decoder:DIGEST` and `trainer:DIGEST`
    checkpoint_every  stored below `state/`: the model and the learners' arrays
    between           rebuilt: the round is replayed from its parent, rollouts and scores

A rebuilt policy must have the fingerprint that `policy.json` recorded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.stages.common.models import (
    TRAINER,
    below,
    load_base,
    load_frozen,
    load_scorer,
    mesh_of,
    recall,
    remember,
    token_ids,
)
from rlhf.stages.common.settings import Mesh, stored_as
from rlhf.stages.contract.definition import Context
from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.store.work import is_chunk
from rlhf.stages.training.adapters import based, load_start, lora_config
from rlhf.stages.update.settings import Config

if TYPE_CHECKING:
    from rlhf.tuning.algorithms.diagnostics import Coefficients
    from rlhf.tuning.algorithms.learner import Learner
    from rlhf.tuning.models.config import DecoderConfig
    from rlhf.tuning.models.lora import Base, LoraConfig

NAME = "update"

Advance = Callable[[Context, "State | None"], tuple["State", dict[str, Any]]]
"""The update of a context's round: its state after it, and its metrics."""


class ReplayDiffers(RuntimeError):
    """A policy rebuilt from its rollouts has other bits than the one recorded."""


@dataclasses.dataclass
class State:
    """A policy under training: dense parameters, and with `lora` the adapter that is merged in them.

    The critic then is a trainable tree of `rlhf.tuning.models.lora`, not dense.
    """

    config: DecoderConfig
    params: Any
    opt_state: Any
    critic: Any = None
    critic_opt: Any = None
    adapter: Any = None
    coefficients: Coefficients | None = None
    """Of the next round; None: as the settings have them."""

    @property
    def trainer(self) -> tuple[Any, Any, Any, Any]:
        """The arrays of a round but for the dense parameters. Checkpoints depend on the order of its leaves."""
        return (self.opt_state, self.critic, self.critic_opt, self.adapter)

    def learners(self, bases: tuple[Base | None, Base | None]) -> tuple[Learner, Learner | None]:
        """Return policy and critic as a round trains them, over the frozen parameters below their adapters."""
        from rlhf.tuning.algorithms.learner import Learner

        policy = Learner(self.params if self.adapter is None else self.adapter, self.opt_state, bases[0])
        return policy, None if self.critic is None else Learner(self.critic, self.critic_opt, bases[1])


def fingerprint_of(state: State) -> str:
    """Return the fingerprint of a policy: of its parameters and of its adapter, if it has one."""
    from rlhf.tuning.models.identity import fingerprint

    dense = fingerprint(state.params)
    if state.adapter is None:
        return dense
    return hashlib.sha256(f"{dense}{fingerprint(state.adapter)}".encode()).hexdigest()


def fingerprint_of_trainer(state: State) -> str:
    """Return the fingerprint of moments and critic: the next round depends on them, also after an equal policy."""
    from rlhf.tuning.models.identity import fingerprint

    return fingerprint({"opt_state": state.opt_state, "critic": state.critic, "critic_opt": state.critic_opt})


def save(ctx: Context, state: State) -> int:
    """Writes the state below `state/`; of a policy with an adapter, the adapter alone.

    Returns the bytes that the process of the group that wrote most has written.
    """
    from rlhf.tuning import multihost
    from rlhf.tuning.training.checkpoint import bytes_below, save_tree

    folder = ctx.out / "state"
    if state.adapter is None:
        save_weights(ctx, state)
    save_tree(folder / "trainer", state.trainer)
    return max(multihost.gather(bytes_below(folder)))


def save_weights(ctx: Context, state: State) -> None:
    """Writes the policy's parameters below `state/model/`, from which `load_policy` reads them."""
    from rlhf.tuning.models.huggingface import save_decoder

    save_decoder(ctx.out / "state" / "model", state.config, state.params, token_ids(ctx.inputs["tokenizer"]))


def state_after(ctx: Context, artifact: Artifact, advance: Advance) -> State:
    """The training state after the update `artifact`: kept in memory, stored, or replayed by `advance`."""
    from rlhf.tuning import precision

    state, kind, reader = None, precision.real(), ctx
    # From the newest policy to one that is at hand; a loop, since a run may have any number of rounds between.
    left: list[tuple[Context, Context, Artifact]] = []
    while (state := _in_memory(reader, artifact)) is None:
        own = _context_of(reader, artifact)
        with precision.using(own.config.compute.dtype):
            if precision.real() != kind:
                # Memory has the type of the present update.
                own = dataclasses.replace(own, memory={})
            kind = precision.real()
        left.append((reader, own, artifact))
        reader, parent = own, own.inputs["policy"]
        if artifact.has("state/trainer/") or not continues(own.config, parent):
            break
        artifact = parent
    for reader, own, artifact in reversed(left):
        with precision.using(own.config.compute.dtype):
            if artifact.has("state/trainer/"):
                state = _load(here_of(reader, own), artifact)
            else:
                state = _replay(reader, own, artifact, advance, state and _in_real(state))
    assert state is not None
    return _in_real(state) if left else state


def _in_memory(ctx: Context, artifact: Artifact) -> State | None:
    kept, trainer = recall(ctx, f"decoder:{artifact.digest}"), recall(ctx, f"{TRAINER}{artifact.digest}")
    # Memory may have dropped either of them alone.
    return None if kept is None or trainer is None else State(kept[0], kept[1], *trainer)


def _in_real(state: State) -> State:
    from rlhf.tuning import precision

    names = ("params", "opt_state", "critic", "critic_opt", "adapter")
    return dataclasses.replace(state, **{name: precision.in_real(getattr(state, name)) for name in names})


def on_mesh(ctx: Context, state: State) -> State:
    """The state on the mesh of the context `ctx`: the stage that loaded or replayed it may have had another."""
    import jax

    from rlhf.tuning.mesh import put_params

    def put(x: Any, wanted: Any) -> Any:
        return x if wanted.sharding in (None, x.sharding) else jax.device_put(x, wanted.sharding)

    opt_state, critic, critic_opt, adapter = jax.tree.map(put, state.trainer, trainer_shapes(ctx, state.config))
    # The merged policy would only fill the memory while its adapter is trained.
    params = None if adapter is not None else put_params(state.params, mesh_of(ctx))
    return State(state.config, params, opt_state, critic, critic_opt, adapter, state.coefficients)


def fresh(ctx: Context, config: DecoderConfig, params: Any) -> State:
    """The state before the first update: new optimizers and, with `lora`, new adapters."""
    from rlhf.tuning.algorithms.learner import Learner
    from rlhf.tuning.mesh import own_params
    from rlhf.tuning.models.lora import Role, tune

    plain, mesh = _plain(ctx.config), mesh_of(ctx)

    def trainable(role: Role, model: DecoderConfig, weights: Any) -> Any:
        # Trained arrays are donated; the worker's memory shares all others.
        own = weights if plain is None else tune(model, role, weights, plain, seed=ctx.seed)[0]
        return own_params(own, mesh)

    policy = Learner.start(trainable("decoder", config, params), ctx.config.optimizer, mesh=mesh)
    if plain is None:
        state = State(config, policy.params, policy.opt_state)
    else:
        state = State(config, None, policy.opt_state, adapter=policy.params)
    if ctx.config.needs_critic:
        scorer = trainable("scalar", *_critic_start(ctx, config, params))
        critic = Learner.start(scorer, ctx.config.critic.optimizer, mesh=mesh)
        state.critic, state.critic_opt = critic.params, critic.opt_state
    return state


def _plain(config: Config) -> LoraConfig | None:
    """The adapters of these settings over dense kernels: they are the same over any form of the frozen ones."""
    return None if config.lora is None else dataclasses.replace(lora_config(config.lora), quantize="none")


def trainer_shapes(ctx: Context, config: DecoderConfig) -> tuple[Any, Any, Any, Any]:
    """Return the shapes and shardings of `State.trainer` of a policy of this config."""
    from rlhf.tuning.mesh import state_shapes
    from rlhf.tuning.models.decoder import abstract_decoder
    from rlhf.tuning.models.huggingface import scalar_head_shapes
    from rlhf.tuning.models.lora import trainable_shapes
    from rlhf.tuning.training.optimizers import optimizer_of

    plain, mesh = _plain(ctx.config), mesh_of(ctx)
    shapes = abstract_decoder(config)[1] if plain is None else trainable_shapes(config, "decoder", plain)
    policy, opt_state = state_shapes(optimizer_of(ctx.config.optimizer), shapes, mesh)
    critic = critic_opt = None
    if ctx.config.needs_critic:
        if ctx.config.needs_reward_model:
            config, _ = _scorer(ctx)
        shapes = scalar_head_shapes(config) if plain is None else trainable_shapes(config, "scalar", plain)
        critic, critic_opt = state_shapes(optimizer_of(ctx.config.critic.optimizer), shapes, mesh)
    return opt_state, critic, critic_opt, None if plain is None else policy


def _critic_start(ctx: Context, config: DecoderConfig, params: Any) -> tuple[DecoderConfig, Any]:
    """The reward model, or a new head of zeros over the policy that the first round starts with."""
    from rlhf.tuning.models.huggingface import scalar_head_params

    if ctx.config.needs_reward_model:
        return _scorer(ctx)
    return config, scalar_head_params(config, params)


def load_first(ctx: Context, artifact: Artifact) -> tuple[DecoderConfig, Any]:
    """The policy that the rounds begin with; under an adapter frozen kernels are in the type of computation."""
    return (load_frozen if _is_cast(ctx.config) else load_start)(ctx, artifact)


def _scorer(ctx: Context) -> tuple[DecoderConfig, Any]:
    """The reward model as the critic's weights, or as those under its adapter."""
    scorer: tuple[DecoderConfig, Any] = load_scorer(ctx, ctx.inputs["reward"], frozen=_is_cast(ctx.config))
    return scorer


def _is_cast(config: Config) -> bool:
    """Whether nothing reads the kernels under the adapters but products, which cast them."""
    return config.lora is not None and config.lora.quantize == "none"


def continues(config: Config, artifact: Artifact) -> bool:
    """Whether an update of `config` continues with the trainer of `artifact`; else it starts from its policy."""
    # As JSON: the manifest holds settings in that form.
    return artifact.stage == NAME and artifact.manifest["config"].get("lora") == config.model_dump(mode="json")["lora"]


def start_of(config: Config, policy: Artifact) -> Artifact:
    """Return the artifact of the first policy of this run of updates, which ends in `policy`."""
    return below(policy) if continues(config, policy) else policy


def bases(ctx: Context) -> tuple[Base | None, Base | None]:
    """Return the frozen parameters below the adapters of policy and critic; None if all parameters are trained."""
    config: Config = ctx.config
    if config.lora is None:
        return None, None
    start = start_of(config, ctx.inputs["policy"])
    policy = based(ctx, start.digest, "decoder", lambda: load_first(ctx, start), config)
    if not config.needs_critic:
        return policy, None
    # A critic over the policy is another frozen tree than the policy itself.
    below = ctx.inputs["reward"].digest if config.needs_reward_model else f"{start.digest}:critic"
    return policy, based(ctx, below, "scalar", lambda: _critic_start(ctx, *load_first(ctx, start)), config)


def reference(ctx: Context, base: Base | None) -> Any:
    """The parameters of the reference. A quantised base without its adapter is no second copy."""
    from rlhf.tuning.models.lora import Tuned, tuned_graph

    config, source = ctx.config, ctx.inputs["reference"]
    # A later policy is an adapter over the stored base.
    kind = "none" if source.stage == NAME else stored_as(config.lora)
    if base is None or kind == "none" or source.digest != start_of(config, ctx.inputs["policy"]).digest:
        # Rounded like the stored base, so that the KL is 0 while the adapter is.
        return load_frozen(ctx, source, kind)[1]
    alone = dataclasses.replace(lora_config(config.lora), targets=())
    return Tuned(tuned_graph(load_first(ctx, source)[0], "decoder", alone), base.frozen)


def merged(ctx: Context, adapter: Any) -> tuple[DecoderConfig, Any]:
    """The model's config and its dense parameters with an adapter that was trained in the context `ctx`."""
    from rlhf.tuning.mesh import put_params
    from rlhf.tuning.models.lora import merge

    config, params = load_base(ctx, start_of(ctx.config, ctx.inputs["policy"]))
    # The stage that loaded them may have another mesh than the one that trained the adapter.
    params, adapter = (put_params(tree, mesh_of(ctx)) for tree in (params, adapter))
    return config, merge(config, "decoder", params, adapter, lora_config(ctx.config.lora))


def input_of(artifact: Artifact, name: str) -> Artifact:
    """Return an input of `artifact` by name. Raises RuntimeError if it is not stored any more."""
    ref = artifact.manifest["inputs"][name]
    stored = artifact.store.with_digest(ref["stage"], ref["key"], ref["digest"])
    if stored is None:
        raise RuntimeError(f"{artifact.url} cannot be replayed: its input {name} ({ref['stage']}) is gone")
    return stored


def _load(own: Context, artifact: Artifact) -> State:
    """The stored state of `artifact`, on the mesh of the context `own`."""
    from rlhf.tuning.models.huggingface import load_decoder
    from rlhf.tuning.training.checkpoint import load_tree

    folder: Path = artifact.local("state/", lambda path: not is_chunk(path))
    if own.config.lora is None:
        # A sampler in this process may have loaded the weights already.
        kept = recall(own, f"decoder:{artifact.digest}")
        config, params = kept or load_decoder(folder / "model", mesh_of(own))
        return State(config, params, *load_tree(folder / "trainer", trainer_shapes(own, config), artifact.fetch))
    config, _ = load_first(own, start_of(own.config, artifact))
    trainer = load_tree(folder / "trainer", trainer_shapes(own, config), artifact.fetch)
    return State(*merged(own, trainer[-1]), *trainer)


def _replay(ctx: Context, own: Context, artifact: Artifact, advance: Advance, parent: State | None) -> State:
    """Train `artifact` again from its parent's state in the context `own`.

    Raises ReplayDiffers for other bits than the recorded ones, and for devices that cannot give them.
    """
    name = artifact.manifest["config"]["round"]
    ways = (
        f"`rlhf run RECIPE --force round-{name:03d}.update` computes it again here, and rl.checkpoint_every: 1 stores "
        "every policy"
    )
    ctx.log(f"replaying the update of round {name} from its stored rollouts")
    try:
        mesh_of(own)
    except ValueError as e:
        raise ReplayDiffers(
            f"{artifact.url} is not stored and was trained on other devices ({e}), whose replay has other bits: {ways}"
        ) from None
    try:
        state, _ = advance(own, parent)
    finally:
        # The replay writes its metrics to a folder below the work folder.
        own.close()
    wanted = json.loads(artifact.local("policy.json").read_bytes())["fingerprint"]
    rebuilt = fingerprint_of(state)
    if rebuilt != wanted:
        raise ReplayDiffers(
            f"replaying {artifact.url} gave policy {rebuilt[:12]}, recorded is {wanted[:12]}: other hardware or "
            f"libraries than {artifact.manifest['device']} with jax {artifact.manifest['versions']['jax']}, or another "
            f"worker with other devices (`workers: null` uses one with all of them); {ways}"
        )
    return state


def _context_of(ctx: Context, artifact: Artifact) -> Context:
    """The context in which `artifact` was made, within the worker of `ctx`."""
    inputs = {name: input_of(artifact, name) for name in artifact.manifest["inputs"]}
    config = Config.model_validate_json(json.dumps(artifact.manifest["config"]))
    seed, out = artifact.manifest["seed"], ctx.work / "replay"
    return dataclasses.replace(
        ctx, config=config, inputs=inputs, seed=seed, out=out, progress=lambda *counts, **metrics: None
    )


def here_of(ctx: Context, own: Context) -> Context:
    """Return the context `own` on the mesh of `ctx`: devices do not change stored values."""
    mesh = ctx.config.compute.mesh if hasattr(ctx.config, "compute") else Mesh()
    compute = own.config.compute.model_copy(update={"mesh": mesh})
    return dataclasses.replace(own, config=own.config.model_copy(update={"compute": compute}))


def remember_policy(ctx: Context, state: State, name: str) -> tuple[DecoderConfig, Any]:
    """Keeps the policy and its trainer in the worker's memory under `name`; the model's config and parameters."""
    policy: tuple[DecoderConfig, Any] = remember(ctx, f"decoder:{name}", (state.config, state.params))
    remember(ctx, f"{TRAINER}{name}", state.trainer)
    return policy
