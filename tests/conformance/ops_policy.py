"""Ops of the families aggregation, policy_loss, polgrad_goldens, microbatch, importance, kl and value_loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.losses import importance, kl, policy, policy_variants, value
from rlhf.tuning.losses.aggregate import Counts, aggregate, count
from rlhf.tuning.losses.masks import masked

from .harness import Case, op

MODES = {
    "token_mean": "token-mean",
    "token_sum": "token-sum",
    "token_sum_norm": "token-sum",
    "seq_mean_token_mean": "sequence-mean-token-mean",
    "seq_mean_token_sum": "sequence-mean-token-sum",
    "seq_mean_token_sum_norm": "constant",
    # One value a row, repeated over its tokens.
    "row_mean": "sequence-mean-token-mean",
}
RATIOS = {"token": "token", "sequence": "sequence", "sequence_token": "sequence-token", "sequence_sum": "sequence-sum"}
Aggregate = Callable[[jax.Array], jax.Array]


def pair(bounds: list[float | None] | None) -> tuple[float | None, float | None] | None:
    return None if bounds is None else (bounds[0], bounds[1])


def aggregator(case: Case, mode: str, mask: jax.Array) -> Aggregate:
    """The case's reduction."""
    empty = case.known("empty_rows", "excluded", "included", "not allowed")
    counts = count(np.asarray(mask), np.ones(len(mask), bool) if empty == "included" else None)
    norm, row_eps = case.param("norm"), case.param("row_eps", 0.0)
    return lambda x: aggregate(
        x, mask, MODES[mode], **counts._asdict(), constant=norm if mode.endswith("_norm") else None, row_eps=row_eps
    )


@op("aggregation", "aggregate")
def aggregation(case: Case) -> dict[str, Any]:
    reduce = aggregator(case, case.param("mode"), case["mask"])
    loss, grad = jax.value_and_grad(reduce)(case["per_token"])
    return {"loss": loss, "grad_per_token": grad}


