"""Programs that try to get out of their jail, or to be paid for a test that has not passed."""

import json
import os
import socket
import sys
import time
import uuid

import psutil
import pytest

from tests.support import python
from tuning.rewards.sandbox import gaps, passes_test, run_python

needs_jail = pytest.mark.skipif(bool(gaps()), reason="this machine gives no namespaces")

# Each is a program that has got out where it comes to its end; where it raises, it has not.
ESCAPES = {
    "read passwords": "open('/etc/shadow').read()",
    "read users": "open('/etc/passwd').read()",
    "read a file of the caller": "open(SECRET).read()",
    "list homes": "os.listdir('/home') + os.listdir('/root')",
    "list the caller's folder": "os.listdir(os.path.dirname(SECRET))",
    "write beside Python": "open(os.path.join(os.path.dirname(os.__file__), 'x'), 'w')",
    "write to the environment of Python": "open(sys.prefix + '/x', 'w')",
    "write to the system": "open('/usr/bin/x', 'w')",
    "change times": "os.utime(os.__file__)",
    "hard link": "os.link(os.__file__, '/tmp/link')",
    "symbolic link": "os.symlink(SECRET, '/tmp/s'); open('/tmp/s').read()",
    "parent folders": "open('../' * 20 + SECRET.lstrip('/')).read()",
    "root of process 1": "open('/proc/1/root' + SECRET).read()",
    "memory of process 1": "open('/proc/1/mem', 'rb').read(1)",
    "environment of the caller": "open(f'/proc/{CALLER}/environ').read()",
    "environment of process 1": "open('/proc/1/environ').read()",
    "kernel's memory": "open('/dev/mem', 'rb')",
    "cgroups": "os.listdir('/sys/fs/cgroup')",
    "signal to the caller": "os.kill(CALLER, 0)",
    "tcp over loopback": "socket.create_connection(('127.0.0.1', PORT), 1)",
    "abstract unix socket": "socket.socket(1).connect(ABSTRACT)",
    "unix socket": "socket.socket(1).connect(PLACE)",
    "io_uring": "call(425, 8, ctypes.create_string_buffer(120))",
    "userfaultfd": "call(323, 1)",
    "ptrace of process 1": "call(101, 16, 1, 0, 0)",
    "memory of process 1 by the kernel": "call(310, 1, 0, 0, 0, 0, 0)",
    "descriptor of process 1": "call(438, os.pidfd_open(1), 0, 0)",
    "key ring": "call(250, 0, -3, 1)",
    "a key": "call(248, b'user', b'name', b'text', 4, -3)",
    "the kernel's programs": "call(321, 0, ctypes.create_string_buffer(128), 128)",
    "performance counters": "call(298, ctypes.create_string_buffer(128), 0, -1, -1, 0)",
    "a namespace of users": "call(272, 0x10000000)",
    "namespace of process 1": "call(308, os.open('/proc/1/ns/net', 0), 0)",
    "a file by its handle": "call(304, -100, ctypes.create_string_buffer(64), 0)",
    "memory disk of one's own": "call(165, b'none', b'/tmp', b'tmpfs', 0, None)",
    "another root": "os.chroot('/tmp')",
    "another user": "os.setuid(0)",
    "a packet socket": "socket.socket(17, 3, 0)",
    "netlink": "socket.socket(16, 3, 0)",
    "the machine's name": "socket.sethostname('mine')",
    "a device": "os.mknod('/tmp/d', 0o60600, os.makedev(8, 0))",
    "a setting of the kernel": "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh')",
    "core of the kernel": "open('/proc/kcore', 'rb').read(1)",
    "killing of process 1": "os.kill(1, 9); os.kill(1, 15); time.sleep(0.2); os.kill(1, 0); wall()",
    "more priority": "os.nice(-5)",
    "descriptors of the caller": "[os.fstat(n) for n in range(3, 64) if is_open(n)][1]",
    "memory of nobody": "call(319, b'x', 0)",
    "secret memory of nobody": "call(447, 0)",
    "a segment of System V": "call(29, 0, 4096, 0o1600)",
    "messages of System V": "call(68, 0, 0o1600)",
    "shared memory without a file": "mmap.mmap(-1, 4096)",
    "limits raised": "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))",
    "many files": "[open(f'/tmp/{n}', 'w').close() for n in range(10_000)]",
    "a large disk": "[open(f'/tmp/l{n}', 'wb').write(bytes(8 * 2**20)) for n in range(16)]",
    "a large shared disk": "[open(f'/dev/shm/l{n}', 'wb').write(bytes(8 * 2**20)) for n in range(16)]",
}
TRY = """
import ctypes, json, mmap, os, resource, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if os.uname().machine != "x86_64":
        raise OSError("numbers are those of another machine")
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
def is_open(n):
    try:
        os.fstat(n)
    except OSError:
        return False
    return True
def wall():
    # Process 1 lives on, as it has to.
    raise OSError("refused")
given = json.loads(input())
out = []
names = {**globals(), **given["names"]}
names["ABSTRACT"] = "\\0" + names["ABSTRACT"]
for name, attack in given["escapes"].items():
    try:
        exec(attack, names)
        out.append(name)
    except Exception:
        pass
print(json.dumps(out))
"""


