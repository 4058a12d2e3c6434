"""What would make a stage fit: settings, tried one after another, each on top of those before it that helped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from stages.tools.fit_asks import Asked
from tuning.axes import Axes
from tuning.fit.figures import Figures
from tuning.fit.machines import Machine
from tuning.fit.sampling import Sampled, sampling
from tuning.fit.scoring import scoring
from tuning.fit.training import Trained, training
from tuning.models.lora import LoraConfig
from tuning.rollout.requests import RefusedRequest

Change = tuple[str, Asked]
"""A setting as `--set` takes it, and the stage with it."""


def figures_of(asked: Asked, machine: Machine) -> Figures:
    """The figures of a stage. Raises ValueError or RefusedRequest, as `tuning.fit` does."""
    if isinstance(asked, Trained):
        return training(asked, machine)
    return sampling(asked, machine) if isinstance(asked, Sampled) else scoring(asked, machine)


def remedies(asked: Asked, section: str, machine: Machine) -> list[dict[str, Any]]:
    """What was tried, in order, up to the first with which the stage fits: the settings so far, the peak in bytes
    (least, expected, most) and the verdict. The last try is a machine of more devices."""
    tried: list[dict[str, Any]] = []
    settings: list[str] = []
    now, best = asked, figures_of(asked, machine).peak[1]
    for kind in _KINDS:
        for setting, changed in kind(now, machine):
            try:
                found = figures_of(changed, machine)
            except (ValueError, RefusedRequest):
                continue
            own = [s for s in settings if s.split("=")[0] != setting.split("=")[0]] + [setting]
            entry = {
                "set": [f"{section}.{s}" for s in own],
                "peak": list(found.peak),
                "verdict": found.verdict(machine),
            }
            if found.peak[1] < best:
                now, best, settings = changed, found.peak[1], own
                tried.append(entry)
            if entry["verdict"] == "fits" and tried and tried[-1] is entry:
                return tried
    return tried + _more(asked, machine)


def _more(asked: Asked, machine: Machine) -> list[dict[str, Any]]:
    """The least machine of the same kind, in powers of two, that the stage fits as it is; none for this process."""
    if machine.name == "cpu":
        return []
    for times in (2, 4, 8, 16, 32):
        count = machine.count * times
        larger = dataclasses.replace(machine, count=count)
        try:
            found = figures_of(asked, larger)
        except (ValueError, RefusedRequest):
            continue
        if found.verdict(larger) == "fits":
            number = count * machine.kind.cores
            name = f"{machine.kind.name}-{number}" if machine.kind.platform == "tpu" else f"{machine.kind.name}x{count}"
            return [{"on": name, "peak": list(found.peak), "verdict": "fits"}]
    return []


def _micro_batch(asked: Asked, machine: Machine) -> Iterator[Change]:
    if not isinstance(asked, Trained):
        return
    before = asked.compute.tokens_per_micro_batch
    shape = training(asked, machine).shape
    row, shards = shape["row_tokens"], shape["mesh"]["data"] * shape["mesh"]["fsdp"]
    tokens = before or shape["rows"] * row * shards
    while tokens // 2 >= row * shards:
        tokens //= 2
        yield f"compute.tokens_per_micro_batch={tokens}", _computed(asked, tokens_per_micro_batch=tokens)


def _recompute(asked: Asked, machine: Machine) -> Iterator[Change]:
    if isinstance(asked, Trained) and training(asked, machine).shape["remat"] not in ("full", "offload"):
        yield "compute.remat=full", _computed(asked, remat="full")


def _offload(asked: Asked, machine: Machine) -> Iterator[Change]:
    # A CPU's programs have the host's memory already.
    if isinstance(asked, Trained) and machine.kind.platform != "cpu" and asked.compute.remat != "offload":
        yield "compute.remat=offload", _computed(asked, remat="offload")


def _moments(asked: Asked, machine: Machine) -> Iterator[Change]:
    if not isinstance(asked, Trained):
        return
    names = ("float32", "bfloat16") if machine.kind.platform == "cpu" else ("float32", "bfloat16", "host")
    for name in names[names.index(asked.optimizer.moments) + 1 :]:
        yield f"optimizer.moments={name}", dataclasses.replace(asked, optimizer=_optimizer(asked, name))


def _optimizer(asked: Trained, moments: str) -> Any:
    """The optimizer with other moments, as the core's own dataclass."""
    from tuning.settings import OptimizerSettings

    values = {f.name: getattr(asked.optimizer, f.name) for f in dataclasses.fields(OptimizerSettings)}
    return OptimizerSettings(**values | {"moments": moments})


def _axes(asked: Asked, machine: Machine) -> Iterator[Change]:
    mesh = asked.compute.mesh
    if mesh.data > 1:
        yield "compute.mesh.data=1", _computed(asked, mesh=Axes(1, -1, mesh.tensor))
    tensor = mesh.tensor * 2
    while 0 < tensor <= min(machine.count, machine.kind.node or machine.count, asked.model.num_heads):
        if asked.model.num_heads % tensor == 0 and machine.count % tensor == 0:
            yield f"compute.mesh.tensor={tensor}", _computed(asked, mesh=Axes(1, -1, tensor))
        tensor *= 2


def _computed(asked: Asked, **values: Any) -> Asked:
    compute = asked.compute
    names = ("dtype", "tokens_per_micro_batch", "mesh", "remat")
    plain = {name: getattr(compute, name) for name in names} | values
    return dataclasses.replace(asked, compute=_settings(plain))


def _settings(values: dict[str, Any]) -> Any:
    from tuning.settings import ComputeSettings

    return ComputeSettings(**values)


def _cache(asked: Asked, machine: Machine) -> Iterator[Change]:
    if isinstance(asked, Sampled) and asked.kv != "int8":
        yield "engine.kv_cache_dtype=int8", dataclasses.replace(asked, kv="int8")


def _quantized_sampling(asked: Asked, machine: Machine) -> Iterator[Change]:
    if isinstance(asked, Sampled) and asked.quantization == "none":
        yield "engine.quantization=int8", dataclasses.replace(asked, quantization="int8")


def _slots(asked: Asked, machine: Machine) -> Iterator[Change]:
    if not isinstance(asked, Sampled):
        return
    slots = sampling(asked, machine).shape["slots"] // 2
    while slots >= 1:
        limits = dataclasses.replace(asked.limits, slots=slots)
        yield f"compute.rollout_rows={slots}", dataclasses.replace(asked, limits=limits)
        slots //= 2


def _adapter(asked: Asked, machine: Machine) -> Iterator[Change]:
    if isinstance(asked, Trained):
        if asked.lora is None:
            yield "lora.rank=16", dataclasses.replace(asked, lora=LoraConfig())
        if asked.lora is None or asked.lora.quantize == "none":
            own = dataclasses.replace(asked.lora or LoraConfig(), quantize="nf4")
            yield "lora.quantize=nf4", dataclasses.replace(asked, lora=own)


def _factored(asked: Asked, machine: Machine) -> Iterator[Change]:
    if isinstance(asked, Trained) and asked.lora is None and asked.optimizer.name != "adafactor":
        from tuning.settings import OptimizerSettings

        yield (
            "optimizer.name=adafactor",
            dataclasses.replace(asked, optimizer=OptimizerSettings(name="adafactor", beta1=0)),
        )


_KINDS = (_micro_batch, _recompute, _axes, _offload, _moments, _cache, _quantized_sampling, _slots, _adapter, _factored)
"""From what costs least to what changes most."""
