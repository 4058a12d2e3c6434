"""Ops of the families advantages_group, advantages_token and rewards."""

from typing import Any

import jax
import jax.numpy as jnp

from tuning.algorithms import advantages as adv
from tuning.losses import rewards
from tuning.losses.masks import completion_mask_from_lengths, row_mean

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
    return completion_mask_from_lengths(case["lengths"], int(case["lengths"].max()))


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
@op("advantages_group", "rloo_normalized")
def rloo(case: Case) -> dict[str, Any]:
    r = case["rewards"]
    ddof, eps = case.param("ddof"), case.param("eps")
    out = adv.rloo_advantages(
        r, group_ids(case, len(r)), singleton=singleton(case), reward_clip=pair(case.param("reward_clip"))
    )
    if case.known("normalize", None, "batch mean/std"):
        out = adv.standardise(out, ddof=ddof, eps=eps)
    return {"advantages": out}


@op("advantages_group", "opo")
def opo(case: Case) -> dict[str, Any]:
    case.known("baseline", "length-weighted group mean")
    out = adv.opo_advantages(case["rewards"], case["group_ids"], case["lengths"], singleton=singleton(case))
    return {"advantages": out}


@op("advantages_group", "gpg")
def gpg(case: Case) -> dict[str, Any]:
    case.known("alpha", "batch_size / count_nonzero(rewards)")
    out = adv.gpg_advantages(case["rewards"], case["group_ids"], f_norm=case.param("f_norm"), singleton=singleton(case))
    return {"advantages": out}


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


@op("advantages_group", "reinforce_pp_sequence")
def reinforce_pp_sequence(case: Case) -> dict[str, Any]:
    out = adv.reinforce_pp_advantages(
        case["rewards"], case["group_ids"], baseline=case.param("baseline").replace("_", "-"),
        batch_norm=case.param("batch_norm"), ddof=case.param("ddof", 1), eps=case.param("eps", 0.0),
    )  # fmt: skip
    return {"advantages": out}


@op("advantages_group", "grpo_multi_reward")
def grpo_multi_reward(case: Case) -> dict[str, Any]:
    case.known(
        "missing", "null = reward function not applied; a row with all null gets advantage 0 and leaves the group "
        "statistics",
    )  # fmt: skip
    case.known("scale", "group")
    combine = {"sum_then_normalize": "sum-then-normalise", "normalize_then_sum": "normalise-then-sum"}
    r = case["rewards_per_func"]
    out = adv.multi_reward_advantages(
        r, group_ids(case, len(r)), case.param("weights"), combine=combine[case.param("aggregation")],
        ddof=case.param("ddof"), eps=case.param("eps"),
    )  # fmt: skip
    return {"advantages": out}


@op("advantages_group", "rloo_multi_reward")
def rloo_multi_reward(case: Case) -> dict[str, Any]:
    total, valid = adv.combine_rewards(case["rewards_per_func"], case.param("weights"))
    return {"advantages": adv.rloo_advantages(total, group_ids(case, len(total)), valid=valid)}


@op("advantages_group", "gdpo")
def gdpo(case: Case) -> dict[str, Any]:
    per_reward = case.param("per_reward")
    assert set(per_reward) == {"scale", "ddof", "eps"} and per_reward["scale"] == "group"
    assert per_reward["ddof"] == case.param("var_ddof")
    case.known("whiten", "over all masked tokens")
    out = adv.gdpo_token_advantages(
        case["rewards_per_func"], case["group_ids"], length_mask(case), case.param("weights"),
        group_eps=per_reward["eps"], ddof=per_reward["ddof"], eps=case.param("eps_in_rsqrt"),
    )  # fmt: skip
    return {"advantages": first_token(out)}


@op("advantages_token", "gae")
@op("advantages_token", "gae_whitened")
def gae(case: Case) -> dict[str, Any]:
    mask = case["mask"]
    out, returns = adv.gae(
        case["rewards"], case["values"], mask, case.param("gamma"), case.param("lam"),
        gaps=GAPS[case.known("gaps", *GAPS)],
    )  # fmt: skip
    if case.op == "gae_whitened":
        out = adv.whiten(out, mask, ddof=case.param("whiten_ddof"), eps=case.param("eps_in_rsqrt"))
    return {"advantages": out, "returns": returns}


@op("advantages_token", "gae_from_scalar_reward")
def gae_from_scalar_reward(case: Case) -> dict[str, Any]:
    mask = case["mask"]
    token_rewards = rewards.terminal_rewards(case["scalar_rewards"], mask) - case.param("kl_coef") * case["kl"]
    out, returns = adv.gae(token_rewards, case["values"], mask, case.param("gamma"), case.param("lam"))
    out = adv.whiten(
        out, mask, ddof=case.param("whiten_ddof"), eps=0.0, variance_floor=case.param("var_clamp_min"),
        scale=not case.param("no_std_norm"),
    )  # fmt: skip
    return {"advantages": out, "returns": returns}


