"""Losses, one completion at a time: tensors are [tokens] of that completion. `z` is log pi - log pi_old."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests.oracle.plain.model import real

Settings = Mapping[str, Any]
FARTHEST = 20.0
"""Log-ratios are limited to this before they are exponentiated (R5)."""


def near(x: Tensor, limit: float = FARTHEST) -> Tensor:
    """`x` within the limit on both sides; no gradient beyond it."""
    return torch.clamp(x, -limit, limit)


def kl(logps: Tensor, ref: Tensor, kind: str, clamp: float | None) -> Tensor:
    """Estimates of KL(pi || ref) token by token (Schulman, 2020); k3-k2: the value of k3, the gradient of k2 (R8)."""
    d = near(ref - logps)
    if kind == "k1":
        value = -d
    elif kind == "k2":
        value = d * d / 2
    else:
        value = torch.exp(d) - 1 - d
    if clamp is not None:
        value = torch.clamp(value, -clamp, clamp)
    if kind != "k3-k2":
        return value
    gradient = (ref - logps) ** 2 / 2
    return value.detach() + gradient - gradient.detach()


def surrogate(settings: Settings, logps: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """The algorithm's loss of each token, without importance weights, KL and entropy."""
    low, high, z = settings["clip_low"], settings["clip_high"], logps - old
    match settings["algorithm"]:
        case "cispo":
            # MiniMax, arXiv:2506.13585: the weight has no gradient, so no token loses its own.
            weight = torch.clamp(torch.exp(near(z)), max(1 - low, 0.0), 1 + high).detach()
            return -weight * advantages * logps
        case "sapo":
            # Gao et al., arXiv:2511.20347.
            tau = torch.where(advantages > 0, real(1.0), real(1.05))
            return -advantages * 4 / tau * torch.sigmoid(tau * (torch.exp(near(z)) - 1))
        case "vespo":
            # Shen et al., arXiv:2602.10693.
            w = torch.exp(torch.clamp(near(z).sum(), math.log(1e-8), 20.0)).detach()
            up = w**2 * torch.exp(3 * (1 - w))
            down = w**3 * torch.exp(2 * (1 - w))
            return -advantages * torch.where(advantages >= 0, up, down) * logps
        case "gmpo":
            # Zhao et al., arXiv:2507.20673: the geometric mean of ratios that are clipped before it.
            sign = torch.sign(advantages)
            bounded = sign * torch.minimum(sign * z, sign * torch.clamp(z, -low, high))
            return -advantages.mean() * torch.exp(bounded.mean()) * torch.ones_like(z)
        case "dppo" | "dppo-kl":
            return _dppo(settings, logps, old, advantages)
        case "opo" | "kl-cov":
            # Hao et al., arXiv:2505.23585.
            return -advantages * torch.exp(near(z))
        case "gpg":
            # Chu et al., arXiv:2504.02546: no ratio.
            return -advantages * logps
    return _clipped(settings, torch.exp(near(_ratio(settings["algorithm"], z))), advantages)


def _ratio(algorithm: str, z: Tensor) -> Tensor:
    """The log-ratio of each token: its own, or one of the whole completion."""
    match algorithm:
        case "gspo":
            # Zheng et al., arXiv:2507.18071.
            return z.mean() * torch.ones_like(z)
        case "gspo-token":
            return (z.mean() - z).detach() + z
        case "rloo":
            # Ahmadian et al., arXiv:2402.14740: a completion is one action.
            return z.sum() * torch.ones_like(z)
    return z


def _clipped(settings: Settings, r: Tensor, a: Tensor) -> Tensor:
    """PPO's clipped surrogate (arXiv:1707.06347), with the dual clip where A < 0 (arXiv:1912.09729, R6)."""
    gain = torch.minimum(r * a, torch.clamp(r, 1 - settings["clip_low"], 1 + settings["clip_high"]) * a)
    if settings["dual_clip"] is not None:
        gain = torch.where(a < 0, torch.maximum(gain, settings["dual_clip"] * a), gain)
    return -gain


