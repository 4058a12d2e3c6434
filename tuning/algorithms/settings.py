"""Settings of a round of RL and of preference learning, each with its default, its bounds and its meaning.

Loads nothing heavy. Where the authors of an algorithm use other values than the defaults here, `registry` has them
(`presets`), and `RoundSettings.of` fills them in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from rlhf.tuning.algorithms import registry
from rlhf.tuning.settings import ComputeSettings, Fraction, NotNegative, OptimizerSettings, Positive


@dataclasses.dataclass(frozen=True)
class Objective:
    """Settings of the loss of a step; hashable, because compiled steps are cached by them."""

    algorithm: str = "grpo"
    """grpo, dr-grpo, dapo, gspo, gspo-token, cispo, sapo, vespo, gmpo, dppo, dppo-kl, clip-cov, kl-cov, opo, gpg,
    pass-at-k, rloo, reinforce-pp, reinforce-pp-baseline, remax, ppo, gigpo, online-dpo, or a custom
    `module:function`."""
    algorithm_arguments: Mapping[str, str | int | float | bool] = dataclasses.field(default_factory=dict, hash=False)
    """Keyword arguments of a custom algorithm."""
    temperature: Positive = 1.0
    """The rollouts' temperature; set by the recipe."""
    normalisation: Literal["std", "batch-std", "none"] = "std"
    """Scale of group-relative advantages."""
    aggregation: Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"] = "token-mean"
    """Reduction of token losses to one number; constant divides by completions x `constant`."""
    constant: Positive | None = None
    """Token budget of the aggregation `constant`; by default the rollout's max_tokens, times an episode's turns."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower clip: below a ratio of 1 - clip_low a token with a negative advantage gets no further gradient; 1: none."""
    clip_high: Positive = 0.2
    """Upper clip: above a ratio of 1 + clip_high a token with a positive advantage gets no further gradient."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound c of the loss at negative advantages; null: none, as in the papers. verl's default is 3."""
    kl_coef: NotNegative = 0.01
    """Weight of the KL to the reference in the loss. If both KL weights are 0, no reference is loaded."""
    kl_kind: Literal["k1", "k2", "k3", "k3-k2"] = "k3"
    """Estimator of that KL; k3-k2 has the value of k3 and the gradient of k2. k1 has no gradient in expectation."""
    kl_in_reward: NotNegative = 0.0
    """Weight of the KL to the reference in the reward."""
    kl_in_reward_kind: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL in the reward."""
    kl_clamp: Positive | None = None
    """Maximum absolute value of either estimate on one token."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus; with entropy_target its first value."""
    entropy_target: Positive | None = None
    """Entropy per token. After a round below it the weight of the bonus grows by entropy_step; after a round above it
    the weight shrinks, and the next round has no bonus (Skywork-OR1, TRL)."""
    top_entropy: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the tokens of each step that get a policy gradient: those at which the policy before the round has the
    highest entropy (Wang et al., arXiv:2506.01939: 0.2). It costs one more pass; null: all tokens."""
    tied_groups: Literal["count", "drop"] = "count"
    """Treatment of a group whose rewards are equal, so that it has no advantage. count: it stays in its step, in
    the denominators of the loss, in the KL and in the entropy bonus, as in GRPO's paper, TRL, verl and Dr. GRPO; with
    kl_coef 0 and no bonus it adds 0 to the loss and takes no pass of the model. drop: it leaves the round, and steps
    are made of the other groups, as in DAPO. The total decides with the KL of kl_in_reward taken off."""
    old_logps: Literal["trainer", "sampler"] = "trainer"
    """Where log pi_old of the ratios comes from. trainer: a forward pass of the policy before the first step. sampler:
    what the rollouts recorded, without the pass, as verl's bypass mode and slime's use-rollout-logprobs have it. Then
    ratios are to the sampler, nothing is left for a correction, and the first step of a round, whose policy has not
    moved, says how far sampler and trainer are apart. Where they agree to the bit, as in float32 on one CPU, a round is
    the same either way."""
    correction: Literal["none", "truncate", "mask", "sequence", "sequence-mask"] = "truncate"
    """Importance weights between sampler and trainer: of tokens, limited or dropped outside the range; of whole
    completions, limited; of tokens, in completions whose mean ratio is in the range."""
    importance_min: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Lower end of the range of importance weights, for mask and sequence-mask."""
    importance_max: Annotated[float, Field(ge=1)] = 2.0
    """Upper end of the range of importance weights."""
    router_aux: NotNegative = 0.0
    """Weight of the load-balancing loss of a mixture of experts, which depends on the size of micro-batches."""
    beta: Positive = 0.1
    """Strength of online-dpo's pull to the reference."""
    step_advantage_w: NotNegative = 1.0
    """Weight of gigpo's advantages of turns relative to those of episodes (omega)."""
    step_gamma: Fraction = 0.95
    """Discount of a turn in gigpo's turn returns."""

    @property
    def objective(self) -> Objective:
        """The objective alone, of settings that derive from it."""
        return Objective(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Objective)})

    @property
    def entry(self) -> registry.Entry | None:
        """The registry's entry of the algorithm; None for `module:function`. Raises ValueError for an unknown name."""
        return registry.find(self.algorithm)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model takes part."""
        by_algorithm = self.entry is not None and self.entry.reference
        return by_algorithm or self.kl_coef > 0 or self.kl_in_reward > 0

    @property
    def needs_critic(self) -> bool:
        """Whether a critic takes part."""
        return self.entry is not None and self.entry.critic

    @property
    def scaled_by_round(self) -> bool:
        """Whether advantages are divided by the spread that they, or the rewards, have in the whole round."""
        by_rewards = self.normalisation == "batch-std" and self.algorithm in registry.USES["normalisation"]
        return by_rewards or (self.entry is not None and self.entry.whitened)

    @property
    def regularised(self) -> bool:
        """Whether the loss has terms that no advantage weighs: a KL or an entropy bonus."""
        return self.kl_coef > 0 or self.entropy_coef > 0 or self.entropy_target is not None

    @property
    def needs_greedy(self) -> bool:
        """Whether the reward of a greedy completion of each prompt takes part."""
        return self.entry is not None and self.entry.greedy


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """The critic of PPO."""

    start: Literal["reward_model", "policy"] = "reward_model"
    """Initial critic: the run's reward model (Ouyang et al., 2022), or the policy before the first round with a value
    head of zeros, for tasks without a reward model, such as games."""
    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-5)
    """Its own optimizer."""
    gamma: Fraction = 1.0
    """Discount of a token step."""
    lam: Fraction = 0.95
    """Lambda of generalised advantage estimation."""
    value_clip: Positive | None = 0.2
    """Range of the clipped value loss; null: no clipping."""
    whiten_rewards: bool = False
    """Divide the token rewards of a round by their standard deviation."""
    bootstrap_truncated: bool = False
    """Whether a completion that a limit cut off continues with the value of its last state."""
    bi_level_gae: bool = False
    """Advantages of turns first, then of the tokens within each turn, whose last token is rewarded with the return of
    the turn (VAGEN, RAGEN); false: of tokens, over the whole trajectory. Needs rollouts of an environment."""
    high_level_gamma: Fraction = 0.95
    """Discount of a turn with bi_level_gae."""
    high_level_lam: Fraction | None = None
    """Lambda over turns with bi_level_gae; null: `lam`."""
    pretrain_epochs: Annotated[int, Field(ge=0)] = 0
    """Passes over the first round's rollouts that train the critic alone before the policy is updated."""


