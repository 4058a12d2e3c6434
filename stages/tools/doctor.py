"""Prints the device, the choices made for it and the versions in use."""

from __future__ import annotations

import os
import sys

from stages.contract.fingerprint import library_versions


def main() -> None:
    """Prints the table; see the module."""
    from stages.common.flags import FLAGS, value_of
    from tuning.device import choose, memory_kinds
    from tuning.rewards.sandbox import gaps
    from tuning.rollout.engine.cpu.kernels import build

    device = choose()
    print(f"device        {device.platform} ({device.kind}) x {device.count}, {os.cpu_count()} cores")
    print(f"memory        {device.memory_bytes / 2**30:.1f} GiB")
    print(f"dtype         {device.compute.dtype} activations, float32 weights and moments")
    half = device.compute.dtype == "bfloat16"
    fused = {"gpu": "cuDNN" if half else None, "tpu": "splash"}.get(device.platform)
    print(f"attention     {fused or 'blocks of queries'} (plain XLA where rows are short or a feature is missing)")
    if device.platform == "cpu":
        print(f"decoding      {'kernels in C' if any(build()) else 'XLA alone, which is slower'}")
    print(f"remat         {device.compute.remat}")
    print(f"memories      {', '.join(memory_kinds())}")
    if device.count > 1:
        print(f"mesh          parameters cut over {device.count} devices, unless compute.mesh says otherwise")
    for flag in FLAGS.get(device.platform, ()):
        print(f"flag          {flag.name}={value_of(flag, os.environ)}: {flag.why}")
    print(f"micro-batch   {device.row_tokens_per_step} row tokens")
    print(f"rollout rows  {device.rollout_rows} side by side")
    print(f"sandbox       code of completions can reach {', '.join(gaps()) or 'nothing of this machine'}")
    print(f"python        {sys.version.split()[0]}")
    for name, version in library_versions().items():
        print(f"{name:<13} {version}")
    if device.memory_bytes < 7 * 10**9:
        print("warning: less than 7 GB of memory; the demo needs about that much")


if __name__ == "__main__":
    main()
