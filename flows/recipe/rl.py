"""The section `rl` of a recipe: rounds of rollouts, scores and policy updates."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field, model_validator

from rlhf.stages.contract.definition import StageConfig
from rlhf.stages.rollout import Config as RolloutConfig
from rlhf.stages.sampling.environment import ENVIRONMENT
from rlhf.stages.score.settings import Config as ScoreConfig
from rlhf.stages.score.settings import Reward
from rlhf.stages.update.settings import Config as UpdateConfig
from rlhf.stages.update.settings import aggregation_of, needs_groups, on_policy


def environment_weight(score: Any) -> float:
    """Return the weight of the environment's rewards in the totals of a section `score` as written."""
    rewards = score.get("rewards") if isinstance(score, dict) else None
    parts = rewards.values() if isinstance(rewards, dict) else ()
    weights = [p.get("weight", 1.0) for p in parts if isinstance(p, dict) and p.get("function") == "environment"]
    return float(sum(weights)) if all(isinstance(w, int | float) for w in weights) else 0.0


def shape_of(score: ScoreConfig) -> str | None:
    """Return the setting by which the total differs from the sum of an environment's rewards, or None."""
    for name, reward in score.rewards.items():
        if reward.function != ENVIRONMENT or not reward.weight:
            continue
        if score.truncated == "zero":
            return "truncated: zero"
        shapes = {"clip": reward.clip, "squash": reward.squash, "normalise": reward.normalise}
        if said := [shape for shape, value in shapes.items() if value not in (None, "none")]:
            return f"rewards.{name}.{said[0]}"
    return None


class RL(StageConfig):
    """Rounds of rollouts, scores and policy updates."""

    rounds: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Number of rounds."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of each round."""
    score: ScoreConfig = ScoreConfig()
    """Rewards of each round."""
    update: UpdateConfig = UpdateConfig()
    """The policy update of each round."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 5
    """Rounds between stored weights; policies between them are rebuilt from their rollouts when a stage needs them."""
    reference_every: Annotated[int, Field(ge=1)] | None = None
    """Rounds after which the reference of the KL becomes the current policy (ProRL, TR-DPO's hard update); null: it
    stays the policy before the first round."""
    staleness: Annotated[int, Field(ge=0)] = 0
    """Rounds by which the sampling policy lags; importance weights correct for it."""
    refills: Annotated[int, Field(ge=0, le=20)] = 0
    """Maximum passes in which a round samples other prompts in place of groups with equal rewards (dynamic
    sampling)."""
    rollouts_from: str | None = None
    """Name of a run whose rollouts are scored and trained on again; nothing is sampled."""

    @model_validator(mode="before")
    @classmethod
    def _from_the_rollouts(cls, values: Any) -> Any:
        """Fills in the update's settings that follow from the rollouts, so that a dumped recipe can be read again."""
        if not isinstance(values, dict):
            return values
        rollout, update = values.get("rollout", {}), values.get("update", {})
        if not isinstance(rollout, dict) or not isinstance(update, dict):
            return values
        # Where a recipe gives both, `_possible` checks that they agree.
        temperature, tokens = rollout.get("temperature"), rollout.get("max_tokens")
        derived: dict[str, Any] = {"environment_weight": environment_weight(values.get("score"))}
        if isinstance(temperature, int | float) and temperature > 0:
            derived["temperature"] = temperature
        prompts, step = rollout.get("prompts"), UpdateConfig.model_fields["prompts_per_step"].default
        if on_policy(update):
            prompts, step = rollout.get("prompts", RolloutConfig.model_fields["prompts"].default), math.inf
        if isinstance(prompts, int) and 0 < prompts < step:
            derived["prompts_per_step"] = prompts
        if aggregation_of(update) == "constant" and update.get("constant") is None:
            update = {k: v for k, v in update.items() if k != "constant"}
            # The budget of Dr. GRPO's constant is the longest completion.
            derived["constant"] = RolloutConfig.model_fields["max_tokens"].default if tokens is None else tokens
        return values | {"update": derived | update}

    @model_validator(mode="after")
    def _possible(self) -> RL:
        if self.update.temperature != self.rollout.temperature:
            raise ValueError(
                f"update.temperature {self.update.temperature} differs from rollout.temperature "
                f"{self.rollout.temperature}: ratios need one temperature; leave the former out"
            )
        weight = environment_weight(self.score.model_dump())
        if self.update.environment_weight != weight:
            raise ValueError(
                f"update.environment_weight {self.update.environment_weight} differs from the weight {weight} that "
                "score.rewards gives to the environment's rewards: leave the former out"
            )
        if self.update.prompts_per_step > self.rollout.prompts:
            raise ValueError(
                f"update.prompts_per_step {self.update.prompts_per_step} is above rollout.prompts "
                f"{self.rollout.prompts}: an optimizer step has prompts of one round; lower the former, or raise the "
                "latter"
            )
        if on_policy(self.update) and (self.update.epochs, self.update.prompts_per_step) != (1, self.rollout.prompts):
            raise ValueError(
                f"update.algorithm {self.update.algorithm} takes one optimizer step a round: no clip bounds later "
                f"steps, and update.epochs {self.update.epochs} with update.prompts_per_step "
                f"{self.update.prompts_per_step} of rollout.prompts {self.rollout.prompts} make several; set epochs to "
                f"1 and prompts_per_step to {self.rollout.prompts}"
            )
        managed = {
            "rollout.round": self.rollout.round,
            "update.round": self.update.round,
            "rollout.first": self.rollout.first,
            "score.round_scale": self.score.round_scale,
            "update.prompt_limit": self.update.prompt_limit,
            "update.completion_limit": self.update.completion_limit,
        }
        for name, value in managed.items():
            if value:
                raise ValueError(f"{name} is set by the pipeline: leave it out")
        for name in ("store_state", "store_weights"):
            if getattr(self.update, name):
                raise ValueError(f"update.{name} follows from rl.checkpoint_every and workers: leave it out")
        entry = self.update.entry
        if entry is not None and entry.groups and self.rollout.completions == 1:
            raise ValueError(
                f"rollout.completions is 1, and {self.update.algorithm} compares the completions of a prompt: each "
                "would teach nothing; use 2 or more"
            )
        if self.reference_every is not None and not self.update.needs_reference:
            raise ValueError(
                "reference_every moves the reference of the KL, and update.kl_coef and update.kl_in_reward are 0: give "
                "one of them a value, or leave reference_every out"
            )
        if self.refills and not needs_groups(self.update.algorithm):
            raise ValueError(
                f"refills replace groups whose completions score alike, and {self.update.algorithm} learns from those "
                "too: leave refills out"
            )
        for name, reward in self.score.rewards.items():
            self._comparable(name, reward)
        return self

    def _comparable(self, name: str, reward: Reward) -> None:
        """Raises ValueError if completions of one round could get rewards that do not compare."""
        where = f"score.rewards.{name}"
        if self.update.needs_greedy and reward.normalise == "group":
            raise ValueError(
                f"{where}.normalise: group centres by a group's own mean, and {self.update.algorithm} by the reward of "
                "a greedy completion, which has no group: use none or batch"
            )
        if self.update.needs_greedy and reward.batch != "sample":
            raise ValueError(
                f"{where}.batch: {reward.batch}: the greedy completion, whose reward is the baseline of "
                f"{self.update.algorithm}, is scored without the others: use batch: sample"
            )
        if self.refills and reward.batch == "round":
            raise ValueError(
                f"{where}.batch: round: refills are sampled after the round is scored, and a call cannot get both: use "
                "batch: group or sample, or leave rl.refills out"
            )