def _dppo(settings: Settings, logps: Tensor, old: Tensor, a: Tensor) -> Tensor:
    """Qi et al., arXiv:2602.04879: a token that moved too far with its advantage leaves."""
    p, q = logps.detach().exp(), old.exp()
    if settings["algorithm"] == "dppo":
        far_up, far_down = p - q > settings["clip_high"], q - p > settings["clip_low"]
    else:
        move = q * (old - logps.detach()) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
        far_up, far_down = (move > settings["clip_high"]) & (p > q), (move > settings["clip_low"]) & (p < q)
    gone = torch.where(a > 0, far_up, far_down)
    weight = torch.clamp(torch.exp(near(logps - old)), max=1e4).detach() * ~gone
    return -a * weight * logps


def correction(settings: Settings, old: Tensor, mu: Tensor) -> Tensor:
    """rho = pi_old / mu of each token, limited or dropped as the settings say; no gradient (R4)."""
    low, high, z = settings["importance_min"], settings["importance_max"], (old - mu).detach()
    rho = torch.exp(near(z))
    match settings["correction"]:
        case "none":
            return torch.ones_like(z)
        case "truncate":
            return torch.clamp(rho, max=high)
        case "mask":
            return torch.where((rho >= low) & (rho <= high), rho, real(0.0))
        case "sequence":
            return torch.clamp(torch.exp(near(z.sum())), max=high) * torch.ones_like(z)
        case "sequence-mask":
            mean = float(torch.exp(near(z.mean()))) if len(z) else 1.0
            return rho if low <= mean <= high else torch.zeros_like(z)
    raise ValueError(settings["correction"])


def share(x: Tensor, settings: Settings, tokens: int, completions: int) -> Tensor:
    """What one completion's token losses add to the loss of a step with these counts of tokens and completions (R1)."""
    match settings["aggregation"]:
        case "token-mean":
            return x.sum() / max(tokens, 1)
        case "sequence-mean-token-mean":
            return x.sum() / max(len(x), 1) / max(completions, 1)
        case "sequence-mean-token-sum":
            return x.sum() / max(completions, 1)
        case "constant":
            return x.sum() / (max(completions, 1) * settings["constant"])
    raise ValueError(settings["aggregation"])


def value(new: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """PPO's value loss of each token, 1/2 of the larger of the plain and the clipped squared error."""
    error = (new - returns) ** 2
    if clip is not None:
        error = torch.maximum(error, (torch.clamp(new, old - clip, old + clip) - returns) ** 2)
    return error / 2


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: float, centering: float) -> Tensor:
    """Loss of a pair under a reward model: Llama 2's margin (arXiv:2307.09288), Eisenstein's centring (2312.09244)."""
    return -logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected) ** 2


