"""Runs one program in a world of its own: a script, started by `rlhf.tuning.rewards.sandbox` in an isolated Python.

    this script      new namespaces; waits for `init` and kills it after the time limit
      init           process 1 of a new process namespace: a private root folder; the kernel kills processes that
                     outlive it; ends all if they take too much memory together
        program      limits of processor time, memory, files and processes; nobody's, without privileges; system calls
                     that programs do not need are refused

The root has the system's libraries and Python's, for reading, and a small memory disk to write on: no home folder, no
data, no other processes, no network. Where the kernel gives no such namespaces the program runs without, and names
those that are missing; strays are then found as descendants of this script. It imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import struct
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
FIRST_VICTIM = 1000
"""`oom_score_adj`: the kernel ends these processes first where memory runs out."""
KILLED = 128 + signal.SIGKILL
LOOK_SECONDS = 0.1
"""Between two looks at the memory of all processes together."""
FIRST_USER = 0x60000000
"""Root's programs run as users from here on, each as one of its own, of whom the machine knows nothing."""

# From <linux/sched.h>, <linux/mount.h> and <linux/prctl.h>; the standard library has no names for them.
NEWNS, NEWUTS, NEWIPC, NEWUSER = 0x00020000, 0x04000000, 0x08000000, 0x10000000
NEWPID, NEWNET, NEWCGROUP = 0x20000000, 0x40000000, 0x02000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 36, 38
LAST_CAPABILITY = 63
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY, ATTR_NOSUID = 442, -100, 0x8000, 1, 2

# What Python and its libraries need of the system. No folder of people or of their data.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/nix/store")
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")
ZEROS = 65536
"""Bytes of /dev/zero, here a file: a shared mapping of the device is memory that is charged to no process."""

# By machine: its name in <linux/audit.h>; `clone`, `clone3`, `mmap`, `socket` and `prlimit64`; and the
# numbers of system calls that are allowed (<asm/unistd_64.h>, <asm-generic/unistd.h>). Not among them: mounts,
# namespaces, tracing, other processes' memory, keys, modules, clocks, swap, the kernel's programs and rings, attributes
# and notifications of files; System V's and POSIX's queues, memfd_create and memfd_secret, whose memory belongs to no
# process; setsockopt, which enlarges buffers.
CALLS = {
    "x86_64": (0xC000003E, (56, 435, 9, 41, 302), """
        0-28 32-53 55-63 72-100 102 104-133 137-138 140-152 157-158 160 186-187 191-196 200-205 213
        217-219 221-226 228-235 247 257-271 273-277 280-293 295-297 299 307 309 314-316 318 322 324-332
        334 424 434 436-437 439 441 449 452
    """),
    "aarch64": (0xC00000B7, (220, 435, 222, 198, 261), """
        8-13 17 19-25 29 32-38 43-50 52-57 59 61-74 76-80 82-88 90-91 93-96 98-103 107-111 113-115
        118-141 143-160 163-169 172-179 199-207 209-216 221-223 226-233 240 242-243 260 269 274-276 278
        281 283-291 293 424 434 436-437 439 441 449 452
    """),
}  # fmt: skip
LAST_KNOWN = 450
"""Calls with higher numbers do not exist, as far as the program learns: the C library then uses older ones."""
SHARED_ANONYMOUS = 0x21
"""Flags of `mmap` for shared memory without a file: pages that a process drops stay, and no process is charged."""
FAMILIES = (1, 2, 10)
"""Sockets that may be made: AF_UNIX, AF_INET and AF_INET6, which a network namespace holds. AF_VSOCK leaves it."""
SOCKET_BYTES = 212_992
"""Buffer of a socket (net.core.wmem_default), which is memory of the kernel; the watch charges it in full."""

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
    own = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP
    # Root needs no namespace of users: it gives up what it is (`_leave_privileges`), which one would only rename.
    if uid == 0 and _libc.unshare(own) == 0:
        return []
    if _libc.unshare(NEWUSER | own) != 0:
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


def private_root(folder: str, prefixes: list[str], folders: list[str]) -> None:
    """Makes a root folder of its own, with the files of `folder` in the current one. Raises OSError.

    prefixes: folders of Python, readable in it. folders: names of further folders at the root to write in.
    """
    root = f"{folder}/root"
    # Another user passes through the folders that are made here.
    os.umask(0o022)
    os.mkdir(root)
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={DISK_BYTES},nr_inodes=4096,mode=755")
    seen: list[str] = []
    for path in [*SYSTEM, *DEVICES, *prefixes]:
        # A prefix such as /usr/local is there already.
        if os.path.exists(path) and not any(path == s or path.startswith(f"{s}/") for s in seen):
            seen.append(path)
            _show(path, root + path)
    for name in ("proc", "tmp", "sandbox", "dev/shm", *folders):
        os.makedirs(f"{root}/{name}", exist_ok=True)
        os.chmod(f"{root}/{name}", 0o1777)
    with open(f"{root}/dev/zero", "wb") as file:
        file.write(bytes(ZEROS))
    # Containers may refuse it, and few programs miss it. For reading: settings of the kernel are files there.
    with contextlib.suppress(OSError):
        _mount("proc", f"{root}/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name in os.listdir(folder):
        if name != "root":
            with open(f"{folder}/{name}", "rb") as source, open(f"{root}/sandbox/{name}", "wb") as copy:
                copy.write(source.read())
                os.fchmod(copy.fileno(), 0o644)
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


def _leave_privileges(user: int) -> None:
    """Gives up what this process may do beyond any other of the machine; root becomes `user`."""
    for capability in range(LAST_CAPABILITY + 1):
        # Of what is executed; those that the kernel does not have it refuses.
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if os.geteuid() == 0:
        # The root of a namespace that has no other users is anyone outside, and has no capabilities from here on.
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)


