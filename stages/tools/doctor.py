"""Prints the device, the choices made for it and the versions in use: as a table, or with `--json` as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rlhf.stages.contract.fingerprint import library_versions

PAYS = 1.3
"""How much faster products of bfloat16 have to be than those of float32, for `fast` to be advised."""
LITTLE_MEMORY = 7 * 10**9
"""Bytes that the demo needs."""


def found() -> dict[str, Any]:
    """What this machine is, and what it decides for a recipe."""
    from rlhf.stages.common.xla_flags import FLAGS, value_of
    from rlhf.tuning.cpu.kernels import build
    from rlhf.tuning.device import choose, memory_kinds
    from rlhf.tuning.rewards.sandbox import gaps

    device = choose()
    half = device.compute.dtype == "bfloat16"
    kernels = build() if device.platform == "cpu" else None
    # What XLA cuts over several devices is left to it.
    in_c = "a kernel in C" if kernels and kernels.fused_forward and device.count == 1 and not half else None
    fused = {"gpu": "cuDNN" if half else None, "tpu": "splash", "cpu": in_c}.get(device.platform)
    little = device.memory_bytes < LITTLE_MEMORY
    return {
        "device": {"platform": device.platform, "kind": device.kind, "count": device.count},
        "cores": os.cpu_count(),
        "memory_bytes": device.memory_bytes,
        "gflops": _rates() if device.platform == "cpu" else None,
        "dtype": device.compute.dtype,
        "attention": fused or "blocks of queries",
        "kernels": None if kernels is None else any(kernels),
        "remat": device.compute.remat,
        "memories": list(memory_kinds()),
        "flags": [
            {"name": flag.name, "value": value_of(flag, os.environ), "why": flag.why}
            for flag in FLAGS.get(device.platform, ())
        ],
        "row_tokens_per_step": device.row_tokens_per_step,
        "row_tokens_undivided": device.row_tokens_undivided,
        "rollout_rows": device.rollout_rows,
        "sandbox_gaps": list(gaps()),
        "python": sys.version.split()[0],
        "versions": library_versions(),
        "warnings": ["less than 7 GB of memory; the demo needs about that much"] if little else [],
    }


def _rates() -> dict[str, float]:
    """GFLOP/s of the models' products of large float32 arrays, exact and with inputs rounded to bfloat16."""
    import jax.numpy as jnp

    from rlhf.tuning.models.matmul import matmul
    from rlhf.tuning.precision import using
    from rlhf.tuning.training.speed import rate

    found, size = {}, 1024
    for name, dtype in (("float32", "float32"), ("bfloat16", "fast")):
        with using(dtype):
            x = jnp.ones((size, size), "float32")
            found[name] = round(rate(matmul, x, x, work=2.0 * size**3)[-1] / 1e9, 1)
    return found


def show(of: dict[str, Any]) -> None:
    """Prints what `found` says as a table."""
    device = of["device"]
    print(f"device        {device['platform']} ({device['kind']}) x {device['count']}, {of['cores']} cores")
    print(f"memory        {of['memory_bytes'] / 2**30:.1f} GiB")
    print(f"dtype         {of['dtype']} activations, float32 weights and moments")
    if of["gflops"] is not None:
        exact, half = of["gflops"]["float32"], of["gflops"]["bfloat16"]
        advice = "pays" if half > PAYS * exact else "does not pay"
        print(f"products      {exact:.0f} GFLOP/s of float32, {half:.0f} of bfloat16: compute.dtype=fast {advice}")
    print(f"attention     {of['attention']} (XLA's where it does not suit a row or a feature)")
    if of["kernels"] is not None:
        print(f"decoding      {'kernels in C' if of['kernels'] else 'XLA alone, which is slower'}")
    print(f"remat         {of['remat']}")
    print(f"memories      {', '.join(of['memories'])}")
    if device["count"] > 1:
        print(f"mesh          parameters cut over {device['count']} devices, unless compute.mesh says otherwise")
    for flag in of["flags"]:
        print(f"flag          {flag['name']}={flag['value']}: {flag['why']}")
    several, whole = of["row_tokens_per_step"], of["row_tokens_undivided"]
    print(f"micro-batch   {several} row tokens{f', {whole} where it is a whole step' if whole != several else ''}")
    print(f"rollout rows  {of['rollout_rows']} side by side")
    print(f"sandbox       code of completions can reach {', '.join(of['sandbox_gaps']) or 'nothing of this machine'}")
    print(f"python        {of['python']}")
    for name, version in of["versions"].items():
        print(f"{name:<13} {version}")
    for warning in of["warnings"]:
        print(f"warning: {warning}")


def main() -> None:
    """Prints the table, or JSON; see the module."""
    # Libraries may write lines of their own to standard output while it is found out.
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        of = found()
    finally:
        sys.stdout = stdout
    if "--json" in sys.argv[1:]:
        print(json.dumps(of, indent=1))
    else:
        show(of)


if __name__ == "__main__":
    main()
