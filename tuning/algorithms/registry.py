"""Algorithms of RL by name: the module of each, its presets, and the algorithms that read a setting.

Loads nothing heavy, so that a recipe can be checked before any work. The formulas are in the modules named here, the
settings in `settings`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from rlhf.tuning.names import nearest

Ratio = Literal["token", "sequence", "sequence-token", "sequence-sum"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """An algorithm as a recipe sees it."""

    module: str
    """Module below `rlhf.tuning.algorithms` with a function `algorithm(objective, **arguments)`."""
    presets: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of its authors that differ from the defaults of the settings."""
    ratio: Ratio = "token"
    groups: bool = True
    """Whether a completion is judged against the others of its prompt, so a group of equal rewards has no signal."""
    whitened: bool = False
    """Whether advantages are divided by their spread over the round."""
    critic: bool = False
    greedy: bool = False
    """Whether it needs the reward of a greedy completion of each prompt."""
    reference: bool = False
    """Whether its loss compares with the reference whatever the weights of the KL."""
    turns: bool = False
    """Whether it needs the turns of an environment, and their states."""
    on_policy: bool = False
    """Whether it takes one step a round: without a ratio or a clip further steps are off policy and unbounded."""


# Presets that several algorithms share.
SEQUENCE = {"aggregation": "sequence-mean-token-mean"}
GSPO = SEQUENCE | {"clip_low": 3e-4, "clip_high": 4e-4, "kl_coef": 0.0}
# The authors' script (Stable-RL, run_qwen3_30b_a3b_megatron.sh); the trust region is around the sampler.
DPPO = {"old_logps": "sampler", "normalisation": "none", "aggregation": "constant", "kl_coef": 0.0}
# A completion is one action, so its correction is a product over its tokens too. The KL: the paper's appendix C.
RLOO = SEQUENCE | {"kl_coef": 0.0, "kl_in_reward": 0.03, "correction": "sequence"}

ALGORITHMS: dict[str, Entry] = {
    # DeepSeekMath, arXiv:2402.03300, equation 3 and section 4.2.
    "grpo": Entry("grpo", SEQUENCE | {"kl_coef": 0.04}),
    "dr-grpo": Entry("grpo", {"normalisation": "none", "aggregation": "constant", "kl_coef": 0.0}),
    "dapo": Entry("dapo", {"clip_high": 0.28, "kl_coef": 0.0, "tied_groups": "drop"}),
    "gspo": Entry("gspo", GSPO, ratio="sequence"),
    "gspo-token": Entry("gspo", GSPO, ratio="sequence-token"),
    # clip_low 1: no lower bound.
    "cispo": Entry("cispo", {"clip_low": 1.0, "clip_high": 4.0, "kl_coef": 0.0}),
    "sapo": Entry("sapo", SEQUENCE | {"kl_coef": 0.0}),
    # TRL's loss_type vespo.
    "vespo": Entry("vespo", {"old_logps": "sampler", "kl_coef": 0.0}),
    "gmpo": Entry("gmpo", SEQUENCE | {"clip_low": 0.4, "clip_high": 0.4, "kl_coef": 0.0}, ratio="sequence"),
    "dppo": Entry("dppo", DPPO | {"clip_low": 0.15, "clip_high": 0.15}),
    "dppo-kl": Entry("dppo", DPPO | {"clip_low": 0.05, "clip_high": 0.05}),
    "clip-cov": Entry("cov", {"kl_coef": 0.0}),
    "kl-cov": Entry("cov", {"kl_coef": 0.0}),
    "opo": Entry("opo", {"kl_coef": 0.0}, on_policy=True),
    "gpg": Entry("gpg", {"kl_coef": 0.0}, on_policy=True),
    "pass-at-k": Entry("pass_at_k"),
    "rloo": Entry("rloo", RLOO, ratio="sequence-sum"),
    "reinforce-pp": Entry("reinforce_pp", {"kl_coef": 0.0, "kl_in_reward": 0.01}, groups=False, whitened=True),
    "reinforce-pp-baseline": Entry("reinforce_pp", {"kl_kind": "k2", "kl_coef": 0.01}, whitened=True),
    # The KL of its authors' training scripts.
    "remax": Entry("remax", {"kl_coef": 0.0, "kl_in_reward": 0.05}, groups=False, greedy=True),
    # KL in the reward, as in Ouyang et al.: the critic learns it too.
    "ppo": Entry("ppo", {"kl_coef": 0.0, "kl_in_reward": 0.02}, groups=False, whitened=True, critic=True),
    # The mode mean_norm of the authors' code, arXiv:2505.10978.
    "gigpo": Entry("gigpo", {"normalisation": "none"}, turns=True),
    "online-dpo": Entry("online_dpo", SEQUENCE | {"kl_coef": 0.0, "correction": "none"}, reference=True),
}

