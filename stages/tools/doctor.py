"""Print the device, the defaults that follow from it and the versions in use: as a table, or with `--json` as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from rlhf.stages.contract.fingerprint import library_versions

LITTLE_MEMORY = 7 * 10**9
"""Need of the demo, in bytes."""
NVIDIA = Path("/proc/driver/nvidia/version")
"""The file in which NVIDIA's kernel module names its version."""
CUDA_DRIVER = 580
"""The oldest branch of the driver with which CUDA 13 runs, by NVIDIA's table of compatible versions."""


def nvidia_driver(file: Path = NVIDIA) -> str | None:
    """Return the version of NVIDIA's driver, such as `580.65.06`; None without a driver."""
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", file.read_text()) if file.exists() else None
    return found[1] if found else None


def warnings_of(platform: str, driver: str | None, memory_bytes: int, jax_version: str) -> list[str]:
    """Return sentences on faults of this machine: a driver that JAX cannot use, untested versions, little memory."""
    warnings = []
    if memory_bytes < LITTLE_MEMORY:
        warnings.append("less than 7 GB of memory: run smoke in place of demo")
    if driver is not None and int(driver.partition(".")[0]) < CUDA_DRIVER:
        warnings.append(
            f"the NVIDIA driver {driver} is older than {CUDA_DRIVER}, which CUDA 13 needs: update the driver"
        )
    elif driver is not None and platform != "gpu":
        warnings.append(
            f"there is an NVIDIA driver ({driver}), and JAX found no GPU: install infra/requirements-gpu.txt; check "
            "`nvidia-smi` and JAX_PLATFORMS"
        )
    if platform == "gpu":
        warnings.append(f"JAX {jax_version} has not passed `make test-device` on a GPU yet: run it before a long run")
    return warnings


def facts_of_machine() -> dict[str, Any]:
    """Return the facts of this machine, and the defaults that follow for a recipe."""
    from rlhf.stages.common.xla_flags import FLAGS, value_of
    from rlhf.tuning.cpu.kernels import build
    from rlhf.tuning.device import choose, memory_kinds
    from rlhf.tuning.rewards.failures import Outage
    from rlhf.tuning.rewards.sandbox import gaps

    device, driver, versions = choose(), nvidia_driver(), library_versions()
    half = device.compute.dtype == "bfloat16"
    kernels = build() if device.platform == "cpu" else None
    # XLA alone computes on several devices.
    in_c = "a kernel in C" if kernels and kernels.fused_forward and device.count == 1 and not half else None
    warnings = warnings_of(device.platform, driver, device.memory_bytes, versions["jax"])
    reachable = None
    try:
        reachable = list(gaps())
    except Outage as error:
        warnings.append(f"rewards and tools that run code cannot: {error}")
    fused = {"gpu": "Triton" if half else None, "tpu": "splash", "cpu": in_c}.get(device.platform)
    return {
        "device": {"platform": device.platform, "kind": device.kind, "count": device.count},
        "cores": os.cpu_count(),
        "memory_bytes": device.memory_bytes,
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
        "sandbox_gaps": reachable,
        "python": sys.version.split()[0],
        "nvidia_driver": driver,
        "versions": versions,
        "warnings": warnings,
    }


def show(facts: dict[str, Any]) -> None:
    """Print the facts as a table."""
    device, several, whole = facts["device"], facts["row_tokens_per_step"], facts["row_tokens_undivided"]
    sandbox = ""
    if facts["sandbox_gaps"] is not None:
        sandbox = f"code of completions can reach {', '.join(facts['sandbox_gaps']) or 'nothing of this machine'}"
    rows = [
        ("device", f"{device['platform']} ({device['kind']}) x {device['count']}, {facts['cores']} cores"),
        ("driver", facts["nvidia_driver"]),
        ("memory", f"{facts['memory_bytes'] / 2**30:.1f} GiB"),
        ("dtype", f"{facts['dtype']} activations, float32 weights and moments"),
        ("attention", f"{facts['attention']} (XLA's for unsuitable rows or features)"),
        ("decoding", {True: "kernels in C", False: "XLA alone, which is slower", None: ""}[facts["kernels"]]),
        ("remat", str(facts["remat"])),
        ("memories", ", ".join(facts["memories"])),
        ("mesh", f"parameters sharded over {device['count']} devices by default" if device["count"] > 1 else ""),
        *(("flag", f"{flag['name']}={flag['value']}: {flag['why']}") for flag in facts["flags"]),
        ("micro-batch", f"{several} row tokens{f', {whole} as a whole step' if whole != several else ''}"),
        ("rollout rows", f"{facts['rollout_rows']} at a time"),
        ("sandbox", sandbox),
        ("python", facts["python"]),
        *facts["versions"].items(),
        *(("warning", warning) for warning in facts["warnings"]),
    ]
    for name, text in rows:
        if text:
            print(f"{name:<13} {text}")


def main() -> None:
    """Print the table, or JSON."""
    # Libraries may print to standard output.
    with contextlib.redirect_stdout(sys.stderr):
        facts = facts_of_machine()
    if "--json" in sys.argv[1:]:
        print(json.dumps(facts, indent=1))
    else:
        show(facts)


if __name__ == "__main__":
    main()
