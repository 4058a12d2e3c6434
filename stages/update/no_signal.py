"""Rounds whose rewards teach nothing: why one did, and how many in a row a run bears (R25)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf.stages.sampling.equal_rewards import alone
from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.update.settings import Config

if TYPE_CHECKING:
    from rlhf.tuning.algorithms.round_data import RoundData


UNREWARDED = "has a reward: each reward returned None for it, or failed"
ADVICE = (
    "Read the samples of the last round. Where nothing is right, use easier prompts, more completions of each or "
    "rl.refills; where all is right, end with fewer rl.rounds; or raise rl.update.max_idle_rounds"
)
ADVICE_UNREWARDED = (
    "A built-in reward has none where a problem has no answer: give the data its answers (data.fields, data.rename), "
    "or use a reward in rl.score.rewards that needs none; one of your own returns a number where it applies"
)


class IdleRounds(RuntimeError):
    """So many rounds in a row have taught nothing that the run is of no use."""


def idle_metrics(data: RoundData, metrics: dict[str, Any], config: Config, parent: Artifact) -> dict[str, Any]:
    """Why a round has taught nothing (`idle`), and how many have not in a row (`idle_rounds`); empty where one has.

    It has where a step moved the policy for rewards of the task that tell completions apart: one for KL and entropy
    alone does not count. metrics: of the round. parent: the artifact whose policy it started from.
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
    # Counted once: what has no reward may have been cut off too.
    cut = int((data.valid_N & data.truncated_N).sum())
    if truncated != "keep" and lost + cut == everyone:
        return f"all completions with a reward were cut off at max_tokens ({cut}), and truncated is {truncated}"
    kept = f" and {'kept' if truncated == 'keep' else 'masked'}" if cut else ""
    left = f"{lost} of {everyone} have no reward, {cut} were cut off{kept}"
    return f"the completions of each prompt score alike ({left}){_followed(data, metrics, config)}"


def _followed(data: RoundData, metrics: dict[str, Any], config: Config) -> str:
    """What was trained without rewards that tell completions apart, as the end of a sentence; "" where nothing was."""
    if not metrics["steps"]:
        return "; its critic learned, and the policy stayed" if "value_loss" in metrics else ""
    if config.entry is None:
        return f"; its steps followed what {config.algorithm} makes of them"
    by_turns = data.turns is not None and config.credits_turns and bool(data.turns.rewards_NU.any())
    # Divided by its spread alone the KL in the reward is noise, which is left out (`selection.is_noise`).
    in_reward = config.kl_in_reward > 0 and (by_turns or not config.scaled_by_round)
    what = {
        "the rewards of turns": by_turns,
        "KL": config.kl_coef > 0 or in_reward,
        "entropy": config.entropy_coef > 0 or config.entropy_target is not None,
    }
    found = " and ".join(name for name, is_there in what.items() if is_there)
    return f"; its steps followed {found} alone" if found else ""


def check_idle(metrics: dict[str, Any], limit: int, alike: Sequence[str] = ()) -> None:
    """Raises IdleRounds where the round is the last of `limit` in a row that have taught nothing.

    alike: names of the rewards that tell no completions of a prompt apart (`rlhf.stages.sampling.equal_rewards`).
    """
    count = metrics.get("idle_rounds", 0)
    if count >= limit:
        hint = f"{alone(alike)}. " if alike else ""
        advice = ADVICE_UNREWARDED if metrics["idle"].endswith(UNREWARDED) else ADVICE
        raise IdleRounds(f"{count} rounds in a row have taught nothing; in this one {metrics['idle']}. {hint}{advice}")
