"""Runs one program in a world of its own: a script, started by `tuning.rewards.sandbox` in an isolated Python.

    this script      new namespaces; waits for `init` and kills it after the time limit
      init           process 1 of a new process namespace: a private root folder; what outlives it, the kernel kills
        program      limits of memory, processor time, files and processes; no privileges

The root has the system's libraries and Python's, for reading, and a small memory disk to write on: no home folder, no
data, no other processes, no network. Where the kernel gives no such namespaces the program runs without, and what is
missing is told; strays are then found as descendants of this script. It imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys

# Each test of a completion starts this script: modules that only name types would double the time that it takes.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

MEGABYTE = 2**20
FILE_BYTES = 16 * MEGABYTE
"""Largest file that the program can write, its output included."""
DISK_BYTES = 64 * MEGABYTE
"""All that it can write, where it has a disk of its own."""
PROCESSES = 64
"""Processes and threads that it may add to those of the machine."""
KILLED = 128 + signal.SIGKILL

# From <linux/sched.h>, <linux/mount.h> and <linux/prctl.h>; the standard library has no names for them.
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY, ATTR_NOSUID = 442, -100, 0x8000, 1, 2

# What Python and its libraries need of the system. No folder of people or of their data.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/nix/store")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    given = None if options is None else options.encode()
    _checked(_libc.mount(*texts, ctypes.c_ulong(flags), given), f"mount {target}")


def _read_only(target: str) -> None:
    """Makes a mount, and all below it, readable alone."""
    attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY | ATTR_NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    place = (ctypes.c_int(AT_FDCWD), target.encode(), ctypes.c_uint(AT_RECURSIVE))
    _checked(_libc.syscall(SYS_MOUNT_SETATTR, *place, ctypes.byref(attributes), size), f"read-only {target}")


def _die_with_parent() -> None:
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def enter_namespaces() -> list[str]:
    """Leaves the caller's network, processes and mounts; returns what could not be left."""
    if sys.platform != "linux":
        return ["network", "files", "processes"]
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC) != 0:
        return ["network", "files", "processes"]
    # An id other than 0: what is executed then has no privileges, not even in the new namespaces.
    maps = {"setgroups": "deny", "uid_map": f"1000 {uid} 1", "gid_map": f"1000 {gid} 1"}
    try:
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        return ["files"]
    return []


def private_root(folder: str, prefixes: list[str]) -> None:
    """Makes a root folder of its own, with the files of `folder` in the current one. Raises OSError.

    prefixes: folders of Python, readable in it.
    """
    root = f"{folder}/root"
    os.mkdir(root)
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={DISK_BYTES},nr_inodes=4096,mode=755")
    seen: list[str] = []
    for path in [*SYSTEM, *DEVICES, *prefixes]:
        # A prefix such as /usr/local is there already.
        if os.path.exists(path) and not any(path == s or path.startswith(f"{s}/") for s in seen):
            seen.append(path)
            _show(path, root + path)
    for name in ("proc", "tmp", "sandbox", "dev/shm"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    # Containers may refuse it, and few programs miss it.
    with contextlib.suppress(OSError):
        _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV)
    for name in os.listdir(folder):
        if name != "root":
            with open(f"{folder}/{name}", "rb") as source, open(f"{root}/sandbox/{name}", "wb") as copy:
                copy.write(source.read())
    os.chroot(root)
    os.chdir("/sandbox")


def _show(path: str, target: str) -> None:
    """Makes a file or folder of the system readable at `target`."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        open(target, "w").close()
    _mount(path, target, None, MS_BIND | MS_REC)
    # Writing to a device is not writing to its file.
    if path not in DEVICES:
        _read_only(target)


def _limit(seconds: float, megabytes: int) -> None:
    limits = {
        # Whole seconds only; the wall-clock limit comes first unless the program has threads.
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: megabytes * MEGABYTE,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    if sys.platform == "linux":
        with open("/proc/loadavg") as file:
            # Kernels count those of the user on the whole machine or in the namespace; this bounds both.
            there = int(file.read().split()[3].partition("/")[2])
        limits[resource.RLIMIT_NPROC] = there + PROCESSES
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (most, most))


def _child(work: Callable[[], int]) -> int:
    """The id of a new process that does `work` and ends with the status that it returns."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _die_with_parent()
            status = work()
        finally:
            os._exit(status)
    return pid


def _status(pid: int) -> int:
    """Waits for a child, and for any other that ends meanwhile; its exit status, or 128 + the signal."""
    while True:
        found, status = os.wait()
        if found == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _program(plan: dict[str, Any]) -> NoReturn:
    if sys.platform == "linux":
        _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _limit(plan["seconds"], plan["megabytes"])
    here = os.getcwd()
    os.execve(plan["command"][0], plan["command"], {**plan["environment"], "HOME": here, "TMPDIR": here})


def _end_strays() -> None:
    """Ends what the program has left running; orphans have come to this process."""
    for _ in range(1000):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
            for pid in map(int, file.read().split()):
                os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def main(plan: dict[str, Any]) -> int:
    """Runs the program of a plan; returns its exit status, KILLED past its time."""
    _die_with_parent()
    missing = enter_namespaces()
    alone = "processes" not in missing
    if not alone and sys.platform == "linux":
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def init() -> int:
        if "files" not in missing:
            try:
                private_root(plan["folder"], plan["prefixes"])
            except OSError as error:
                missing.append(f"files ({error.strerror})")
        # Before the program runs: it cannot speak for this process.
        if plan["report"] is not None:
            os.write(plan["report"], json.dumps(missing).encode())
            os.close(plan["report"])
        return _status(_child(lambda: _program(plan))) if alone else _program(plan)

    pid = _child(init)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, plan["seconds"])
    status = _status(pid)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if not alone and sys.platform == "linux":
        _end_strays()
    return status


if __name__ == "__main__":
    os._exit(main(json.loads(sys.argv[1])))
