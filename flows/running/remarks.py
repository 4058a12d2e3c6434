"""What a recipe's settings amount to where that is rarely meant, though it can be: a line each, and the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows.recipe.model import RL, Recipe
from flows.recipe.partial import carried_rounds


def of_recipe(recipe: Recipe) -> list[str]:
    """Remarks on settings alone."""
    rl = recipe.rl
    # What is scored again was sampled by another run.
    if rl is None or rl.rollouts_from is not None:
        return []
    if rl.partial is not None and rl.rounds == 1:
        return ["rl.partial changes nothing: rl.rounds is 1, and the last round samples completions to their end"]
    return [*_of_staleness(rl), *_of_few_groups(rl), *_of_critic(rl), *_of_weights(rl), *_of_ratios(rl)]


def _of_few_groups(rl: RL) -> list[str]:
    """Of rounds that may have one whole group, which they have run to its end."""
    if rl.partial is None or (later := carried_rounds(rl)) < rl.rounds - 1:
        return []
    return [
        f"rl.partial with rl.rounds {rl.rounds}: a completion may go on in {later} later rounds, so every round but "
        "the last may have one whole group, which it runs to its end and trains on alone, and the last one all others; "
        "raise rl.partial.round_tokens or rl.rounds, or lower rl.partial.max_lag"
    ]


def _of_critic(rl: RL) -> list[str]:
    """Of a critic's training before the policy's, which is on the first round's whole groups."""
    epochs = rl.update.critic.pretrain_epochs if rl.update.needs_critic else 0
    if rl.partial is None or not epochs:
        return []
    return [
        f"rl.partial with rl.update.critic.pretrain_epochs {epochs}: they pass over the whole groups of the first "
        "round, which are those of short completions and may be one; raise rl.partial.round_tokens so that most end in "
        "it, or leave the epochs out and begin with a critic that has learned (rl.update.critic.start: reward_model)"
    ]


def _of_weights(rl: RL) -> list[str]:
    """Of completions whose tokens are of several policies, and importance weights that do not tell these apart."""
    if rl.partial is None or rl.update.correction in ("truncate", "mask"):
        return []
    what = {
        "none": "nothing corrects for tokens of older policies",
        "sequence": "one weight for a whole completion is a product over all of its policies, and limited on one side",
        "sequence-mask": "the mean ratio of a whole completion, over all of its policies, decides for each token",
    }[rl.update.correction]
    advice = "" if rl.update.algorithm == "online-dpo" else "; truncate and mask weigh each token by itself"
    return [f"rl.partial with rl.update.correction {rl.update.correction}: {what}{advice}"]


def _of_ratios(rl: RL) -> list[str]:
    """Of ratios to a sampler that is known to be older than the policy that a round begins with."""
    older = "rl.partial" if rl.partial is not None else f"rl.staleness {rl.staleness}" if rl.staleness else None
    if older is None or rl.update.old_logps == "trainer":
        return []
    return [
        f"{older} with rl.update.old_logps sampler: ratios are to the older policies that sampled, so that clipping "
        "counts how far training has come since as if this round had moved there; with trainer weights correct for it"
    ]


def _of_staleness(rl: RL) -> list[str]:
    if not rl.staleness or rl.staleness < rl.rounds - 1:
        return []
    if rl.rounds == 1:
        return [f"rl.staleness {rl.staleness} changes nothing: rl.rounds is 1, and there is no earlier policy"]
    return [
        f"rl.staleness {rl.staleness} with rl.rounds {rl.rounds}: every round samples from the policy that RL starts "
        f"from; to sample from trained ones too, set the former to {max(0, rl.rounds - 2)} or less"
    ]


def of_data(recipe: Recipe, metrics: Mapping[str, Any]) -> list[str]:
    """Remarks on settings and the data, of which `metrics` are those of the artifact of `prepare`."""
    rl, there = recipe.rl, metrics.get("rows", {}).get("prompts", 0)
    if rl is None or rl.rollouts_from is not None or not 0 < there < rl.rollout.prompts:
        return []
    return [
        f"rl.rollout.prompts is {rl.rollout.prompts}, and the data has {there} prompts: a round draws some of them "
        "more than once, as groups of their own; lower it, or add data"
    ]
