"""Settings of the stage `update`: those of a round in the core, and those of the recipe around it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ValidationInfo, model_validator

from rlhf.stages.common.settings import Compute, Lora, Optimizer, Trained, refuse_unused
from rlhf.stages.contract.definition import execution_setting
from rlhf.stages.store.keys import WRITTEN
from rlhf.tuning.algorithms import registry
from rlhf.tuning.algorithms import settings as core
from rlhf.tuning.shapes import ROW_LENGTHS


class CriticSettings(Trained, core.CriticSettings):  # type: ignore[misc]
    """The critic of PPO; it starts from the reward model."""

    optimizer: Optimizer = Optimizer(learning_rate=core.CriticSettings.optimizer.learning_rate)


class Config(Trained, core.RoundSettings):  # type: ignore[misc]
    """The update of one round. Defaults are those of the algorithm's authors; docs/guides/rl.md lists the
    differences."""

    algorithm_arguments: dict[str, str | int | float | bool] = {}
    optimizer: Optimizer = Optimizer(learning_rate=core.RoundSettings.optimizer.learning_rate)
    critic: CriticSettings = CriticSettings()
    compute: Compute = Compute()
    lora: Lora | None = None
    """Train an adapter over frozen parameters, of policy and critic; null: train all of them."""
    load_reference: bool = False
    """Load the reference even if no KL needs it, for a custom algorithm that does."""
    off_policy: bool = False
    """Allow rollouts from an older policy than the updated one; importance weights correct for it."""
    short_of_groups: Literal["stop", "train"] = "stop"
    """Reaction if all refills leave fewer informative groups than prompts."""
    max_idle_rounds: int = execution_setting(3, ge=1)
    """The run ends after this number of rounds in a row without a step that changed the weights."""
    prompt_limit: int = execution_setting(0, ge=0)
    completion_limit: int = execution_setting(0, ge=0)
    store_state: bool = execution_setting(False)
    """Whether this round's weights and optimizer are stored; the recipe's checkpoint_every decides."""
    store_weights: bool = execution_setting(False)
    """Whether this round's weights are stored without the optimizer; so it is if another worker samples."""

    @property
    def programs(self) -> int:
        """The most programs with a pass of the model that rounds compile where `few_shapes` holds: for each row length
        a step and a pass for log-probabilities or values of each learner."""
        # A dense reference under an adapter has a program of its own.
        others = 2 * self.needs_critic + (self.lora is not None and self.needs_reference)
        return ROW_LENGTHS * (2 + others + (self.top_entropy is not None))

    @property
    def needs_reward_model(self) -> bool:
        """Whether PPO's critic starts from a reward model."""
        return self.needs_critic and self.critic.start == "reward_model"

    @model_validator(mode="before")
    @classmethod
    def _presets_of_the_algorithm(cls, values: Any) -> Any:
        name = _name(values) if isinstance(values, dict) else None
        if not isinstance(name, str):
            return values
        entry, critic = registry.ALGORITHMS.get(name), values.get("critic", {})
        if entry and entry.critic and values.get("lora") is not None and isinstance(critic, dict):
            values = values | {"critic": CriticSettings.with_rate(critic, adapter=True)}
        return {**registry.presets(name), **values}

    @property
    def ignored(self) -> list[str]:
        """The settings that the algorithm does not read, which have their defaults."""
        uses = registry.USES if self.entry is not None else {}
        return [name for name, algorithms in uses.items() if self.algorithm not in algorithms]

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Config:
        entry = registry.find(self.algorithm)
        if self.kl_kind == "k1":
            raise ValueError(
                "kl_kind k1 in the loss has a gradient of zero in expectation: it would add noise and hold nothing; "
                "use k3-k2 or k2, or kl_in_reward, where k1 is right"
            )
        if (self.aggregation == "constant") != (self.constant is not None):
            raise ValueError("aggregation `constant` and a value for `constant` go together")
        if self.correction in ("mask", "sequence-mask") and self.importance_min >= self.importance_max:
            raise ValueError("importance_min must be below importance_max")
        if self.old_logps == "sampler":
            self._by_sampler()
        if self.kl_target is not None and self.kl_coef == self.kl_in_reward == 0:
            raise ValueError("kl_target scales kl_coef and kl_in_reward, and both are 0")
        if entry is None:
            return self
        registry.check_aggregation(entry.ratio, self.aggregation)
        if self.algorithm_arguments:
            raise ValueError(f"algorithm_arguments are for a custom algorithm; {self.algorithm} takes none")
        if self.truncated == "mask-loss" and self.algorithm not in registry.GROUP_BASELINE:
            raise ValueError(
                f"truncated mask-loss keeps a reward in the baseline of its group, and {self.algorithm} has none of "
                "rewards alone; use mask"
            )
        if self.truncated == "mask-loss" and self.kl_in_reward > 0:
            raise ValueError(
                "truncated mask-loss counts a reward whose KL is not known, next to others without theirs: "
                "set kl_in_reward to 0, or use mask"
            )
        if self.algorithm == "gigpo" and self.normalisation == "batch-std":
            raise ValueError("gigpo compares turns of one state: normalisation is std or none, not batch-std")
        if not self.critic.bi_level_gae and self.critic.high_level_lam is not None:
            raise ValueError("critic.high_level_lam has a meaning with critic.bi_level_gae alone")
        if self.truncated == "mask" and self.critic.bootstrap_truncated:
            raise ValueError(
                "critic.bootstrap_truncated has no meaning where truncated: mask leaves such completions out"
            )
        # TRL calls kl_coef so.
        given = {"beta"} & self.model_fields_set if info.context == WRITTEN else ()
        refuse_unused(self, "algorithm", registry.USES, entry.presets, given)
        return self

    def _by_sampler(self) -> None:
        """Raise ValueError for settings that need the trainer's log-probabilities before the first step."""
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        defaults |= registry.presets(self.algorithm)
        for name in ("correction", "importance_min", "importance_max"):
            value = getattr(self, name)
            if value != defaults[name] and (name, value) != ("correction", "none"):
                raise ValueError(
                    f"{name} is of weights between the trainer's log-probabilities and the sampler's, and old_logps: "
                    "sampler takes the sampler's for both: leave it out, or let old_logps be trainer"
                )
        if self.kl_in_reward > 0:
            raise ValueError(
                "kl_in_reward holds the trainer's log-probabilities against the reference's, and with old_logps: "
                "sampler rounding of the sampler would be rewarded: set kl_in_reward to 0, or old_logps to trainer"
            )
        if registry.find(self.algorithm) is None:
            raise ValueError(
                "old_logps: sampler leaves nothing but the loss's own ratio to correct for the sampler, and a "
                "custom algorithm need not have one: let old_logps be trainer"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model takes part."""
        return self.load_reference or super().needs_reference


def aggregation_of(values: dict[str, Any]) -> Any:
    """The aggregation of settings as written in a recipe, by themselves or by the algorithm's presets."""
    name = _name(values)
    presets = registry.presets(name) if isinstance(name, str) else {}
    return values.get("aggregation", presets.get("aggregation"))


def on_policy(update: dict[str, Any] | Config) -> bool:
    """Whether the algorithm, of settings as written or read, takes one step a round."""
    name = update.algorithm if isinstance(update, Config) else _name(update)
    return isinstance(name, str) and name in registry.ALGORITHMS and registry.ALGORITHMS[name].on_policy


def _name(values: dict[str, Any]) -> Any:
    """Return the algorithm of settings as written, by default the field's."""
    return values.get("algorithm", core.RoundSettings.algorithm)


def needs_groups(algorithm: str) -> bool:
    """Whether a group of completions that score alike is left out of training."""
    entry = registry.find(algorithm)
    return entry is None or entry.groups
