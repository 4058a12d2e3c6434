"""What would make a stage fit: settings, tried one after another, each on top of those before it that helped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from stages.tools.fit_asks import OF_CRITIC, Asked, Run
from tuning.axes import Axes
from tuning.fit.figures import Figures
from tuning.fit.machines import Machine
from tuning.fit.sampling import Sampled, sampling
from tuning.fit.scoring import scoring
from tuning.fit.training import Trained, training
from tuning.rollout.requests import RefusedRequest

Change = dict[str, Any]
"""Settings of a section by their dotted names, as `--set` takes them."""


def figures_of(asked: Asked, machine: Machine) -> Figures:
    """The figures of a stage. Raises ValueError or RefusedRequest, as `tuning.fit` does."""
    if isinstance(asked, Trained):
        return training(asked, machine)
    return sampling(asked, machine) if isinstance(asked, Sampled) else scoring(asked, machine)


def remedies(run: Run, section: str, name: str, machine: Machine) -> list[dict[str, Any]]:
    """What was tried, in order, up to the first with which the stage fits: the settings so far, the peak in bytes
    (least, expected, most) and the verdict. The last try is a machine of more devices.

    A try is what the run with these settings asks, so a recipe that takes them gets the same answer.
    """
    tried: list[dict[str, Any]] = []
    settings: Change = {}
    now = run.ask(section, name, machine)
    best = figures_of(now, machine)
    for kind in _KINDS:
        for change in kind(now, best, machine):
            own = {n: value for n, value in settings.items() if n not in change} | change
            try:
                changed = run.changed(section, own).ask(section, name, machine)
                found = figures_of(changed, machine)
            # Also where the section has no such setting, or not beside its others.
            except (ValueError, RefusedRequest):
                continue
            if found.peak[1] >= best.peak[1]:
                continue
            now, best, settings = changed, found, own
            verdict = found.verdict(machine)
            entry = {"set": [f"{section}.{n}={value}" for n, value in own.items()], "peak": list(found.peak)}
            tried.append(entry | {"verdict": verdict})
            if verdict == "fits":
                return tried
    return tried + _more(run, section, name, machine)


def _more(run: Run, section: str, name: str, machine: Machine) -> list[dict[str, Any]]:
    """The least machine of the same kind, in powers of two, that the stage fits as it is; none for this process."""
    if machine.name == "cpu":
        return []
    for times in (2, 4, 8, 16, 32):
        count = machine.count * times
        if machine.kind.lacks(count):
            continue
        larger = dataclasses.replace(machine, count=count)
        try:
            found = figures_of(run.ask(section, name, larger), larger)
        except (ValueError, RefusedRequest):
            continue
        if found.verdict(larger) == "fits":
            number = count * machine.kind.cores
            shown = (
                f"{machine.kind.name}-{number}" if machine.kind.platform == "tpu" else f"{machine.kind.name}x{count}"
            )
            return [{"on": shown, "peak": list(found.peak), "verdict": "fits"}]
    return []


def _micro_batch(asked: Asked, best: Figures, machine: Machine) -> Iterator[Change]:
    if not isinstance(asked, Trained):
        return
    shape = best.shape
    row, shards = shape["row_tokens"], shape["mesh"]["data"] * shape["mesh"]["fsdp"]
    tokens = asked.compute.tokens_per_micro_batch or shape["rows"] * row * shards
    while tokens // 2 >= row * shards:
        tokens //= 2
        yield {"compute.tokens_per_micro_batch": tokens}


def _recompute(asked: Asked, best: Figures, machine: Machine) -> Iterator[Change]:
    if isinstance(asked, Trained) and best.shape["remat"] not in ("full", "offload"):
        yield {"compute.remat": "full"}


def _offload(asked: Asked, best: Figures, machine: Machine) -> Iterator[Change]:
    # A CPU's programs have the host's memory already.
    if isinstance(asked, Trained) and machine.kind.platform != "cpu" and asked.compute.remat != "offload":
        yield {"compute.remat": "offload"}


def _moments(asked: Asked, best: Figures, machine: Machine) -> Iterator[Change]:
    if not isinstance(asked, Trained):
        return
    names = ("float32", "bfloat16") if machine.kind.platform == "cpu" else ("float32", "bfloat16", "host")
    for name in names[names.index(asked.optimizer.moments) + 1 :]:
        yield {f"{_optimizer(asked)}.moments": name}


def _optimizer(asked: Trained) -> str:
    """Where the section has the settings of the optimizer."""
    return "critic.optimizer" if asked.columns == OF_CRITIC else "optimizer"


def _axes(asked: Asked, best: Figures, machine: Machine) -> Iterator[Change]:
    mesh = asked.compute.mesh
    if mesh.data > 1:
        yield _mesh(mesh, mesh.tensor)
    tensor = mesh.tensor * 2
    while 0 < tensor <= min(machine.count, machine.kind.node or machine.count, asked.model.num_heads):
        if asked.model.num_heads % tensor == 0 and machine.count % tensor == 0:
            yield _mesh(mesh, tensor)
        tensor *= 2


def _mesh(mesh: Axes, tensor: int) -> Change:
    """What of `mesh` changes so that `fsdp` takes all devices that `tensor` leaves."""
    wanted = {"data": 1, "fsdp": -1, "tensor": tensor}
    return {f"compute.mesh.{axis}": size for axis, size in wanted.items() if getattr(mesh, axis) != size}


def _cache(asked: Asked, best: Figures, machine: Machine) -> Iterator[Change]:
    if isinstance(asked, Sampled) and asked.kv != "int8":
        yield {"engine.kv_cache_dtype": "int8"}


def _quantized_sampling(asked: Asked, best: Figures, machine: Machine) -> Iterator[Change]:
    if isinstance(asked, Sampled) and asked.quantization == "none":
        yield {"engine.quantization": "int8"}


def _slots(asked: Asked, best: Figures, machine: Machine) -> Iterator[Change]:
    if not isinstance(asked, Sampled):
        return
    slots = best.shape["slots"] // 2
    while slots >= 1:
        yield {"compute.rollout_rows": slots}
        slots //= 2


def _adapter(asked: Asked, best: Figures, machine: Machine) -> Iterator[Change]:
    if isinstance(asked, Trained):
        if asked.lora is None:
            yield {"lora.rank": 16}
        if asked.lora is None or asked.lora.quantize == "none":
            yield {"lora.quantize": "nf4"}


def _factored(asked: Asked, best: Figures, machine: Machine) -> Iterator[Change]:
    if isinstance(asked, Trained) and asked.lora is None and asked.optimizer.name != "adafactor":
        of = _optimizer(asked)
        yield {f"{of}.name": "adafactor", f"{of}.beta1": 0.0}


_KINDS = (_micro_batch, _recompute, _axes, _offload, _moments, _cache, _quantized_sampling, _slots, _adapter, _factored)
"""From what costs least to what changes most."""