@dataclasses.dataclass(frozen=True)
class RoundSettings(Objective):
    """How a round trains: the objective, and how its steps are made."""

    round: Annotated[int, Field(ge=0)] = 0
    """Number of the round."""
    prompts_per_step: Annotated[int, Field(ge=1)] = 8
    """Prompts, with all their completions, of one optimizer step."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the round's rollouts (mu)."""
    routing: Literal["replay", "free"] = "replay"
    """Experts of a mixture in the passes of policy and reference: those that sampled, which the rollouts record, or
    those that the router chooses now. Where engines round differently, routers disagree in some layer at most tokens,
    and training has collapsed without a replay."""
    kl_target: Positive | None = None
    """KL per token towards which both KL weights adapt from round to round; null: they stay constant."""
    kl_horizon: Positive = 10000.0
    """Completions over which the weights adapt to kl_target."""
    entropy_step: Positive = 0.001
    """Step of the adaptive entropy bonus."""
    max_mismatch_kl: Positive = 0.1
    """Mean KL between sampler and trainer past which the run stops: of the round before its first step, or with
    old_logps: sampler of the first step; there later steps of the first epoch, whose policy has moved, stop past ten
    times as much."""
    truncated: Literal["keep", "mask", "mask-loss"] = "keep"
    """Treatment of completions cut off at max_tokens. keep: trained on as all others. mask: they leave the loss and
    every statistic, as a failed sample does. mask-loss: they leave the loss, but their reward counts in the baseline of
    their group, as with DAPO's overlong filtering and in TRL."""
    keep_most_varied: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of a round's groups to train on: those whose totals have the largest standard deviation, as in RAGEN
    (0.25 there). The others leave every statistic. null: all."""
    credit: Literal["auto", "trajectory", "turn"] = "auto"
    """Where the rewards of an environment's turns are earned. turn: on the last token of each, and the rest of the
    total on the last token of the trajectory. trajectory: the total on the last token. auto: turn with ppo and gigpo
    where the rollouts have turns and nothing (clip, squash, normalise, rl.score.truncated) changes the sum of their
    rewards, else trajectory."""
    environment_weight: float = 1.0
    """Weight of the environment's rewards in the totals; the recipe's comes from rl.score.rewards."""
    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-6)
    """The policy's optimizer; its state lives through all rounds."""
    prompt_limit: Annotated[int, Field(ge=0)] = 0
    """Tokens of the longest prompt that the recipe allows; 0: not known."""
    completion_limit: Annotated[int, Field(ge=0)] = 0
    """Tokens of the longest completion that the recipe allows, of an environment with its prompt; 0: not known. On
    accelerators shapes follow both limits, so that rounds compile few programs."""
    critic: CriticSettings = CriticSettings()
    """For PPO."""
    compute: ComputeSettings = ComputeSettings()
    """How to compute."""

    @property
    def credits_turns(self) -> bool:
        """Whether rewards of turns count at their turns, where the rollouts have turns."""
        by_default = self.entry is not None and (self.entry.critic or self.entry.turns)
        return by_default if self.credit == "auto" else self.credit == "turn"

    @classmethod
    def of(cls, algorithm: str, **values: Any) -> Self:
        """Settings as the authors of a built-in algorithm have them, but for `values`."""
        return cls(**{"algorithm": algorithm} | registry.presets(algorithm) | values)


