"""Code of completions: what it may do, and what each limit costs."""

import os
import time

import psutil
import pytest

from tuning.rewards.sandbox import code_of, code_passes, run_python

ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


def passes(text, tests, **options):
    found = code_passes(["p"], [text], answer=[None], metadata=[{"tests": tests}], **options)
    return found[0]


def test_the_last_block_of_python_is_the_code():
    assert code_of("```\nx = 1\n```\n```python\nx = 2\n```") == "x = 2\n"
    assert code_of("x = 3") == "x = 3"


def test_code_passes_its_tests_or_a_share_of_them():
    tests = ["assert add(1, 2) == 3", "assert add(1, 1) == 3"]
    assert passes(ADD, tests[:1]) == 1.0
    assert passes(ADD, tests) == 0.0
    assert passes(ADD, tests, partial=True) == 0.5
    assert passes("print(sum(map(int, input().split())))", [{"input": "1 2", "output": "3\n"}]) == 1.0
    assert code_passes(["p"] * 2, [ADD] * 2, answer=["assert add(2, 2) == 4", None], metadata=[{}, {}]) == [1.0, None]


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "x = bytearray(2**30)",
        "open('big', 'wb').write(b'0' * 2**26)",
        "import socket; socket.create_connection(('127.0.0.1', PORT), timeout=1)",
    ],
    ids=["loop", "memory", "disk", "network"],
)
def test_limits(code):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        code = code.replace("PORT", str(server.getsockname()[1]))
        if "socket" in code and not hidden_network():
            pytest.skip("this kernel lets no process leave the network without privileges")
        started = time.monotonic()
        assert run_python(code, seconds=1.0, megabytes=256)[0] != 0
        assert time.monotonic() - started < 3


def hidden_network():
    """Whether the program sees no network but its own loopback: two lines of titles, one of `lo`."""
    status, out = run_python("print(len(open('/proc/net/dev').readlines()))", seconds=5, megabytes=256)
    return status == 0 and int(out) <= 3


def test_nothing_of_the_caller_is_seen_and_nothing_stays(tmp_path):
    os.environ["SECRET_OF_THE_TEST"] = "x"
    code = "import os, subprocess; print(os.environ.get('SECRET_OF_THE_TEST'), os.getcwd()); "
    code += "print(subprocess.Popen(['sleep', '60']).pid)"
    status, out = run_python(code, seconds=5, megabytes=256)
    assert status == 0 and out.startswith("None ")
    (folder, pid) = out.split()[1:]
    assert not os.path.exists(folder)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
