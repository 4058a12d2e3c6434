"""Ops of the families advantages_group, advantages_token and rewards."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.algorithms import advantages as adv
from rlhf.tuning.losses import returns, rewards
from rlhf.tuning.losses.masks import row_mean, sampled_mask
from rlhf.tuning.rewards.functions import overlong
from rlhf.tuning.rewards.totals import Part, shaped

from .harness import Case, op
from .ops_policy import pair

SINGLETON = {None: "zero", "0": "zero", "mean=0,std=1": "reward", "mean=0": "reward", "reward itself": "reward"}
GAPS = {None: "skipped", "skipped": "skipped", "value 0, still discounted": "discounted"}


def singleton(case: Case) -> str:
    return SINGLETON[case.known("singleton", *SINGLETON)]


def group_ids(case: Case, rows: int) -> jax.Array:
    """Group numbers, from `num_generations` consecutive rows each where the case has no ids."""
    if "group_ids" in case:
        return case["group_ids"]
    return jnp.arange(rows) // int(case["num_generations"])


def first_token(x_BT: jax.Array) -> jax.Array:
    return x_BT[:, 0]


def length_mask(case: Case) -> jax.Array:
    lengths = np.asarray(case["lengths"])
    return jnp.asarray(sampled_mask(lengths, np.zeros((len(lengths), lengths.max()))))


@op("advantages_group", "grpo")
@op("advantages_group", "grpo_no_std")
@op("advantages_group", "grpo_batch_std")
def grpo(case: Case) -> dict[str, Any]:
    normalisation = {"group": "std", "batch": "batch-std", "none": "none"}[case.param("scale")]
    r = case["rewards"]
    out = adv.group_advantages(
        r, group_ids(case, len(r)), normalisation=normalisation, ddof=case.param("ddof", 1),
        eps=case.param("eps", 0.0), singleton=singleton(case),
    )  # fmt: skip
    return {"advantages": out}


@op("advantages_group", "rloo")
def rloo(case: Case) -> dict[str, Any]:
    r = case["rewards"]
    case.known("normalize", None)
    # Of the normalisation that these cases do not have.
    case.param("ddof"), case.param("eps")
    out = adv.rloo_advantages(
        r, group_ids(case, len(r)), singleton=singleton(case), reward_clip=pair(case.param("reward_clip"))
    )
    return {"advantages": out}


@op("advantages_group", "opo")
def opo(case: Case) -> dict[str, Any]:
    case.known("baseline", "length-weighted group mean")
    out = adv.opo_advantages(case["rewards"], case["group_ids"], case["lengths"], singleton=singleton(case))
    return {"advantages": out}


@op("advantages_group", "gpg")
def gpg(case: Case) -> dict[str, Any]:
    case.known("alpha", "batch_size / count_nonzero(rewards)")
    # verl's alpha; the authors' own counts groups without a gradient (tests/tuning/algorithms/test_authors.py).
    alpha = len(case["rewards"]) / np.count_nonzero(case["rewards"])
    out = adv.group_advantages(case["rewards"], case["group_ids"], normalisation="none", singleton=singleton(case))
    return {"advantages": alpha * out / case.param("f_norm")}


@op("advantages_group", "reinforce_pp_baseline")
def reinforce_pp_baseline(case: Case) -> dict[str, Any]:
    case.known(
        "whiten", "over all masked tokens (each sequence weighs by its length)",
        "over all masked tokens; mean always removed",
    )  # fmt: skip
    case.known("mean_denominator_eps", 1e-8)
    out = adv.reinforce_pp_baseline_advantages(
        case["rewards"], case["group_ids"], length_mask(case), ddof=case.param("var_ddof"),
        eps=case.param("eps_in_rsqrt", 0.0), variance_floor=case.param("var_clamp_min", 0.0),
        scale=not case.param("no_std_norm", False), singleton=singleton(case),
    )  # fmt: skip
    return {"advantages": first_token(out)}


@op("advantages_group", "grpo_passk")
def passk(case: Case) -> dict[str, Any]:
    out = adv.passk_advantages(
        case["rewards"], case["group_ids"], normalisation={"group": "std", "none": "none"}[case.param("scale")],
        ddof=case.param("ddof"), eps=case.param("eps"),
    )  # fmt: skip
    return {"advantages": out}


@op("advantages_token", "gae")
@op("advantages_token", "gae_whitened")
def gae(case: Case) -> dict[str, Any]:
    mask = case["mask"]
    out, to_go = returns.gae(
        case["rewards"], case["values"], mask, case.param("gamma"), case.param("lam"),
        gaps=GAPS[case.known("gaps", *GAPS)],
    )  # fmt: skip
    if case.op == "gae_whitened":
        out = returns.whiten(out, mask, ddof=case.param("whiten_ddof"), eps=case.param("eps_in_rsqrt"))
    return {"advantages": out, "returns": to_go}


@op("advantages_token", "gae_from_scalar_reward")
def gae_from_scalar_reward(case: Case) -> dict[str, Any]:
    mask = case["mask"]
    token_rewards = rewards.token_rewards(case["scalar_rewards"], case.param("kl_coef") * case["kl"], mask)
    out, to_go = returns.gae(token_rewards, case["values"], mask, case.param("gamma"), case.param("lam"))
    out = returns.whiten(
        out, mask, ddof=case.param("whiten_ddof"), eps=0.0, variance_floor=case.param("var_clamp_min"),
        scale=not case.param("no_std_norm"),
    )  # fmt: skip
    return {"advantages": out, "returns": to_go}


@op("advantages_token", "reinforce_pp")
def reinforce_pp(case: Case) -> dict[str, Any]:
    mask, gaps = case["mask"], GAPS[case.known("gaps", *GAPS)]
    to_go = returns.reward_to_go(case["rewards"], mask, case.param("gamma"), gaps=gaps)
    out = returns.whiten(to_go, mask, ddof=case.param("whiten_ddof"), eps=case.param("eps_in_rsqrt"))
    return {"advantages": out, "returns": to_go}


@op("advantages_token", "reinforce_pp_from_scalar_reward")
def reinforce_pp_from_scalar_reward(case: Case) -> dict[str, Any]:
    case.known("scalar_rewards", "batch.reward_baselines")
    case.known("kl", "batch.rewards")
    mask = case["mask"]
    penalty = case.param("kl_coef") * case["rewards"]
    token_rewards = rewards.token_rewards(case["reward_baselines"], penalty, mask)
    to_go = returns.reward_to_go(token_rewards, mask, case.param("gamma"))
    out = returns.whiten(
        to_go, mask, ddof=case.param("whiten_ddof"), eps=0.0, variance_floor=case.param("var_clamp_min")
    )
    return {"advantages": out, "returns": to_go}


@op("advantages_token", "reward_to_go")
def reward_to_go(case: Case) -> dict[str, Any]:
    return {"returns": returns.reward_to_go(case["rewards"], case["mask"], case.param("gamma"))}


@op("advantages_token", "remax")
def remax(case: Case) -> dict[str, Any]:
    out, to_go = returns.remax_advantages(
        case["rewards"], case["reward_baselines"], case["mask"], case.param("gamma")
    )  # fmt: skip
    return {"advantages": out, "returns": to_go}


@op("advantages_token", "whiten")
def whiten(case: Case) -> dict[str, Any]:
    out = returns.whiten(
        case[case.known("x", "values")], case["mask"], ddof=case.param("ddof"), eps=case.param("eps_in_rsqrt", 0.0),
        variance_floor=case.param("var_clamp_min", 0.0), shift_mean=case.param("shift_mean", True),
    )  # fmt: skip
    return {"whitened": out}


def clipped(values: jax.Array, bounds: list[float] | None) -> jax.Array:
    """Rewards limited as a recipe's `clip` limits them."""
    part = Part("reward", clip=pair(bounds))
    return jnp.asarray([shaped(value, part) for value in values.tolist()])