REFERENCE_FREE = ("orpo", "simpo", "cpo")
UNPAIRED = ("kto", "apo-zero-unpaired")
SUMMED = ("dpo", "ipo", "hinge", "robust", "exo-pair", "nca-pair", "sppo-hard", "apo-zero", "apo-down", "discopop")

LOSS_DEFAULTS: dict[str, dict[str, float | bool]] = {
    # A gap of 1 / (2 beta) a token: what IPO's authors call the loss of their paper, and TRL computes.
    "ipo": {"average": True},
    "simpo": {"beta": 2.0, "gamma": 1.0},
    "orpo": {"sft_weight": 1.0},
    "cpo": {"sft_weight": 1.0},
    "exo-pair": {"label_smoothing": 0.001},
}
"""Settings of a preference loss's authors that differ from the field's default."""

LOSS_USES: dict[str, tuple[str, ...]] = {
    "gamma": ("simpo",),
    "label_smoothing": ("dpo", "robust", "exo-pair", "orpo", "simpo", "cpo"),
    "divergence": SUMMED,
    "average": SUMMED,
    "ld_alpha": (*SUMMED, "cpo"),
    "sft_weight": (*SUMMED, *REFERENCE_FREE),
    "desirable_weight": UNPAIRED,
    "undesirable_weight": UNPAIRED,
}
"""Preference losses that read a setting."""


@dataclasses.dataclass(frozen=True)
class Preference:
    """A loss of preference learning and its settings; those that a loss does not read keep their defaults."""

    loss: Literal[
        "dpo", "ipo", "hinge", "robust", "exo-pair", "nca-pair", "sppo-hard", "apo-zero", "apo-down", "discopop",
        "orpo", "simpo", "cpo", "kto", "apo-zero-unpaired",
    ] = "dpo"  # fmt: skip
    """The loss; formulas and papers are in tuning/losses/preference.py."""
    beta: Positive = 0.1
    """Strength of the pull to the reference; of orpo the weight of its odds ratio. 2 with simpo unless given."""
    gamma: NotNegative = 0.0
    """Target margin of simpo; 1 with simpo unless given."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a preference is wrong: conservative DPO with dpo; robust corrects for it without bias."""
    divergence: Literal["reverse-kl", "forward-kl", "js"] = "reverse-kl"
    """Divergence to the reference that is penalised (f-DPO)."""
    average: bool = False
    """Divide log-ratios by the completion's length; true with ipo unless given, so that its target gap is per token."""
    ld_alpha: Fraction = 1.0
    """Weight of tokens past the length of the other completion; below 1 length gains less (LD-DPO)."""
    sft_weight: NotNegative = 0.0
    """Weight of the chosen completion's mean token loss; 1 with orpo and cpo unless given."""
    desirable_weight: NotNegative = 1.0
    """Weight of good completions with kto."""
    undesirable_weight: NotNegative = 1.0
    """Weight of bad completions with kto."""

    @classmethod
    def of(cls, loss: str, **values: Any) -> Self:
        """Settings as the authors of a loss have them, but for `values`."""
        return cls(**{"loss": loss} | LOSS_DEFAULTS.get(loss, {}) | values)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the policy before training."""
        return self.loss not in REFERENCE_FREE

    @property
    def unpaired(self) -> bool:
        """Whether examples are single completions with a label."""
        return self.loss in UNPAIRED
