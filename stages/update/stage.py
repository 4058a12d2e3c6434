"""One round's policy update from scored rollouts.

The artifact's content is `policy.json`, the fingerprint of the new policy. Weights and optimizer are stored under
`state/` every `checkpoint_every` rounds; `rlhf.stages.update.state` rebuilds the policies between.

With `lora` the rounds train one adapter over the policy before the first of them, and PPO's critic is one over the
reward model. An adapter is small: every round keeps it, as content under `adapter/` and with its moments in `state/`.
The frozen policy is on the devices once: without its adapter it is the reference too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

from rlhf.stages.common.models import ADAPTER, TRAINER
from rlhf.stages.common.tables import read_table
from rlhf.stages.contract.definition import Context, Reads, Stage
from rlhf.stages.contract.sources import user_digests
from rlhf.stages.sampling.groups import OF_TURNS, TRAINED, Scored, chosen_groups, read_scored, read_turns
from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.training.adapters import lora_config, name_of
from rlhf.stages.update import state as states
from rlhf.stages.update.no_signal import check_idle, idle_metrics
from rlhf.stages.update.outcomes import FATES, fates_of
from rlhf.stages.update.settings import Config
from rlhf.stages.update.state import NAME, State
from rlhf.tuning.rows import FateRow, ScoreRow, write_table

if TYPE_CHECKING:
    from rlhf.tuning.algorithms.diagnostics import Coefficients


def source_digests(config: Config) -> dict[str, str]:
    """Hashes of the code of a user's algorithm. Raises ValueError for one that is not there."""
    return {} if config.entry else user_digests(config.algorithm, "rl.update.algorithm")


def loads(config: Config) -> tuple[str, ...]:
    """The module of a built-in algorithm, which is loaded by name: one algorithm's code is no part of another's key."""
    return (f"rlhf.tuning.algorithms.{config.entry.module}",) if config.entry else ()


def run(ctx: Context) -> dict[str, Any]:
    """Write `policy.json`, and the adapter and state if they are stored; return the round's metrics."""
    from rlhf.tuning.models.peft import save_adapter

    state, metrics = _advance(ctx, None, first=True)
    # Here and not in `_advance`, which also replays rounds that have been committed.
    check_idle(metrics, ctx.config.max_idle_rounds)
    content = {"fingerprint": states.fingerprint_of(state), "round": ctx.config.round}
    if ctx.config.kl_target is not None or ctx.config.entropy_target is not None:
        assert state.coefficients is not None
        content |= dataclasses.asdict(state.coefficients)
    (ctx.out / "policy.json").write_text(json.dumps(content) + "\n")
    if ctx.config.lora is not None:
        below = name_of(states.start_of(ctx.config, ctx.inputs["policy"]))
        save_adapter(ctx.out / ADAPTER, state.adapter, lora_config(ctx.config.lora), below)
    # An adapter is small.
    if ctx.config.store_state or ctx.config.lora is not None:
        metrics["checkpoint_bytes"] = states.save(ctx, state)
    elif ctx.config.store_weights:
        states.save_weights(ctx, state)
    states.remember_policy(ctx, state, "new")
    return metrics


def restore(ctx: Context, artifact: Artifact) -> tuple[Any, Any]:
    """(DecoderConfig, parameters) of an update artifact, from its stored state or rebuilt from its parents."""
    return states.remember_policy(ctx, states.state_after(ctx, artifact, _advance), artifact.digest)


