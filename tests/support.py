"""What tests of several packages share: small files, the command line, and processes of Python."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("flows", "stages", "tuning")

RLHF = str(Path(sys.executable).with_name("rlhf"))

# Most of the tests' time would be LLVM's; programs are the same, their machine code is less polished. Before JAX loads.
QUICK = "--xla_backend_optimization_level=0"
if version("jaxlib").startswith("0.10."):
    # XLA ends a process that gives it a flag of another version.
    QUICK += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def copy_project(folder: Path) -> Path:
    """Copies this project's packages to `folder`, to be edited there. Returns the entry of PYTHONPATH for the copy."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    # The import name is a folder of relative links.
    shutil.copytree(
        ROOT / "src", folder / "src", symlinks=True, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
    )
    return folder / "src"


def with_devices(count: int, flags: str = "") -> dict[str, str]:
    """The environment of a process that computes on so many simulated devices of the CPU, with further flags of XLA."""
    if version("jaxlib").startswith("0.10."):
        # On a busy machine threads of devices reach a collective minutes apart; XLA would end the process after 40 s.
        flags += " --xla_cpu_collective_call_terminate_timeout_seconds=600 --xla_cpu_collective_timeout_seconds=600"
    return os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count} {flags}", "JAX_PLATFORMS": "cpu"}


def write_files(folder: Path, **contents: str) -> Path:
    """A folder of small files; `__` in a name is a slash."""
    for name, text in contents.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def python(code: str, *args: Any, **options: Any) -> subprocess.Popen[str]:
    """A Python process that runs `code` with this process's environment."""
    command = [sys.executable, "-c", code, *map(str, args)]
    env = os.environ | options.pop("env", {})
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options)


def finish(process: subprocess.Popen[str], timeout: float = 120) -> str:
    """Its standard output, once it has ended well."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out


def can_mount() -> bool:
    """Whether a test may mount file systems in a namespace of its own."""
    return sys.platform == "linux" and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


def hears_ctrl_c() -> None:
    """In a new process: a shell that runs the tests in the background lets its children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def in_small_disk(folder: Path, megabytes: int, code: str) -> str:
    """What a Python process prints whose argument is `folder`, with a disk of this size mounted there."""
    script = f"mount -t tmpfs -o size={megabytes}m none {folder} && exec {sys.executable} -c '{code}' {folder}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def until(happened: Callable[[], Any], seconds: float = 60, pause: float = 0.02) -> None:
    """Waits for it."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"waited {seconds:g} s"
        time.sleep(pause)


def free_port() -> int:
    """A port of loopback that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