def divergence(student: Tensor, teacher: Tensor, settings: Settings) -> Tensor:
    """GKD's divergence of each token from logits [tokens, vocabulary] (Agarwal et al., arXiv:2306.13649)."""
    q, p = (torch.log_softmax(x / settings["temperature"], -1) for x in (student, teacher))

    def divergence_of(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    match settings["divergence"]:
        case "forward-kl":
            return divergence_of(p, q)
        case "reverse-kl":
            return divergence_of(q, p)
    beta = settings["beta"]
    mixture = torch.log(beta * p.exp() + (1 - beta) * q.exp())
    return beta * divergence_of(p, mixture) + (1 - beta) * divergence_of(q, mixture)


def smoothed(z: Tensor, s: float) -> Tensor:
    """Conservative DPO: the label is wrong with chance s."""
    return -(1 - s) * logsigmoid(z) - s * logsigmoid(-z)


def preference(settings: Settings, sides: Mapping[str, Tensor], lengths: tuple[int, int]) -> Tensor:
    """The loss of a pair, from summed log-probabilities `chosen`, `rejected`, and with a reference `ref_...` too."""
    beta, s, name = settings["beta"], settings["label_smoothing"], settings["loss"]
    chosen, rejected = sides["chosen"], sides["rejected"]
    means = chosen / max(lengths[0], 1), rejected / max(lengths[1], 1)
    match name:
        case "orpo":
            # Hong et al., arXiv:2403.07691; probabilities stay below 1, where odds are infinite.
            a, b = (torch.clamp(x, max=-1e-6) for x in means)
            odds = (a - torch.log1p(-a.exp())) - (b - torch.log1p(-b.exp()))
            loss = beta * smoothed(odds, s)
        case "simpo":
            # Meng et al., arXiv:2405.14734.
            loss = smoothed(beta * (means[0] - means[1]) - settings["gamma"], s)
        case "cpo":
            # Xu et al., arXiv:2401.08417.
            loss = smoothed(beta * (chosen - rejected), s)
        case _:
            x, y = (_ratio_of(settings, sides[k] - sides[f"ref_{k}"]) for k in ("chosen", "rejected"))
            if settings["average"]:
                x, y = x / max(lengths[0], 1), y / max(lengths[1], 1)
            loss = _paired(name, x, y, beta, s)
    return loss - settings["sft_weight"] * sides["whole"] / max(lengths[0], 1) if settings["sft_weight"] else loss


def _ratio_of(settings: Settings, ratio: Tensor) -> Tensor:
    """f-DPO (Wang et al., arXiv:2309.16240): what takes the place of log pi / ref under another divergence."""
    match settings["divergence"]:
        case "forward-kl":
            return -torch.exp(-ratio)
        case "js":
            return logsigmoid(ratio)
    return ratio


def _paired(name: str, x: Tensor, y: Tensor, beta: float, s: float) -> Tensor:
    z, bx, by = beta * (x - y), beta * x, beta * y
    match name:
        case "dpo":  # Rafailov et al., arXiv:2305.18290
            return smoothed(z, s)
        case "hinge":  # Zhao et al., arXiv:2305.10425
            return torch.clamp(1 - z, min=0)
        case "ipo":  # Azar et al., arXiv:2310.12036
            return (x - y - 1 / (2 * beta)) ** 2
        case "robust":  # Chowdhury et al., arXiv:2403.00409
            return (-(1 - s) * logsigmoid(z) + s * logsigmoid(-z)) / (1 - 2 * s)
        case "exo-pair":  # Ji et al., arXiv:2402.00856
            won, lost = torch.sigmoid(z), torch.sigmoid(-z)
            return won * (logsigmoid(z) - math.log(1 - s)) + lost * (logsigmoid(-z) - math.log(s))
        case "nca-pair":  # Chen et al., arXiv:2402.05369
            return -logsigmoid(bx) - (logsigmoid(-bx) + logsigmoid(-by)) / 2
        case "sppo-hard":  # Wu et al., arXiv:2405.00675
            return (x - 1 / (2 * beta)) ** 2 + (y + 1 / (2 * beta)) ** 2
        case "apo-zero":  # D'Oosterlinck et al., arXiv:2408.06266
            return 1 - torch.sigmoid(bx) + torch.sigmoid(by)
        case "apo-down":
            return torch.sigmoid(bx) + 1 - torch.sigmoid(z)
        case "discopop":  # Lu et al., arXiv:2406.08414
            gate = torch.sigmoid(z / 0.05)
            return -logsigmoid(z) * (1 - gate) + torch.exp(-z) * gate
    raise ValueError(name)


def unpaired(settings: Settings, ratio: Tensor, good: bool, point: float) -> Tensor:
    """KTO (Ethayarajh et al., arXiv:2402.01306) of a completion; APO-zero (arXiv:2408.06266) has no reference point."""
    h = settings["beta"] * (ratio - (point if settings["loss"] == "kto" else 0.0))
    if good:
        return settings["desirable_weight"] * (1 - torch.sigmoid(h))
    return settings["undesirable_weight"] * (1 - torch.sigmoid(-h))
