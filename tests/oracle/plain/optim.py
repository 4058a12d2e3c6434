"""Optimizer steps: clipping by global norm, a rule, decoupled weight decay, a schedule. Formulas are the papers'."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Settings = Mapping[str, Any]
Slots = dict[str, Tensor]


def learning_rate(settings: Settings, step: int, total: int) -> float:
    """The rate of step `step` (from 0) of `total`: a linear warm-up, then the schedule down to its end."""
    peak, warmup = settings["learning_rate"], settings["warmup_steps"]
    if step < warmup:
        # From 1 / (warm-up + 1) of the peak: no step is lost on a rate of 0.
        first = peak / (warmup + 1)
        return first + (peak - first) * step / warmup
    end, last = peak * settings["end_fraction"], settings["decay_steps"] or total
    length = max(1, last - warmup)
    done = min(step - warmup, length) / length
    match settings["schedule"]:
        case "constant":
            return peak
        case "linear":
            return peak + (end - peak) * done
        case "cosine":
            return end + (peak - end) * (1 + math.cos(math.pi * done)) / 2
        case "wsd":
            # Down in the last fifth (Hu et al., arXiv:2404.06395).
            fifth = max(1, length // 5)
            return peak + (end - peak) * min(max(step - warmup - (length - fifth), 0) / fifth, 1)
    raise ValueError(settings["schedule"])


def decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices, not to norms, biases and scalar heads."""
    return parameter.ndim >= 2 and not any(word in name for word in ("norm", "bias", "score"))


class Optimizer:
    """One of the rules over named parameters, with what it remembers from step to step."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: Settings, total: int = 1):
        self.parameters, self.settings, self.total = parameters, settings, total
        self.count = 0
        self.slots: dict[str, Slots] = {name: {} for name in parameters}

    def step(self, loss: Tensor) -> float:
        """One step down the gradient of `loss`; its norm before clipping. Skipped where that is not finite."""
        found: Sequence[Tensor | None] = [None] * len(self.parameters)
        # A step of completions without tokens has a loss of 0, and moments move on.
        if loss.requires_grad:
            found = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        grads = {
            name: torch.zeros_like(p) if g is None else g
            for (name, p), g in zip(self.parameters.items(), found, strict=True)
        }
        norm = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
        if not math.isfinite(norm):
            return norm
        limit = self.settings["clip_norm"]
        factor = 1.0 if limit is None or norm < limit else limit / norm
        rate = learning_rate(self.settings, self.count, self.total)
        self.count += 1
        with torch.no_grad():
            for name, p in self.parameters.items():
                update = self._rule(name, grads[name] * factor)
                if self.settings["decay"] == "all" or decayed(name, p):
                    update = update + self.settings["weight_decay"] * p
                p -= rate * update
        return norm

    def _moment(self, name: str, slot: str, decay: float, new: Tensor) -> Tensor:
        held = self.slots[name].get(slot, torch.zeros_like(new))
        self.slots[name][slot] = decay * held + (1 - decay) * new
        return self.slots[name][slot]

    def _rule(self, name: str, g: Tensor) -> Tensor:
        b1, b2, eps, t = (*(self.settings[k] for k in ("beta1", "beta2", "epsilon")), self.count)
        slots = self.slots[name]
        match self.settings["name"]:
            case "adamw" | "adam":
                # Kingma and Ba, arXiv:1412.6980; Loshchilov and Hutter, arXiv:1711.05101.
                m, v = self._moment(name, "m", b1, g), self._moment(name, "v", b2, g * g)
                return m / (1 - b1**t) / (torch.sqrt(v / (1 - b2**t)) + eps)
            case "nadamw":
                # Dozat, 2016: the momentum of the next step.
                m, v = self._moment(name, "m", b1, g), self._moment(name, "v", b2, g * g)
                ahead = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
                return ahead / (torch.sqrt(v / (1 - b2**t)) + eps)
            case "amsgrad":
                # Reddi et al., arXiv:1904.09237, over moments without bias.
                m, v = self._moment(name, "m", b1, g), self._moment(name, "v", b2, g * g)
                slots["top"] = torch.maximum(slots.get("top", torch.zeros_like(g)), v / (1 - b2**t))
                return m / (1 - b1**t) / (torch.sqrt(slots["top"]) + eps)
            case "lion":
                # Chen et al., arXiv:2302.06675: the sign of one mixture, and another is kept.
                held = slots.get("m", torch.zeros_like(g))
                self._moment(name, "m", b2, g)
                return torch.sign(b1 * held + (1 - b1) * g)
            case "sgd":
                slots["m"] = b1 * slots.get("m", torch.zeros_like(g)) + g
                return slots["m"]
            case "rmsprop":
                v = self._moment(name, "v", b2, g * g)
                slots["m"] = b1 * slots.get("m", torch.zeros_like(g)) + g / (torch.sqrt(v) + eps)
                return slots["m"]
        raise ValueError(f"no rule {self.settings['name']!r}")
