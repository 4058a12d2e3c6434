"""Code from a completion, run in a process of its own with limits of time, memory and file size.

The limits stop accidents and plain reward hacking: endless loops, large allocations, large files, children that outlive
the program and, where the kernel allows it, the network. They are no security boundary: the code can read and write
what the user can. Run a pipeline whose prompts or models are not trusted inside a container.
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
"""Largest file that the code can write, its output included."""
OUTPUT_BYTES = 64 * 1024
"""How much of its output is compared."""
# From <linux/sched.h> and <linux/prctl.h>; the standard library has no names for them.
CLONE_NEWUSER, CLONE_NEWNET, PR_SET_PDEATHSIG = 0x10000000, 0x40000000, 1


def code_of(text: str) -> str:
    """The last fenced block of Python, or of no language, in the text; the whole text without one."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", text, re.DOTALL)
    return blocks[-1] if blocks else text


def run_python(code: str, stdin: str = "", *, seconds: float, megabytes: int) -> tuple[int, str]:
    """(exit status, first 64 KiB of standard output) of a Python program; status -9 where it was killed."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as out:
        source.write(stdin.encode())
        source.seek(0)
        # Files, not pipes: a child of the program may hold a pipe open, and reading to its end would block.
        process = subprocess.Popen(
            # Isolated: no user site, no environment, no folder of the caller on the path.
            [sys.executable, "-I", "-c", code],
            stdin=source,
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
            # The session is a process group of its own: this also ends children that stayed in it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        return status, out.read(OUTPUT_BYTES).decode(errors="replace")


def _confine(seconds: float, megabytes: int) -> None:
    """Limits the new process, between fork and exec."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux":
        # A reward process that is killed takes this process with it.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # A network namespace without interfaces; an unprivileged user needs a new user namespace for it. Errors are
        # ignored, as many containers forbid both.
        libc.unshare(CLONE_NEWUSER | CLONE_NEWNET)
    limits = {
        # Whole seconds only; the wall-clock limit comes first unless the parent is dead or the program has threads.
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
    budget_seconds: float = 60.0,
    megabytes: int = 512,
    partial: bool = False,
    **_: Any,
) -> list[float | None]:
    """1 where the completion's code passes its tests; else 0. With `partial` the share of tests that pass.

    Tests are `metadata["tests"]`: programs (text) that run after the code in the same file, or {"input", "output"} for
    standard input and output; without them the column `answer` is one such program. `seconds` and `megabytes` limit
    each run. Without any test the reward does not apply.
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


def longest_seconds(*, budget_seconds: float = 60.0, **_: Any) -> float:
    """Longest that the tests of one completion take: their budget, and some time to start and clean up."""
    return budget_seconds + 10.0


def _passes(code: str, test: str | dict[str, str], seconds: float, megabytes: int) -> bool:
    if isinstance(test, str):
        return run_python(f"{code}\n\n{test}\n", seconds=seconds, megabytes=megabytes)[0] == 0
    status, out = run_python(code, test["input"], seconds=seconds, megabytes=megabytes)
    # As judges of programming contests do: only the tokens count, not the white space.
    return status == 0 and out.split() == test["output"].split()