def _advance(ctx: Context, before: State | None, first: bool = False) -> tuple[State, dict[str, Any]]:
    """Return the state after this round, and the round's metrics; write the table `fates/`, but not in a replay.

    before: the state of the parent; None: it is loaded or replayed.
    """
    from rlhf.tuning.algorithms.round_data import RoundData
    from rlhf.tuning.algorithms.rounds import run_round
    from rlhf.tuning.compile_target import few_shapes
    from rlhf.tuning.precision import exact_forward

    config: Config = ctx.config
    parent = ctx.inputs["policy"]
    sampled, chosen, refills = _rollouts(ctx)
    greedy = read_table(ctx.inputs["greedy_scores"], "scores/", ScoreRow) if config.needs_greedy else None
    # A first round, or one with another adapter, begins with new optimizers.
    if states.continues(config, parent):
        state = states.on_mesh(ctx, before or states.state_after(ctx, parent, _advance))
    else:
        state = states.fresh(ctx, *states.load_first(ctx, parent))
    widest = config.completion_limit if few_shapes() else 0
    replayed = state.config if state.config.num_experts and config.routing == "replay" else None
    turns = read_turns(ctx.inputs, OF_TURNS)
    data = RoundData.from_rows(chosen.rows, chosen.scores, greedy, turns, widest, replayed)
    # The step donates the arrays that it is given: the parent's trainer state leaves the memory.
    ctx.memory.pop(f"{TRAINER}{parent.digest}", None)
    if parent.stage == NAME:
        # The last round's policy is not read again; a copy next to the new one would only fill the memory.
        ctx.memory.pop(f"decoder:{parent.digest}", None)
    bases = states.bases(ctx)
    reference = states.reference(ctx, bases[0]) if config.needs_reference else None
    started = time.monotonic()
    policy, critic = state.learners(bases)
    fast = config.compute.dtype == "fast"
    exact = fast and ctx.inputs["rollouts"].manifest["config"]["compute"]["dtype"] != "fast"
    with exact_forward() if exact else contextlib.nullcontext():
        result = run_round(
            data,
            config,
            state.config,
            policy,
            critic,
            reference=reference,
            coefficients=_coefficients(config, parent),
            progress=ctx.progress,
            record=ctx.metrics_line,
        )
    state.opt_state, state.coefficients = result.policy.opt_state, result.coefficients
    if result.critic is not None:
        state.critic, state.critic_opt = result.critic.params, result.critic.opt_state
    if config.lora is None:
        state.params = result.policy.params
    else:
        state.adapter = result.policy.params
        _, state.params = states.merged(ctx, state.adapter)
    if first:
        rows = fates_of(sampled, chosen, result, config.truncated, data.greedy_N)
        write_table(ctx.out / FATES / "part-00000.parquet", rows, FateRow.schema())
    idle = idle_metrics(data, result.metrics, config, parent)
    return state, result.metrics | refills | idle | {"seconds_update": round(time.monotonic() - started, 2)}


def _coefficients(config: Config, parent: Artifact) -> Coefficients | None:
    """The coefficients that the last round adapted; None where this is the first or nothing is adapted."""
    from rlhf.tuning.algorithms.diagnostics import Coefficients

    if not states.continues(config, parent):
        return None
    kept = json.loads(parent.local("policy.json").read_bytes())
    names = {f.name for f in dataclasses.fields(Coefficients)}
    return Coefficients(**{n: kept[n] for n in names}) if names <= kept.keys() else None


def _rollouts(ctx: Context) -> tuple[Scored, Scored, dict[str, Any]]:
    """Return all scored rollouts of the round and its refills, those that the round trains on, and counts."""
    import pyarrow as pa

    config: Config = ctx.config
    scored = read_scored(ctx.inputs, TRAINED)
    # Decoding took more than the size of the table, which Arrow's pool would keep.
    pa.default_memory_pool().release_unused()
    digest = ctx.inputs["policy"].digest
    wrong = [] if config.off_policy else [row for row in scored.rows if row.policy != digest]
    if wrong:
        raise RuntimeError(f"rollouts come from policy {wrong[0].policy[:12]}, the update starts at {digest[:12]}")
    if "refill_1" not in ctx.inputs:
        return scored, scored, {}
    return scored, *chosen_groups(scored, config.short_of_groups, config.truncated)


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
        "reward": Reads("reward", when=lambda c, _: c.needs_reward_model),
    },
    headline=(
        "taught nothing: {idle}",
        "KL {kl:.4f}",
        "mismatch {mismatch_kl:.1e}",
        "clip {clip_fraction:.3f}",
        "entropy {entropy:.3f}",
    ),
)
