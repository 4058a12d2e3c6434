"""One round's policy update from scored rollouts.

The artifact's content is `policy.json`, the fingerprints of the new policy, its moments and its critic. Weights and
optimizer are stored under `state/` every `checkpoint_every` rounds; `rlhf.stages.update.state` rebuilds the policies
between.

With `lora` the rounds train one adapter over the policy before the first of them, and PPO's critic is one over the
reward model. An adapter is small: every round keeps it, as content under `adapter/` and with its moments in `state/`.
The frozen policy is on the devices once: without its adapter it is the reference too.

Each completion of a round has a fate in its update: trained, or left out for a reason (R16, R24). An error says why a
round's rewards teach nothing, and limits the number of such rounds in a row (R25).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf.stages.common.models import ADAPTER, TRAINER
from rlhf.stages.common.tables import read_table
from rlhf.stages.contract.definition import Context, Reads, Stage
from rlhf.stages.contract.sources import user_digests
from rlhf.stages.sampling.groups import OF_TURNS, TRAINED, Scored, chosen_groups, read_scored, read_turns
from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.training.adapters import lora_config, name_of
from rlhf.stages.update import state as states
from rlhf.stages.update.settings import Config
from rlhf.stages.update.state import NAME, State
from rlhf.tuning.rows import CompletionRow, FateRow, ScoreRow, write_table

if TYPE_CHECKING:
    from rlhf.tuning.algorithms.diagnostics import Coefficients
    from rlhf.tuning.algorithms.round_data import RoundData
    from rlhf.tuning.algorithms.rounds import RoundResult

UNREWARDED = "has a reward: each reward returned None for it, or failed"
ADVICE = (
    "Read the samples of the last round. If nothing is right, use easier prompts, more completions per prompt or "
    "rl.refills; if all is right, use fewer rl.rounds. A custom reward that compares completions needs "
    "rl.score.rewards.NAME.batch: group. rl.update.max_idle_rounds allows more such rounds"
)
ADVICE_UNREWARDED = (
    "A built-in reward has none for a problem without an answer: give the data its answers (data.fields, data.rename), "
    "or use a reward in rl.score.rewards that needs none; a custom one returns a number if it applies"
)


class IdleRounds(RuntimeError):
    """Too many rounds in a row taught nothing."""


def idle_metrics(data: RoundData, metrics: dict[str, Any], config: Config, parent: Artifact) -> dict[str, Any]:
    """Explain why a round taught nothing (`idle`), and count such rounds in a row (`idle_rounds`).

    Returns nothing for a round with a finite step and completions that the rewards tell apart: a step for KL or entropy
    alone teaches nothing. metrics: of the round. parent: the artifact whose policy the round started from.
    """
    if metrics["steps"] > metrics.get("skipped", 0) and metrics["informative"]:
        return {}
    before = parent.metrics.get("idle_rounds", 0) if parent.stage == "update" else 0
    return {"idle": _reason(data, metrics, config), "idle_rounds": before + 1}


def _reason(data: RoundData, metrics: dict[str, Any], config: Config) -> str:
    steps, truncated = metrics["steps"], config.truncated
    if steps and steps == metrics.get("skipped"):
        return f"the gradients of all {steps} steps were not finite"
    everyone = len(data.completions)
    lost = int((~data.valid_N).sum())
    if lost == everyone:
        return f"none of the {everyone} completions {UNREWARDED}"
    # A completion without a reward may have been cut off too: it counts once.
    cut = int((data.valid_N & data.truncated_N).sum())
    if truncated != "keep" and lost + cut == everyone:
        return f"all completions with a reward were cut off at max_tokens ({cut}), and truncated is {truncated}"
    kept = f" and {'kept' if truncated == 'keep' else 'masked'}" if cut else ""
    left = f"{lost} of {everyone} have no reward, {cut} were cut off{kept}"
    return f"the completions of each prompt score alike ({left}){'; its steps had other terms alone' if steps else ''}"


def check_idle(metrics: dict[str, Any], limit: int) -> None:
    """Raise IdleRounds if the round is the last of `limit` in a row that taught nothing."""
    count = metrics.get("idle_rounds", 0)
    if count >= limit:
        advice = ADVICE_UNREWARDED if metrics["idle"].endswith(UNREWARDED) else ADVICE
        raise IdleRounds(f"{count} rounds in a row have taught nothing; in this one {metrics['idle']}. {advice}")


FATES = "fates"
"""The folder of an update that holds the table."""
VARIED = "the totals of other groups vary more (keep_most_varied)"
TIED = "the rewards of its group are equal"
COUNTED = f"{TIED}: it counts in denominators, KL and entropy alone"
NO_BASELINE = "the greedy completion of its prompt, the baseline, has no reward"


def fates_of(
    sampled: Scored, chosen: Scored, result: RoundResult, truncated: str, greedy_N: np.ndarray | None = None
) -> list[FateRow]:
    """Return one row for each completion, in the order of sampling.

    sampled: all of the round and its refills. chosen: those that the round trains on, in the order of the result's
    arrays. truncated: the setting of that name. greedy_N: the baseline of each chosen completion if it is the reward of
    its prompt's greedy completion, NaN without one.
    """
    numbers = {(row.place, row.sample): number for number, row in enumerate(chosen.rollouts)}
    teaching = {row.place for row, signal in zip(chosen.rollouts, result.signal_N, strict=True) if signal}

    def fate(rollout: CompletionRow, score: ScoreRow, number: int | None) -> tuple[str, str | None]:
        if number is not None and result.trained_N[number]:
            return "trained", None if result.signal_N[number] else COUNTED
        if score.total is None or rollout.stop == "failed":
            reason = "its episode failed" if rollout.stop == "failed" else "no reward applies to it"
            return "failed", score.failure or reason
        if number is None:
            return "spare", f"{TIED}, or the round has as many groups as it wants without it"
        if result.filtered_N[number]:
            return "filtered", VARIED
        if truncated != "keep" and rollout.stop == "length":
            return "truncated", "it was cut off at max_tokens, and such completions are masked"
        if greedy_N is not None and not np.isfinite(greedy_N[number]):
            return "unchosen", NO_BASELINE
        if rollout.place not in teaching:
            return "tied", TIED
        return "unchosen", "the algorithm trains on other completions of its group"

    rows = []
    for rollout, score in zip(sampled.rollouts, sampled.scores, strict=True):
        number = numbers.get((rollout.place, rollout.sample))
        what, reason = fate(rollout, score, number)
        advantage = float(result.advantages_N[number]) if number is not None and what == "trained" else math.nan
        rows.append(
            FateRow(
                place=rollout.place,
                sample=rollout.sample,
                prompt_id=rollout.prompt_id,
                fate=what,
                reason=reason,
                advantage=None if math.isnan(advantage) else advantage,
            )
        )
    return rows


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
    content = {"fingerprint": states.fingerprint_of(state), "trainer": states.fingerprint_of_trainer(state)}
    content |= {"round": ctx.config.round}
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