# Algorithms whose advantages are `group_relative`, so that a normalisation has a meaning.
GROUP_RELATIVE = (
    "grpo", "dapo", "gspo", "gspo-token", "cispo", "sapo", "vespo", "gmpo", "dppo", "dppo-kl", "clip-cov", "kl-cov",
)  # fmt: skip
NOT_PAIRED = tuple(name for name in ALGORITHMS if name != "online-dpo")
# Algorithms whose loss has a ratio to pi_old.
RATIOS = tuple(name for name in NOT_PAIRED if name != "gpg")
# Algorithms whose groups of equal rewards have no advantage.
TIED = (*GROUP_RELATIVE, "opo", "gpg", "pass-at-k", "rloo", "gigpo")
# Algorithms whose baseline is of rewards alone: completions outside the loss may count in it.
GROUP_BASELINE = (*GROUP_RELATIVE, "gpg", "pass-at-k", "rloo", "reinforce-pp-baseline")
# Algorithms with a range for the ratio, or for the move of a probability.
BOUNDED = tuple(name for name in NOT_PAIRED if name not in ("sapo", "vespo", "opo", "gpg", "kl-cov"))
# Algorithms with PPO's clipped surrogate, the only one that a dual clip bounds.
CLIPPED = tuple(name for name in BOUNDED if name not in ("cispo", "gmpo", "dppo", "dppo-kl", "clip-cov"))

USES: dict[str, tuple[str, ...]] = {
    "normalisation": (*GROUP_RELATIVE, "gigpo"),
    "tied_groups": TIED,
    "top_entropy": tuple(name for name in NOT_PAIRED if ALGORITHMS[name].ratio == "token" and name != "vespo"),
    "clip_low": BOUNDED,
    "clip_high": BOUNDED,
    "dual_clip": CLIPPED,
    "kl_coef": NOT_PAIRED,
    "kl_in_reward": NOT_PAIRED,
    "entropy_coef": NOT_PAIRED,
    "entropy_target": NOT_PAIRED,
    "old_logps": RATIOS,
    "correction": NOT_PAIRED,
    "beta": ("online-dpo",),
    "step_advantage_w": ("gigpo",),
    "step_gamma": ("gigpo",),
    "credit": ("ppo", "reinforce-pp", "gigpo"),
    "critic": ("ppo",),
}
"""The algorithms that read a setting. A setting that is not listed is read by all."""


def find(name: str) -> Entry | None:
    """The entry of a built-in algorithm; None for `module:function`. Raises ValueError naming what there is."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if ":" in name:
        return None
    raise ValueError(f"no algorithm {name!r}; {nearest(name, ALGORITHMS, 'module:function')}")


def presets(name: str) -> dict[str, Any]:
    """Values of the authors of a built-in algorithm; empty for other names."""
    return dict(ALGORITHMS[name].presets) if name in ALGORITHMS else {}


def check_aggregation(ratio: Ratio, aggregation: str) -> None:
    """Raises ValueError for a pair that changes the algorithm: a ratio of sequences gives one term a sequence."""
    if ratio != "token" and aggregation != "sequence-mean-token-mean":
        raise ValueError(
            f"ratio {ratio!r} weighs a sequence once; {aggregation!r} would weigh it by its length: "
            "use 'sequence-mean-token-mean'"
        )
