"""Rounds whose rewards teach nothing: why one did, and how many in a row a run bears (R25)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.update.settings import Config

if TYPE_CHECKING:
    from rlhf.tuning.algorithms.round_data import RoundData


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
