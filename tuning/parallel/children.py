"""Child processes that end with their owner: environment variables, death, orphans, memory, exit status."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from rlhf.tuning.allowed import PASS

_NAMES = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "CUDA_VISIBLE_DEVICES", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),
    *("NLTK_DATA", "RLHF_ALLOW_CODE", "RLHF_ALLOW_KEYS", PASS),
}
_PREFIXES = ("LC_", "XDG_")
# Children share the cores: threads of numeric libraries would compete, and do not survive a fork. Sets of text have the
# same order in each child.
_FIXED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
# From <linux/prctl.h>.
_PDEATHSIG, _CHILD_SUBREAPER = 1, 36
VICTIM = 500
"""`oom_score_adj` of a child: the kernel ends it before the process that trains."""


def clean_environment() -> dict[str, str]:
    """Return the variables that children get: none that may hold a secret, unless RLHF_PASS_VARIABLES names it."""
    passed = {name.strip() for name in os.environ.get(PASS, "").split(",")}
    names = _NAMES | passed
    kept = {n: v for n, v in os.environ.items() if {n, n.upper()} & names or n.startswith(_PREFIXES)}
    # Proxies may have a user and a password in their address.
    for name in (n for n in kept if n.upper().endswith("_PROXY") and n not in passed):
        kept[name] = re.sub(r"^([^/]*//)?.*@", r"\1", kept[name])
    return kept | _FIXED


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def adopt_orphans() -> None:
    """Make orphans below this process its children, so that it can end them. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)


def become_child(parent: int) -> None:
    """Make this forked process lead a session, adopt orphans, die with its parent, and die first if memory runs out."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        adopt_orphans()
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(VICTIM))
    if os.getppid() != parent:
        os._exit(1)


def kill(pid: int) -> None:
    """Kill a process and its group, which it leads unless it is only starting."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            send(pid, signal.SIGKILL)


def kill_orphans(spare: Collection[int] = ()) -> None:
    """Kill the children of this process except `spare`, and the children that it inherits from them. Linux only."""
    for _ in range(100):
        orphans = [pid for pid in _children() if pid not in spare]
        for pid in orphans:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if not orphans:
            return


def _children() -> list[int]:
    """Return the children of this process. Linux only."""
    if sys.platform != "linux":
        return []
    own = os.getpid()
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{own}/children").read_text().split()]
    # Some kernels lack that file. After the name in `stat`, which may hold anything: the state, and the parent.
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == own:
                found.append(int(name))
    return found


def status_of(name: str) -> int:
    """Return a number of /proc/self/status, such as VmData in KiB or Threads; 0 without /proc."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        return next((int(line.split()[1]) for line in file if line.startswith(f"{name}:")), 0)
    return 0


@contextlib.contextmanager
def memory_limit(kibibytes: int) -> Iterator[None]:
    """Limit the data of this process: a larger allocation raises MemoryError. Linux only."""
    if sys.platform != "linux":
        yield
        return
    import resource

    # Data, not address space: libraries reserve far more addresses than they use. The soft limit alone can be lifted.
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = kibibytes * 1024 if hard == resource.RLIM_INFINITY else min(kibibytes * 1024, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def ending(status: int) -> str:
    """Describe the end of a process by its status as `subprocess` gives it."""
    if status >= 0:
        return f"status {status}"
    with contextlib.suppress(ValueError):
        return f"signal {-status}, {signal.Signals(-status).name}"
    return f"signal {-status}"
