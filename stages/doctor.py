"""Prints the device, the choices made for it and the versions in use."""

from __future__ import annotations

import os
import sys

from stages.code import library_versions


def main() -> None:
    from tuning.device import choose

    device = choose()
    print(f"device        {device.platform} ({device.kind}) x {device.count}, {os.cpu_count()} cores")
    print(f"memory        {device.memory_bytes / 2**30:.1f} GiB")
    print(f"dtype         {device.compute.dtype} activations, float32 weights and moments")
    print("attention     one masked XLA kernel for packed rows")
    print(f"remat         {'each layer' if device.compute.remat else 'none'}")
    print(f"micro-batch   {device.row_tokens_per_step} row tokens")
    print(f"rollout rows  {device.rollout_rows} side by side")
    print(f"python        {sys.version.split()[0]}")
    for name, version in library_versions().items():
        print(f"{name:<13} {version}")
    if device.memory_bytes < 6 * 2**30:
        print("warning: less than 6 GiB of memory; the demo needs about that much")


if __name__ == "__main__":
    main()
