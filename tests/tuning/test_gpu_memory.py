"""Calls of CUDA's driver: a library with its ABI, compiled here, takes the driver's place. No GPU runs them here."""

import os
import shutil
import subprocess
import sys

import pytest

DRIVER = """
#include <stddef.h>
#include <stdio.h>
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = device == 43 ? 85899345920 : 0; return 0; }
int cuDeviceGetDefaultMemPool(void **pool, int device) { *pool = (void *)(0x700000000000 + device); return 0; }
int cuMemPoolTrimTo(void *pool, size_t keep) { printf("trim %p %zu\\n", pool, keep); fflush(stdout); return keep; }
int cuInit(unsigned flags) { return 3; }
"""
PROGRAM = """
import types
from rlhf.tuning import device
class GPU:
    platform, local_hardware_id = "gpu", 3
    def memory_stats(self):
        return LIMIT
device.jax = types.SimpleNamespace(local_devices=lambda: [GPU()], device_put=lambda x, d: device.jnp_zero)
device.jnp_zero = __import__("jax").numpy.zeros(())
for LIMIT in (None, {"bytes_limit": 0, "bytes_in_use": 5}, {"bytes_limit": 7}):
    print(device.memory_bytes())
device.return_memory()
try:
    device._cuda("cuInit", 0)
except RuntimeError as e:
    print(e)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_memory_comes_from_the_driver_and_goes_back_to_it(tmp_path):
    (tmp_path / "driver.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "libcuda.so.1", "driver.c"], cwd=tmp_path, check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True)
    usable = int(0.9 * 80 * 2**30)
    assert done.stdout.splitlines() == [
        *[str(usable)] * 2,
        "7",
        "trim 0x70000000002b 0",
        "cuInit of CUDA's driver failed with error 3",
    ]
