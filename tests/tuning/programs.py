"""Modules of the tests that run in a process of their own, on simulated devices, and print JSON."""

import json
import subprocess
import sys
from typing import Any

from tests.support import with_devices


def printed(module: str, *args: Any, devices: int = 8, flags: str = "", timeout: float = 500) -> Any:
    """What the module's last line says."""
    command = [sys.executable, "-m", f"tests.tuning.{module}", *map(str, args)]
    environment = with_devices(devices, flags)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