def kl_options(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `kl_per_token` from a case's description of a KL estimate; consumes the keys it knows."""
    bounds = pair(options.pop("log_ratio_clamp", None))
    of = options.pop("log_ratio_clamp_of", None)
    assert of in (None, "logps-ref_logps"), of
    if of == "logps-ref_logps" and bounds is not None:
        low, high = bounds
        bounds = (None if high is None else -high, None if low is None else -low)
    straight = options.pop("straight_through", None)
    return {
        "kind": options.pop("estimator"),
        "log_ratio_clamp": bounds,
        "value_clamp": pair(options.pop("value_clamp", None)),
        "straight_through": {None: None, "k2": "k2", "is_weighted_k2": "weighted-k2"}[straight],
        "weight_max": options.pop("is_weight_max", None),
    }


def surrogate(case: Case, arrays: dict[str, Any], logps: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Per-token policy loss and its metric sums."""
    old, adv, mask = (arrays[name] for name in ("old_logps", "advantages", "mask"))
    name, ratio = case.param("surrogate"), case.param("ratio")
    low, high, dual = case.param("eps_low"), case.param("eps_high"), case.param("dual_clip")
    bounds = pair(case.param("log_ratio_clamp"))
    given = (policy.Terms(logps, old, adv, mask, clamp=bounds),)
    match name, ratio:
        case "clip", _:
            return policy.clipped_surrogate(*given, clip_low=low, clip_high=high, dual_clip=dual, ratio=RATIOS[ratio])
        case "pg", _:
            return policy.policy_gradient(*given, ratio=RATIOS[ratio])
        case "reinforce", "none":
            return policy.reinforce(*given)[0], {}
        case "cispo", "token":
            limits = {"weight_min": case.param("weight_min"), "weight_max": case.param("weight_max")}
            return policy.cispo(*given, **limits)
        case "sapo", "token":
            taus = {name: case.param(name) for name in ("tau_pos", "tau_neg")}
            return policy_variants.sapo(*given, **taus)
        case (("dppo_tv" | "dppo_kl"), "token"):
            return policy_variants.dppo(
                *given, divergence=name.removeprefix("dppo_"), limit_low=case.param("div_low"),
                limit_high=case.param("div_high"), ratio_max=case.param("ratio_max"),
            )  # fmt: skip
        case "geo_mean", "sequence":
            return policy_variants.gmpo(*given, clip_low=low, clip_high=high, row_eps=case.param("row_eps", 0.0))
        case _:
            raise AssertionError(f"{case.id}: unknown surrogate {name!r} with ratio {ratio!r}")


def token_weights(case: Case, arrays: dict[str, Any]) -> jax.Array:
    """Product of the stop-gradient factors that multiply the surrogate."""
    old, mask = arrays["old_logps"], arrays["mask"]
    weights = jnp.ones_like(old)
    if case.known("is_weights", None, "batch.is_weights"):
        weights = weights * case["is_weights"]
    tis = case.param("tis")
    if tis:
        assert set(tis) == {"level", "max", "applied_to"}, tis
        weights = weights * importance.importance_weights(
            old, case["rollout_logps"], mask, level=tis["level"], weight_max=tis["max"]
        )
    gate = case.param("is_correction")
    if gate:
        assert gate["gating"] == "ratio", gate
        given = old, case["rollout_logps"], mask
        low, high = band = pair(gate["threshold"])
        if gate["level"] == "seq":
            assert gate["mode"] == "mask", gate
            weights = weights * importance.gated_weights(*given, band=band)
        else:
            outside = {"clip": "clip", "mask": "zero"}[gate["mode"]]
            weights = weights * importance.importance_weights(
                *given, weight_min=low, weight_max=high, outside=outside, log_ratio_clamp=None
            )
    return weights


def policy_metrics(sums: dict[str, jax.Array], mean_kl: jax.Array | None) -> dict[str, Any]:
    """The peers' names for the project's sums; None where a metric is recorded but not one of the project's."""
    if "approx_kl" not in sums:
        return {}
    n = sums["n_tokens"]
    shares = {"ppo_kl": sums["approx_kl"] / n, "kl": mean_kl, "is_filter_ratio": None, "vllm_kl": None}
    if "clip_high" in sums:
        clipped = (sums["clip_high"] + sums["clip_low"]) / n
        shares |= {"pg_clipfrac": clipped, "clip_ratio": clipped, "clip_ratio/region_mean": clipped}
        shares |= {"clip_ratio/high_mean": sums["clip_high"] / n, "clip_ratio/low_mean": sums["clip_low"] / n}
    if "dual_clip" in sums:
        shares["pg_clipfrac_lower"] = sums["dual_clip"] / n
    return shares


@op("policy_loss", "policy_loss")
@op("polgrad_goldens", "policy_loss")
def policy_loss(case: Case) -> dict[str, Any]:
    mask = case["mask"]
    kind = case.known("advantages", "token", "sequence", "zero") or "sequence"
    advantages = case["advantages_token" if kind == "token" else "advantages"]
    arrays: dict[str, Any] = {
        "logps": case["logps"],
        "old_logps": case["old_logps"],
        "ref_logps": case.get("ref_logps"),
        "advantages": jnp.zeros_like(advantages) if kind == "zero" else advantages,
        "mask": mask,
    }
    for name, junk in (case.param("junk_padding") or {}).items():
        target = "advantages" if name == "advantages_token" else name
        arrays[target] = masked(arrays[target], mask, junk)
    entropy = case.get("entropy")
    reduce = aggregator(case, case.param("agg"), mask)
    kl_params, entropy_coef = case.param("kl"), case.param("entropy_coef")
    entropy_agg = case.param("entropy_agg", case.param("agg"))

    def total(logps: jax.Array, entropy: jax.Array | None) -> tuple[jax.Array, tuple[Any, Any]]:
        losses, sums = surrogate(case, arrays, logps)
        loss, mean_kl = reduce(losses * token_weights(case, arrays)), None
        if kl_params:
            options = dict(kl_params)
            coef, own_agg = options.pop("coef"), options.pop("agg", None)
            times_ratio = options.pop("times_ratio", False)
            per_token = kl.kl_per_token(logps, arrays["ref_logps"], mask_BT=mask, **kl_options(options))
            assert not options, f"{case.id}: unknown KL options {options}"
            if times_ratio:
                z = policy.log_ratio(logps, arrays["old_logps"], mask, log_ratio_clamp=None)
                per_token = per_token * jnp.exp(z)
            mean_kl = aggregator(case, "token_mean", mask)(per_token)
            loss += coef * (aggregator(case, own_agg, mask) if own_agg else reduce)(per_token)
        if entropy_coef is not None:
            loss -= entropy_coef * aggregator(case, entropy_agg, mask)(entropy)
        return loss, (sums, mean_kl)

    arguments = (0, 1) if entropy_coef is not None else (0,)
    (loss, (sums, mean_kl)), grads = jax.value_and_grad(total, arguments, has_aux=True)(arrays["logps"], entropy)
    out = {"loss": loss, "grad_logps": grads[0], "metrics": policy_metrics(sums, mean_kl)}
    return out | ({"grad_entropy": grads[1]} if entropy_coef is not None else {})


@op("microbatch", "microbatch_policy_loss")
@op("microbatch", "data_parallel_policy_loss")
def microbatch(case: Case) -> dict[str, Any]:
    mode = case.param("mode")
    norm = case.param("norm") or case.param("loss_scale_factor")
    split, combine = case.param("split"), case.param("combine")
    names = ("logps", "old_logps", "advantages", "mask")
    whole = {name: case[name] for name in names}
    # A part is the batch with the other rows masked: every part has one shape, which saves compilation. The tests of
    # the losses cut the rows out.
    owner = np.repeat(np.arange(len(split)), split)[:, None]
    parts = [whole | {"mask": jnp.asarray(np.where(owner == i, whole["mask"], 0))} for i in range(len(split))]
    full = count(whole["mask"])
    for name, counted in (("batch_num_tokens", full.n_tokens), ("global_batch_size", full.n_sequences)):
        assert case.param(name) in (None, int(counted))

    def reduced(
        part: dict[str, Any], counts: Counts, mode: str = MODES[mode], constant: float | None = norm
    ) -> jax.Array:
        losses, _ = policy.clipped_surrogate(
            policy.Terms(*(part[name] for name in names), clamp=pair(case.param("log_ratio_clamp"))),
            clip_low=case.param("eps_low"), clip_high=case.param("eps_high"), dual_clip=case.param("dual_clip"),
        )  # fmt: skip
        constant = constant if mode == "constant" else None
        return aggregate(losses, part["mask"], mode, **counts._asdict(), constant=constant)

    def of_micro(part: dict[str, Any], logps: jax.Array) -> jax.Array:
        part = part | {"logps": logps}
        match combine:
            case "mean of micro losses (each reduced on its own)":
                return reduced(part, count(part["mask"])) / len(split)
            case (
                "sum of micro losses, each divided by the full batch's normaliser"
                | "sum of micro losses, each divided by the full batch's token count"
                | "sum of micro losses, each divided by the window's token count"
                | "(sum of unreduced micro sums) / (sum of micro denominators)"
            ):
                return reduced(part, full)
            case "mean over ranks; each rank's loss is its sum over the global normaliser, times the number of ranks":
                return reduced(part, full) * len(split)
        raise AssertionError(f"{case.id}: unknown combination {combine!r}")

    scale = 1 / len(split) if "rank" in combine else 1
    results = [jax.value_and_grad(lambda x, part=part: of_micro(part, x))(part["logps"]) for part in parts]
    losses = jnp.stack([loss for loss, _ in results])
    loss, full_loss = losses.sum() * scale, reduced(whole, full)
    own = "n_tokens" if mode == "token_mean" else "n_sequences"
    return {
        "micro_losses": losses,
        "rank_losses": losses,
        "loss": loss,
        "grad_logps": sum(grad for _, grad in results) * scale,
        "full_batch_loss": full_loss,
        "equals_full_batch": bool(jnp.allclose(loss, full_loss, rtol=1e-6, atol=1e-8)),
        "micro_unreduced_sums": losses * getattr(full, own),
        "micro_denominators": jnp.stack([getattr(count(part["mask"]), own) for part in parts]),
    }


@op("importance", "is_weights")
def is_weights(case: Case) -> dict[str, Any]:
    case.known("sequence_statistic", "sum of log-ratios")
    case.known("masked_tokens", "weight 0")
    weights = importance.importance_weights(
        case["old_logps"], case["rollout_logps"], case["mask"], level=case.param("level"),
        weight_min=case.param("min"), weight_max=case.param("max"), outside=case.param("outside"),
        batch_normalise=case.param("batch_normalize"), log_ratio_clamp=pair(case.param("log_ratio_clamp")),
    )  # fmt: skip
    return {"weights": weights}


@op("kl", "kl_per_token")
def kl_per_token(case: Case) -> dict[str, Any]:
    names = ("estimator", "log_ratio_clamp", "log_ratio_clamp_of", "value_clamp", "straight_through", "is_weight_max")
    options = kl_options({name: case.param(name) for name in names})
    ref = case[case.known("ref", "ref_logps", "ref_logps_extreme")]

    def weighted(logps: jax.Array) -> tuple[jax.Array, jax.Array]:
        estimate = kl.kl_per_token(logps, ref, old_logps_BT=case["old_logps"], **options)
        return (case["cotangent"] * estimate).sum(), estimate

    (_, estimate), grad = jax.value_and_grad(weighted, has_aux=True)(case["logps"])
    return {"kl": estimate, "grad_logps_of_sum_cotangent_kl": grad}


@op("kl", "adaptive_kl_controller")
def adaptive(case: Case) -> dict[str, Any]:
    coef, coefs = case.param("init_kl_coef"), []
    for current in case["current_kl"].tolist():
        coef = kl.adaptive_kl_coef(
            coef, current, target=case.param("target_kl"), horizon=case.param("horizon"), n_steps=case.param("n_steps")
        )
        coefs.append(coef)
    return {"kl_coef_after_each_update": coefs}


@op("value_loss", "value_loss")
def value_loss(case: Case) -> dict[str, Any]:
    mask = case["mask"]
    reduce = aggregator(case, case.param("agg"), mask)

    def total(values: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        losses, sums = value.value_loss(
            values, case["returns"], mask, old_values_BT=case["old_values"], clip=case.param("clip"),
            factor=case.param("factor"),
        )  # fmt: skip
        return reduce(losses), sums

    (loss, sums), grad = jax.value_and_grad(total, has_aux=True)(case["values"])
    return {"loss": loss, "grad_values": grad, "clipfrac": sums["value_clipped"] / sums["n_tokens"]}