def filtered_calls() -> bool:
    """Allow this process and its children only the system calls of `CALLS`, and no new privileges.

    Returns False if the kernel or the machine has no such filter. The filter is a classic BPF program over `struct
    seccomp_data` (seccomp(2)): number at offset 0, machine at 4, arguments from 16.
    """
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    known = CALLS.get(platform.machine())
    if sys.platform != "linux" or known is None:
        return False
    machine, (clone, clone3, mmap, socket, prlimit), allowed = known
    load, equal, above, least, masked, keep, give = 0x20, 0x15, 0x25, 0x35, 0x45, 0x54, 0x06
    allow, kill, eperm, enosys, eafnosupport = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026, 0x00050061
    yes, no = (give, 0, 0, allow), (give, 0, 0, eperm)
    program = [(load, 0, 0, 4), (equal, 1, 0, machine), (give, 0, 0, kill), (load, 0, 0, 0)]
    # Its flags are behind a pointer; the C library then takes `clone`.
    program += [(equal, 0, 1, clone3), (give, 0, 0, enosys)]
    spaces = NEWNS | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | NEWCGROUP
    program += [(equal, 0, 4, clone), (load, 0, 0, 16), (masked, 0, 1, spaces), no, yes]
    program += [(equal, 0, 5, mmap), (load, 0, 0, 40), (keep, 0, 0, SHARED_ANONYMOUS)]
    program += [(equal, 0, 1, SHARED_ANONYMOUS), no, yes]
    # Limits of this process alone: process 1 keeps its own.
    program += [(equal, 0, 4, prlimit), (load, 0, 0, 16), (equal, 0, 1, 0), yes, no]
    program += [(equal, 0, 2 + 2 * len(FAMILIES), socket), (load, 0, 0, 16)]
    for family in FAMILIES:
        program += [(equal, 0, 1, family), yes]
    program += [(give, 0, 0, eafnosupport)]
    for numbers in allowed.split():
        first, _, last = numbers.partition("-")
        program += [(least, 0, 2, int(first)), (above, 1, 0, int(last or first)), yes]
    # Among the higher numbers are those of the x32 calling convention.
    program += [(above, 0, 1, LAST_KNOWN), (give, 0, 0, enosys), no]
    packed = b"".join(struct.pack("HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    whole = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    return int(_libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(whole), 0, 0)) == 0


def _memory() -> int:
    """Bytes of memory that all processes of this namespace take, as /proc has them; 0 where it is not there."""
    pages = sockets = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{name}/statm") as file:
                    pages += int(file.read().split()[1])
                sockets += sum(_sockets(f"/proc/{name}/task/{task}/fd") for task in os.listdir(f"/proc/{name}/task"))
    return pages * resource.getpagesize() + sockets * SOCKET_BYTES


def _sockets(folder: str) -> int:
    """The number of sockets among the descriptors of a thread, which may have its own."""
    count = 0
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            count += os.readlink(f"{folder}/{name}").startswith("socket:")
    return count


def _watch_memory(megabytes: int) -> None:
    """From here on ends everything in this namespace of processes that takes more memory together."""

    # Of this process, which has no part in it.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def look(*_: object) -> None:
        if _memory() - own > megabytes * MEGABYTE:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)


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
        # Kernels count those of the user on the whole machine or in the namespace; this bounds both. Without /proc a
        # number that a machine's user seldom has.
        there = 4096
        with contextlib.suppress(OSError), open("/proc/loadavg") as file:
            there = int(file.read().split()[3].partition("/")[2])
        # A user of its own has no others.
        limits[resource.RLIMIT_NPROC] = PROCESSES if os.geteuid() == 0 else there + PROCESSES
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
    _limit(plan["seconds"], plan["megabytes"])
    here = os.getcwd()
    if sys.platform == "linux":
        parent = os.getppid()
        _leave_privileges(plan["user"])
        # Another user's process has forgotten it.
        _die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        filtered_calls()
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
    # All of the jail ends before the process that trains, and nothing in it can take that back: its /proc is read-only.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(FIRST_VICTIM))
    plan["user"] = FIRST_USER + os.getpid()
    missing = enter_namespaces()
    alone = "processes" not in missing
    if not alone and sys.platform == "linux":
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def init() -> int:
        if "files" not in missing:
            try:
                private_root(plan["folder"], plan["prefixes"], plan["folders"])
            except OSError as error:
                missing.append(f"files ({error.strerror})")
        # Before the program runs: it cannot speak for this process.
        if plan["report"] is not None:
            # Tried in a process of its own: nothing takes a filter off again.
            if sys.platform == "linux" and _status(_child(lambda: 0 if filtered_calls() else 1)):
                missing.append("system calls")
            if alone and not _memory():
                missing.append("memory of many processes")
            os.write(plan["report"], json.dumps(missing).encode())
            os.close(plan["report"])
        if not alone:
            _program(plan)
        program = _child(lambda: _program(plan))
        _watch_memory(plan["megabytes"])
        return _status(program)

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