@op("advantages_token", "reinforce_pp")
def reinforce_pp(case: Case) -> dict[str, Any]:
    out, returns = adv.reinforce_pp_token_advantages(
        case["rewards"], case["mask"], case.param("gamma"), ddof=case.param("whiten_ddof"),
        eps=case.param("eps_in_rsqrt"), gaps=GAPS[case.known("gaps", *GAPS)],
    )  # fmt: skip
    return {"advantages": out, "returns": returns}


@op("advantages_token", "reinforce_pp_from_scalar_reward")
def reinforce_pp_from_scalar_reward(case: Case) -> dict[str, Any]:
    case.known("scalar_rewards", "batch.reward_baselines")
    case.known("kl", "batch.rewards")
    mask = case["mask"]
    token_rewards = rewards.terminal_rewards(case["reward_baselines"], mask) - case.param("kl_coef") * case["rewards"]
    out, returns = adv.reinforce_pp_token_advantages(
        token_rewards, mask, case.param("gamma"), ddof=case.param("whiten_ddof"), eps=0.0,
        variance_floor=case.param("var_clamp_min"),
    )  # fmt: skip
    return {"advantages": out, "returns": returns}


@op("advantages_token", "reward_to_go")
def reward_to_go(case: Case) -> dict[str, Any]:
    return {"returns": adv.reward_to_go(case["rewards"], case["mask"], case.param("gamma"))}


@op("advantages_token", "remax")
def remax(case: Case) -> dict[str, Any]:
    out, returns = adv.remax_advantages(
        case["rewards"], case["reward_baselines"], case["mask"], case.param("gamma")
    )  # fmt: skip
    return {"advantages": out, "returns": returns}


@op("advantages_token", "whiten")
@op("advantages_token", "whiten_per_row")
def whiten(case: Case) -> dict[str, Any]:
    out = adv.whiten(
        case[case.known("x", "values")], case["mask"], ddof=case.param("ddof"), eps=case.param("eps_in_rsqrt", 0.0),
        variance_floor=case.param("var_clamp_min", 0.0), shift_mean=case.param("shift_mean", True),
        over="row" if case.op == "whiten_per_row" else "batch",
    )  # fmt: skip
    return {"whitened": out}


@op("advantages_token", "optimal_token_baseline")
def optimal_token_baseline(case: Case) -> dict[str, Any]:
    out, returns = adv.optimal_token_baseline_advantages(
        case["rewards"], case["group_ids"], case["old_logps"], case["sum_pi_squared"], case["mask"],
        zero_tail=case.param("handle_zero_tail"), eps=case.param("eps"),
    )  # fmt: skip
    return {"advantages": out, "returns": returns}


@op("rewards", "kl_in_reward")
def kl_in_reward(case: Case) -> dict[str, Any]:
    case.known("terminal", "last valid token")
    mask = case["mask"]
    out, kl = rewards.kl_in_reward(
        case["scores"], case["old_logps"], case["ref_logps"], mask, coef=case.param("coef"),
        kind=case.param("estimator"), log_ratio_clamp=pair(case.param("log_ratio_clamp")),
        value_clamp=pair(case.param("value_clamp")), score_clip=pair(case.param("score_clip")),
    )  # fmt: skip
    return {"rewards": out, "mean_kl": row_mean(kl, mask, eps=1e-8).mean()}


@op("rewards", "rloo_kl_in_reward")
def rloo_kl_in_reward(case: Case) -> dict[str, Any]:
    case.known("placement", "sequence reward minus coef * sum of token KL")
    case.known("estimator", "k1")
    r = rewards.sequence_kl_penalty(
        case["scores"], case["old_logps"], case["ref_logps"], case["mask"], coef=case.param("coef")
    )
    assert len(r) == case.param("rows")
    return {"advantages": adv.rloo_advantages(r, jnp.arange(len(r)) // case.param("num_generations"))}


@op("rewards", "overlong_penalty")
def overlong_penalty(case: Case) -> dict[str, Any]:
    capped = case.known("below_floor", "capped at -factor", "not capped") == "capped at -factor"
    penalty = rewards.overlong_penalty(
        case["lengths"], max_length=case.param("max_length"), buffer=case.param("buffer"),
        factor=case.param("factor"), capped=capped,
    )  # fmt: skip
    return {"rewards": case["rewards"] + penalty}


@op("rewards", "truncation_penalty")
def truncation_penalty(case: Case) -> dict[str, Any]:
    case.known("rule", "coef >= 0: reward * coef; coef < 0: reward = coef")
    return {"rewards": rewards.truncation_penalty(case["rewards"], case["truncated"], coef=case.param("coef"))}
