"""Settings of training, each with its default, its bounds and its meaning.

The module imports neither JAX nor Optax, so that reading a recipe is fast. The stages' settings derive from these
classes and check the bounds; a dataclass that is constructed directly takes any value.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import Field

from rlhf.tuning.axes import Axes

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
Moments = Literal["float32", "bfloat16", "host"]
Remat = Literal["auto", "none", "products", "dots", "attention", "full", "offload"]


Dtype = Literal["auto", "fast", "float32", "bfloat16", "float64"]


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """An optimizer of `rlhf.tuning.training.optimizers`, and its schedule."""

    name: Literal[
        "adamw", "adam", "nadamw", "radam", "amsgrad", "rmsprop", "sgd", "lion", "adafactor", "muon"
    ] = "adamw"  # fmt: skip
    """Update rule. muon updates matrices of layers, with Adam for the rest; adafactor does not scale by the parameter's
    norm."""
    learning_rate: Positive = 1e-5
    """Peak learning rate. Each stage has its own default: of all parameters, and ten times as much of an adapter."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after the warm-up; all but constant decay to the end. wsd decays in the last fifth."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up."""
    decay_steps: Annotated[int, Field(ge=1)] | None = None
    """Step at which the schedule ends; null: the last step of the stage. Rounds of RL have no last step: set it for
    them."""
    end_fraction: Fraction = 0.0
    """Final learning rate, as a share of the peak."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    decay: Literal["matrices", "all"] = "matrices"
    """Parameters with weight decay: matrices (not norms, biases and scalar heads), or all."""
    beta1: Decay = 0.9
    """Decay of the first moment; momentum of sgd and rmsprop (0 unless given), adafactor (0) and muon (0.95)."""
    beta2: Decay = 0.95
    """Decay of the second moment; with lion 0.99 unless given. TRL and verl have 0.999: at 0.95 the moment follows the
    gradients of the last 20 steps, as long as a run of RL here may be."""
    epsilon: Positive = 1e-8
    """Added to the root of the second moment."""
    clip_norm: Positive | None = 1.0
    """Maximum global norm of the gradient; null: no clipping."""
    moments: Moments = "float32"
    """Storage of the moments. bfloat16 takes half of the memory, with stochastic rounding; host keeps float32 in host
    memory, and each update of a TPU or GPU reads and writes them there."""
    max_skipped: Annotated[int, Field(ge=0)] = 3
    """Non-finite steps in a row that are skipped before the stage stops."""


RULE_DEFAULTS: dict[str, dict[str, float]] = {
    "sgd": {"beta1": 0.0},
    "rmsprop": {"beta1": 0.0},
    "adafactor": {"beta1": 0.0},
    "lion": {"beta2": 0.99},
    "muon": {"beta1": 0.95},
}
"""Settings of a rule's authors that differ from the field's default."""


@dataclasses.dataclass(frozen=True)
class ComputeSettings:
    """How to compute. `dtype` is chosen by the device where it says auto; the rest cannot change a result."""

    dtype: Dtype = "auto"
    """Type of activations; master weights, moments and sums are float32. float32 is exact on accelerators too, where
    products by default are not. fast is float32 whose products round their inputs to bfloat16, on a CPU that multiplies
    those faster (`rlhf doctor` measures it), and auto elsewhere. An update of RL rounds in gradients alone where its
    rollouts are not fast, so that both agree as in float32. float64, on CPU alone, is for checks: weights, moments and
    sums are float64 as well."""
    tokens_per_micro_batch: Annotated[int, Field(ge=0)] = 0
    """Row tokens of one forward and backward pass; 0: the device decides."""
    remat: Remat = "auto"
    """Results of each layer that the backward pass keeps, from most memory to least; it recomputes the rest. none: keep
    everything; products: results of products and of attention; dots: of products alone, without those of attention;
    attention: the output of attention; full: only the layer's input; offload: that in the host's memory. auto:
    products on CPU, full elsewhere."""
    mesh: Axes = Axes()
    """How several devices share the work. Sampling has no `fsdp` and no `context`: those devices are replicas."""
