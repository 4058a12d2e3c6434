"""Programs that try to get out of their jail, or to be paid for a test that has not passed."""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from rlhf.tuning.rewards.confine import CALLS
from rlhf.tuning.rewards.sandbox import gaps, passes_test, run_python
from tests.support import python
from tests.tuning.rewards.left import running

needs_jail = pytest.mark.skipif(bool(gaps()), reason="this machine gives no namespaces")

# Numbers of system calls, on x86-64 and aarch64.
NUMBERS = {
    "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "pidfd_getfd": (438, 438), "keyctl": (250, 219), "add_key": (248, 217), "bpf": (321, 280), "mount": (165, 40),
    "perf_event_open": (298, 241), "unshare": (272, 97), "setns": (308, 268), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "mq_open": (240, 180), "inotify_init1": (294, 26), "cachestat": (451, 451),
}  # fmt: skip
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
    "memory of process 1": "os.pread(os.open('/proc/1/mem', 0), 1, int(open('/proc/1/maps').read().split('-')[0], 16))",
    "environment of the caller": "open(f'/proc/{CALLER}/environ').read()",
    "environment of process 1": "open('/proc/1/environ').read()",
    "kernel's memory": "open('/dev/mem', 'rb')",
    "cgroups": "os.listdir('/sys/fs/cgroup')",
    "signal to the caller": "os.kill(CALLER, 0)",
    "tcp over loopback": "socket.create_connection(('127.0.0.1', PORT), 1)",
    "abstract unix socket": "socket.socket(1).connect(ABSTRACT)",
    "unix socket": "socket.socket(1).connect(PLACE)",
    "io_uring": "call('io_uring_setup', 8, ctypes.create_string_buffer(120))",
    "userfaultfd": "call('userfaultfd', 1)",
    "ptrace of process 1": "call('ptrace', 0x4206, 1, 0, 0)",
    "memory of process 1 by the kernel": "call('process_vm_readv', 1, 0, 0, 0, 0, 0)",
    "descriptor of process 1": "call('pidfd_getfd', os.pidfd_open(1), 0, 0)",
    "key ring": "call('keyctl', 0, -3, 1)",
    "a key": "call('add_key', b'user', b'name', b'text', 4, -3)",
    "the kernel's programs": "call('bpf', 0, struct.pack('IIII', 2, 4, 8, 1).ljust(64, b'\\0'), 64)",
    "performance counters": "call('perf_event_open', struct.pack('IIQ', 1, 64, 0).ljust(64, b'\\0'), 0, -1, -1, 0)",
    "a namespace": "call('unshare', 0x04000000)",
    "namespace of process 1": "call('setns', os.open('/proc/1/ns/net', 0), 0)",
    "a file by its handle": "handle = ctypes.create_string_buffer(struct.pack('I', 128), 136); "
    "call('name_to_handle_at', -100, HERE, handle, ctypes.create_string_buffer(8), 0); "
    "call('open_by_handle_at', os.open(HERE, 0), handle, 0)",
    "memory disk of one's own": "call('mount', b'none', b'/tmp', b'tmpfs', 0, None)",
    "another root": "os.chroot('/tmp')",
    "another user": "os.setuid(0)",
    "a packet socket": "socket.socket(17, 3, 0)",
    "netlink": "socket.socket(16, 3, 0)",
    "the machine's name": "socket.sethostname('mine')",
    "a device": "os.mknod('/tmp/d', 0o60600, os.makedev(8, 0))",
    "a setting of the kernel": "p = '/proc/sys/kernel/core_pattern'; t = open(p).read(); open(p, 'w').write(t)",
    "core of the kernel": "open('/proc/kcore', 'rb').read(1)",
    "more priority": "os.nice(-5)",
    "descriptors of the caller": "[os.fstat(n) for n in range(3, 64) if is_open(n)][1]",
    "memory of nobody": "call('memfd_create', b'x', 0)",
    "secret memory of nobody": "call('memfd_secret', 0)",
    "a segment of System V": "call('shmget', 0, 4096, 0o1600)",
    "messages of System V": "call('msgget', 0, 0o1600)",
    "shared memory without a file": "mmap.mmap(-1, 4096)",
    "shared memory of a device": "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 4096, mmap.MAP_SHARED)",
    "a queue of POSIX": "call('mq_open', b'q', 0o102, 0o600, 0)",
    "large buffers of sockets": "socket.socketpair()[0].setsockopt(1, 7, 1 << 20)",
    "notifications of files": "call('inotify_init1', 0)",
    "attributes of files": "open('/tmp/x', 'w'); os.setxattr('/tmp/x', 'user.x', bytes(100))",
    "a call that is newer than the list": "call('cachestat', os.open(os.__file__, 0), bytes(16), bytes(40), 0)",
    "a place behind the trainer": "open('/proc/self/oom_score_adj', 'w').write('0')",
    "limits of process 1": "resource.prlimit(1, resource.RLIMIT_NOFILE)",
    "limits raised": "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))",
    "many files": "[open(f'/tmp/{n}', 'w').close() for n in range(10_000)]",
    "a large disk": "[open(f'/tmp/l{n}', 'wb').write(bytes(8 * 2**20)) for n in range(16)]",
    "a large shared disk": "[open(f'/dev/shm/l{n}', 'wb').write(bytes(8 * 2**20)) for n in range(16)]",
}
TRY = """
import ctypes, json, mmap, os, resource, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    # Of full width: the last argument is on the stack.
    whole = [ctypes.c_long(one) if isinstance(one, int) else one for one in (given["numbers"][name], *arguments)]
    if libc.syscall(*whole) < 0:
        raise OSError(ctypes.get_errno(), "refused")
def is_open(n):
    try:
        os.fstat(n)
    except OSError:
        return False
    return True
given = json.loads(input())
out = []
names = {**globals(), **given["names"]}
names["ABSTRACT"] = "\\0" + names["ABSTRACT"]
names["HERE"] = os.path.dirname(names["SECRET"]).encode()
for name, attack in given["escapes"].items():
    # One that gets out does not open the door for the next.
    if (pid := os.fork()) == 0:
        try:
            exec(attack, names)
        except BaseException:
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1] == 0:
        out.append(name)
print(json.dumps(out))
"""


