"""Code that a completion wrote, run in a process of its own with limits of time, memory, files and processes.

The limits hold back accidents and reward hacking by an honest model: loops, memory, forks, files outside its folder
of a few megabytes, and, where the kernel allows it, the network. They are no wall against code that means harm: run a
pipeline on code of strangers inside a container.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

MEGABYTE = 2**20
FILE_BYTES = 16 * MEGABYTE
OUTPUT_BYTES = 64 * 1024
CLONE_NEWUSER, CLONE_NEWNET, PR_SET_PDEATHSIG = 0x10000000, 0x40000000, 1


def code_of(text: str) -> str:
    """The last fenced block of Python, or of no language, in the text; the whole text without one."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", text, re.DOTALL)
    return blocks[-1] if blocks else text


def run_python(code: str, stdin: str = "", *, seconds: float, megabytes: int) -> tuple[int, str]:
    """(exit status, standard output, cut at 64 KiB) of a Python program; status -9 where it was killed."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out:
        given.write(stdin.encode())
        given.seek(0)
        # Files, not pipes: whatever the program starts may hold a pipe open and never end.
        process = subprocess.Popen(
            # Isolated: no user site, no environment, no folder of the caller on the path.
            [sys.executable, "-I", "-c", code],
            stdin=given,
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=lambda: _confine(seconds, megabytes),
        )
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        finally:
            # With all that it started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        return status, out.read(OUTPUT_BYTES).decode(errors="replace")


def _confine(seconds: float, megabytes: int) -> None:
    """Limits of the process to be, set after the fork."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux":
        # A reward process that is killed takes the code with it.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.unshare(CLONE_NEWUSER | CLONE_NEWNET)
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: megabytes * MEGABYTE,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    for which, value in limits.items():
        resource.setrlimit(which, (value, value))


def code_passes(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    answer: Sequence[str | None],
    metadata: Sequence[dict[str, Any]],
    seconds: float = 5.0,
    megabytes: int = 512,
    partial: bool = False,
    **_: Any,
) -> list[float | None]:
    """1 where the completion's code passes its tests; else 0. With `partial` the share of tests that pass.

    Tests are `metadata["tests"]`: programs (text) that are run behind the code, or {"input", "output"} for standard
    input and output; without them the column `answer` is one such program. `seconds` and `megabytes` limit each run.
    Without any test the reward does not apply.
    """

    def one(text: str, answer: str | None, meta: dict[str, Any]) -> float | None:
        tests = meta.get("tests") or ([answer] if answer is not None else [])
        if not tests:
            return None
        code, passed = code_of(text), 0
        for test in tests:
            passed += _passes(code, test, seconds, megabytes)
            if passed == 0 and not partial:
                return 0.0
        return passed / len(tests) if partial else float(passed == len(tests))

    return [one(c, a, m) for c, a, m in zip(completions, answer, metadata, strict=True)]


def _passes(code: str, test: str | dict[str, str], seconds: float, megabytes: int) -> bool:
    if isinstance(test, str):
        return run_python(f"{code}\n\n{test}\n", seconds=seconds, megabytes=megabytes)[0] == 0
    status, out = run_python(code, test["input"], seconds=seconds, megabytes=megabytes)
    return status == 0 and out.split() == test["output"].split()