@op("rewards", "kl_in_reward")
def kl_in_reward(case: Case) -> dict[str, Any]:
    case.known("terminal", "last valid token")
    mask, coef = case["mask"], case.param("coef")
    options = {
        "kind": case.param("estimator"),
        "log_ratio_clamp": pair(case.param("log_ratio_clamp")),
        "value_clamp": pair(case.param("value_clamp")),
    }
    given = case["old_logps"], case["ref_logps"], mask
    scores = clipped(case["scores"], case.param("score_clip"))
    out = rewards.token_rewards(scores, rewards.kl_penalty(*given, coef=coef, **options), mask)
    kl = rewards.kl_penalty(*given, coef=1.0, **options)
    return {"rewards": out, "mean_kl": row_mean(kl, mask, eps=1e-8).mean()}


@op("rewards", "rloo_kl_in_reward")
def rloo_kl_in_reward(case: Case) -> dict[str, Any]:
    case.known("placement", "sequence reward minus coef * sum of token KL")
    kind = case.known("estimator", "k1")
    penalty = rewards.kl_penalty(
        case["old_logps"], case["ref_logps"], case["mask"], coef=case.param("coef"), kind=kind, log_ratio_clamp=None
    )
    r = rewards.sequence_rewards(case["scores"], penalty)
    assert len(r) == case.param("rows")
    return {"advantages": adv.rloo_advantages(r, jnp.arange(len(r)) // case.param("num_generations"))}


@op("rewards", "overlong_penalty")
def overlong_penalty(case: Case) -> dict[str, Any]:
    case.known("below_floor", "capped at -factor")
    # A recipe's factor is the weight of the reward function.
    lengths = case["lengths"].tolist()
    values = overlong(
        [""] * len(lengths), [""] * len(lengths), completion_ids=[[0] * n for n in lengths],
        tokens=case.param("max_length"), buffer=case.param("buffer"),
    )  # fmt: skip
    return {"rewards": case["rewards"] + case.param("factor") * jnp.asarray(values)}