@pytest.fixture
def attack(tmp_path):
    """The input of TRY, with a secret, ports and sockets of the caller that it tries to reach."""
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
        numbers = {name: both[platform.machine() == "aarch64"] for name, both in NUMBERS.items()}
        yield {"names": names, "escapes": ESCAPES, "numbers": numbers}
    assert secret.read_text() == "42" and {"s", "secret"} <= set(os.listdir(tmp_path))


@needs_jail
def test_no_program_gets_out_of_its_jail(attack):
    status, out = run_python(TRY, json.dumps(attack), seconds=60, megabytes=512)
    assert (status, json.loads(out or "null")) == (0, [])


# A root of its own over the machine's: escapes write to real places, which are gone with their mount.
OUTSIDE = """
cd "$0" && mkdir up work root && mount --make-rprivate / &&
mount -t overlay -o lowerdir=/,upperdir=up,workdir=work overlay root && mount -t proc proc root/proc &&
mount --rbind /dev root/dev && mount -t tmpfs none root/dev/shm && mount --rbind /sys root/sys &&
mkdir -p "root$0" && mount --bind "$0" "root$0" && "$1" root "$2" -I -c "$3" 7</dev/null 8</dev/null; echo $?
"""
NOT_EVERYWHERE = {"kernel's memory", "core of the kernel", "io_uring", "userfaultfd", "secret memory of nobody"}
"""Escapes for which a kernel or a machine may have no door."""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root has all of these doors")
def test_each_escape_gets_out_where_there_is_no_jail(tmp_path, attack):
    """An attack that fails outside too, for a wrong argument or number, says nothing of the jail."""
    attack["names"]["CALLER"] = 1
    shell = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "sh", "-c", OUTSIDE, str(tmp_path)]
    done = subprocess.run(
        [*shell, shutil.which("chroot"), sys.executable, TRY], input=json.dumps(attack), capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    out, _, status = done.stdout.rstrip().rpartition("\n")
    if status == "32":
        pytest.skip(f"no mount here: {done.stderr}")
    assert status == "0", done.stderr
    assert set(ESCAPES) - set(json.loads(out)) <= NOT_EVERYWHERE


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 0), ("aarch64", 1)])
def test_the_calls_of_escapes_are_on_no_list(machine, number):
    """This machine tries those of one list alone."""
    _, watched, numbers = CALLS[machine]
    ranges = [(first, last or first) for first, _, last in (text.partition("-") for text in numbers.split())]
    allowed = [(int(first), int(last)) for first, last in ranges]
    assert [pair for pair in allowed if pair[0] > pair[1]] == [] and allowed == sorted(allowed)
    open_ = {call for first, last in allowed for call in range(first, last + 1)}
    assert open_.isdisjoint({both[number] for both in NUMBERS.values()} | {watched[1]})