@needs_jail
def test_no_program_gets_out_of_its_jail(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("42")
    os.chmod(secret, 0o644)
    here = f"rlhf-{uuid.uuid4().hex}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as local,
    ):
        abstract.bind(f"\0{here}")
        local.bind(f"{tmp_path}/s")
        abstract.listen()
        local.listen()
        names = {"SECRET": str(secret), "CALLER": os.getpid(), "PORT": server.getsockname()[1]}
        names |= {"ABSTRACT": here, "PLACE": f"{tmp_path}/s"}
        given = {"names": names, "escapes": ESCAPES}
        status, out = run_python(TRY, json.dumps(given), seconds=30, megabytes=512)
    # Reading and writing fail for want of descriptors or disk, which is the wall, too.
    assert (status, json.loads(out or "null")) == (0, [])
    assert secret.read_text() == "42" and sorted(os.listdir(tmp_path)) == ["s", "secret"]


FAKES = {
    "exit": "exit()",
    "os._exit": "import os; os._exit(0)",
    "SystemExit in the function": "def add(a, b): raise SystemExit(0)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)",
    "a signal": "import os, signal\nsignal.signal(15, lambda *a: os._exit(0)); os.kill(os.getpid(), 15)",
    "an alarm": "import os, signal\nsignal.signal(14, lambda *a: os._exit(0)); signal.setitimer(0, 0.01)\n"
    "def add(a, b):\n    while 1: pass",
    "excepthook": "import sys\nsys.excepthook = lambda *a: None",
    "AssertionError": "import builtins\nclass A(Exception): pass\nbuiltins.AssertionError = A",
    "exec": "import builtins\nbuiltins.exec = builtins.compile = builtins.eval = lambda *a, **k: None",
    "output": "print('passed')\nprint('ok')",
    "descriptors": "import os\nfor n in range(3, 64):\n"
    "    try: os.write(n, b'passed' * 8)\n    except OSError: pass\nos._exit(0)",
    "exec of another": "import os, sys\nos.execv('/bin/true', ['true'])",
    "a fork that ends well": "import os\nif os.fork(): os._exit(0)",
}  # fmt: skip


@pytest.mark.parametrize("name", FAKES)
def test_no_program_is_paid_for_a_test_that_has_not_passed(name):
    test = "assert add(1, 2) == 3 and sum([1, 1]) == 2"
    assert not passes_test(FAKES[name], test, seconds=5, megabytes=256)


# Bounded: were the wall down, the machine would carry them.
MANY = """
import os, time
made = 0
for _ in range(200):
    try:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
    except OSError:
        break
    made += 1
print(made)
"""
MEMORY = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(b"x" * (150 * 2**20))
        time.sleep(20)
        os._exit(0)
time.sleep(20)
"""


def test_a_program_has_so_many_processes_and_no_more():
    status, out = run_python(MANY, seconds=10, megabytes=2048)
    if os.geteuid() != 0:
        pytest.skip("the number is that of the user's on the whole machine")
    assert (status, int(out) < 64) == (0, True)


STRAY = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "MARK"])
    os._exit(0)
END
"""


@pytest.mark.parametrize("end", ["time.sleep(0.3)", "os.abort()", "time.sleep(600)", "os.kill(os.getppid(), 9)"])
def test_no_child_outlives_its_program(end):
    """Not by a session of its own and two forks, whether the program ends, crashes, or is out of time."""
    mark = f"rlhf-{uuid.uuid4().hex}"
    run_python(STRAY.replace("MARK", mark).replace("END", end), seconds=1.5, megabytes=256)
    alive = [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]
    assert psutil.wait_procs(alive, timeout=5)[1] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_program_ends_with_a_jail_that_is_killed_also_where_there_are_no_namespaces(tmp_path):
    tmp_path.chmod(0o755)
    token = f"30.{uuid.uuid4().int % 10**9:09d}"
    plan = {
        "command": ["/usr/bin/env", "sleep", token], "environment": {"PATH": os.defpath}, "folder": str(tmp_path),
        "prefixes": [sys.prefix, sys.base_prefix], "seconds": 40.0, "megabytes": 512, "report": None,
    }  # fmt: skip
    program = """
import json, os, sys
from tuning.rewards import confine
confine.enter_namespaces = lambda: ["network", "files", "processes"]
os._exit(confine.main(json.loads(sys.argv[1])))
"""
    process = python(program, json.dumps(plan), cwd=tmp_path)

    def sleepers():
        return [p for p in psutil.process_iter(["cmdline"]) if token in (p.info["cmdline"] or [])[-1:]]

    deadline = time.monotonic() + 60
    while not sleepers() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    left = sleepers()
    assert left, process.communicate()
    process.kill()
    process.communicate()
    assert psutil.wait_procs(left, timeout=10.0)[1] == []


def test_memory_is_counted_for_all_processes_together():
    status, _ = run_python(MEMORY, seconds=15, megabytes=300)
    assert status == 137
