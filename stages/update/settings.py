"""Settings of the stage `update`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stages.common.settings import Compute, Fraction, Lora, Optimizer, Trained
from stages.contract.definition import execution_setting


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
    whiten_rewards: bool = False
    """Divide the token rewards of a round by their spread."""
    bootstrap_truncated: bool = False
    """A completion that max_tokens cut off goes on with the value of its last state."""
    pretrain_epochs: Annotated[int, Field(ge=0)] = 0
    """Passes over the first round's rollouts that train the critic alone, before the policy moves."""


class Config(Trained):
    """The update of one round. What is left out is as the algorithm's authors have it."""

    algorithm: str = "grpo"
    """grpo, dr-grpo, dapo, gspo, gspo-token, cispo, sapo, gmpo, dppo, dppo-kl, opo, gpg, pass-at-k, rloo, reinforce-pp,
    reinforce-pp-baseline, remax, ppo, online-dpo, or `module:function` of one's own."""
    algorithm_arguments: dict[str, str | int | float | bool] = {}
    """Keyword arguments of an algorithm of one's own."""
    round: Annotated[int, Field(ge=0)] = 0
    """Number of the round."""
    prompts_per_step: Annotated[int, Field(ge=1)] = 8
    """Prompts, with all their completions, of one optimizer step."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the round's rollouts (mu)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The rollouts' temperature."""
    normalisation: Literal["std", "batch-std", "none"] = "std"
    """Scale of group-relative advantages."""
    aggregation: Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"] = "token-mean"
    """How token losses become one number; constant divides by completions x `constant`."""
    constant: Annotated[float, Field(gt=0)] | None = None
    """Token budget of the aggregation `constant`; by default the rollout's max_tokens."""
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    """Ratios below 1 - clip_low stop paying."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """Ratios above 1 + clip_high stop paying."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound c of the loss where the advantage is negative."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the KL to the reference in the loss; 0 for both KL weights loads no reference."""
    kl_kind: Literal["k1", "k2", "k3", "k3-k2"] = "k3"
    """Estimator of that KL; k3-k2 has the value of k3 and the gradient of k2. k1 has no gradient in expectation."""
    kl_in_reward: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference in the reward."""
    kl_in_reward_kind: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL in the reward."""
    kl_clamp: Annotated[float, Field(gt=0)] | None = None
    """Largest size of either estimate on one token."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """KL per token towards which both weights are scaled from round to round; null: they stay."""
    kl_horizon: Annotated[float, Field(gt=0)] = 10000.0
    """Completions over which the scale follows kl_target."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus; the first one where there is a target."""
    entropy_target: Annotated[float, Field(gt=0)] | None = None
    """Entropy per token below which the bonus grows by entropy_step a round, and above which it shrinks."""
    entropy_step: Annotated[float, Field(gt=0)] = 0.001
    """Step of the adaptive entropy bonus."""
    correction: Literal["none", "truncate", "mask", "sequence", "sequence-mask"] = "truncate"
    """Importance weights between sampler and trainer: of tokens, limited or dropped outside the range; of whole
    completions, limited; of tokens, in completions whose mean ratio is in the range."""
    importance_min: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Lower end of the range, for mask and sequence-mask."""
    importance_max: Annotated[float, Field(ge=1)] = 2.0
    """Upper end of the range."""
    max_mismatch_kl: Annotated[float, Field(gt=0)] = 0.1
    """Mean KL between sampler and trainer past which the run stops."""
    truncated: Literal["keep", "mask"] = "keep"
    """Whether completions cut off at max_tokens are trained on."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of online-dpo's pull to the reference."""
    load_reference: bool = False
    """Load the reference although no KL asks for it: for an algorithm of one's own that uses it."""
    off_policy: bool = False
    """Rollouts may come from another policy than the one that is updated; importance weights account for it."""
    short_of_groups: Literal["stop", "train"] = "stop"
    """What follows when all refills leave fewer informative groups than prompts."""
    optimizer: Optimizer = Optimizer(learning_rate=2e-5)
    """The policy's optimizer; its state lives through all rounds."""
    critic: CriticSettings = CriticSettings()
    """For PPO."""
    lora: Lora | None = None
    """Train an adapter over frozen parameters, of policy and critic; null: train all of them."""
    compute: Compute = Compute()
    """How to compute."""
    store_state: bool = execution_setting(False)
    """Whether this round's weights and optimizer are stored; the recipe's checkpoint_every decides."""

    @model_validator(mode="before")
    @classmethod
    def _presets_of_the_algorithm(cls, values: Any) -> Any:
        name = values.get("algorithm") if isinstance(values, dict) else None
        return {**_presets(name), **values} if isinstance(name, str) else values

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        from tuning.algorithms import registry

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
        if self.kl_target is not None and self.kl_coef == self.kl_in_reward == 0:
            raise ValueError("kl_target scales kl_coef and kl_in_reward, and both are 0")
        if entry is None:
            return self
        registry.check_aggregation(entry.ratio, self.aggregation)
        if self.algorithm_arguments:
            raise ValueError(f"algorithm_arguments are for an algorithm of one's own; {self.algorithm} takes none")
        for name, algorithms in registry.USES.items():
            preset = entry.presets.get(name, type(self).model_fields[name].default)
            if self.algorithm not in algorithms and getattr(self, name) != preset:
                raise ValueError(
                    f"{name} has no meaning with algorithm {self.algorithm}; it belongs to {', '.join(algorithms)}"
                )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model takes part."""
        from tuning.algorithms import registry

        entry = registry.find(self.algorithm)
        asked = self.load_reference or (entry is not None and entry.reference)
        return asked or self.kl_coef > 0 or self.kl_in_reward > 0

    @property
    def needs_critic(self) -> bool:
        """Whether a critic takes part, which starts from the reward model."""
        from tuning.algorithms import registry

        entry = registry.find(self.algorithm)
        return entry is not None and entry.critic

    @property
    def needs_greedy(self) -> bool:
        """Whether the reward of a greedy completion of each prompt takes part."""
        from tuning.algorithms import registry

        entry = registry.find(self.algorithm)
        return entry is not None and entry.greedy


def _presets(name: str) -> dict[str, Any]:
    from tuning.algorithms import registry

    entry = registry.ALGORITHMS.get(name)
    return dict(entry.presets) if entry is not None else {}


def aggregation_of(values: dict[str, Any]) -> Any:
    """The aggregation that settings as they are written come to."""
    presets = _presets(values["algorithm"]) if isinstance(values.get("algorithm"), str) else {}
    return values.get("aggregation", presets.get("aggregation"))


def needs_groups(algorithm: str) -> bool:
    """Whether a group of completions that score alike teaches nothing."""
    from tuning.algorithms import registry

    entry = registry.find(algorithm)
    return entry is None or entry.groups