FAKES = {
    "exit": "exit()",
    "os._exit": "import os; os._exit(0)",
    "SystemExit in the function": "def add(a, b): raise SystemExit(0)",
    "os._exit in the function": "import os\ndef add(a, b): os._exit(0)",
    "the test's text": "def add(a, b):\n    return 3 if open(__file__).read().count('as' 'sert') else 0",
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
    assert psutil.wait_procs(running(mark), timeout=5)[1] == []


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
from rlhf.tuning.rewards import confine
confine.enter_namespaces = lambda: ["network", "files", "processes"]
os._exit(confine.main(json.loads(sys.argv[1])))
"""
    process = python(program, json.dumps(plan), cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not running(token) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    left = running(token)
    assert left, process.communicate()
    process.kill()
    process.communicate()
    assert psutil.wait_procs(left, timeout=10.0)[1] == []


SOCKETS = """
import os, socket, time
for _ in range(40):
    if os.fork() == 0:
        pairs = [socket.socketpair() for _ in range(29)]
        for one in (end for pair in pairs for end in pair):
            one.setblocking(False)
            try:
                while one.send(bytes(65536)):
                    pass
            except BlockingIOError:
                pass
        time.sleep(20)
        os._exit(0)
time.sleep(20)
"""


@pytest.mark.parametrize("program", [MEMORY, SOCKETS], ids=["pages", "buffers of sockets"])
def test_memory_is_counted_for_all_processes_together(program):
    started = time.monotonic()
    status, _ = run_python(program, seconds=15, megabytes=300)
    assert (status, time.monotonic() - started < 12) == (137, True)


def test_a_program_ends_before_the_trainer_where_memory_runs_out():
    status, out = run_python("print(open('/proc/self/oom_score_adj').read())", seconds=10, megabytes=256)
    assert (status, int(out)) == (0, 1000)


def test_what_usual_programs_need_is_allowed():
    program = """
import asyncio, concurrent.futures, json, mmap, multiprocessing, subprocess, sys, tempfile, threading
async def late():
    await asyncio.sleep(0.01)
    return 1
if __name__ == "__main__":
    found = [asyncio.run(late()), len(open("/dev/zero", "rb").read(9))]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found.append(sum(pool.map(abs, range(3))))
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        found.append(pool.submit(abs, -4).result())
    found.append(int(subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True).stdout))
    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        found.append(len(mmap.mmap(file.fileno(), 4096)))
    print(found)
"""
    assert run_python(program, seconds=30, megabytes=512) == (0, "[1, 9, 3, 4, 5, 4096]\n")


@needs_jail
def test_process_1_outlives_the_signals_of_its_program():
    program = """
import contextlib, os, time
for signal in (9, 15):
    with contextlib.suppress(PermissionError):
        os.kill(1, signal)
time.sleep(0.2)
print("alive")
"""
    assert run_python(program, seconds=10, megabytes=256) == (0, "alive\n")
