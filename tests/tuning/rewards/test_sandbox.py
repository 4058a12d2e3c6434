"""Code of completions: what it may do, what it can reach, what each limit costs, and that only tests are paid for."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid

import pytest

from rlhf.tuning.rewards.answers import runnable
from rlhf.tuning.rewards.failures import Outage
from rlhf.tuning.rewards.processes import evaluate
from rlhf.tuning.rewards.samples import Sample
from rlhf.tuning.rewards.sandbox import code_of, code_passes, gaps, longest_seconds, may_deceive, run_python
from tests.tuning.rewards.left import running

ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
TEST = "assert add(1, 2) == 3"


def passes(text, tests, **options):
    found = code_passes(["p"], [text], answer=[None], metadata=[{"tests": tests}], **options)
    return found[0]


GOOD = "def add(a, b):\n    return a + b\n"
EXAMPLE = "```python\nprint(add(1, 2))\n```"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        *((f"```{name}\n{GOOD}```", True) for name in ("python", "python3", "Python", " python", "py", "", "{.py}")),
        (f"Here it is:\n```python\n{GOOD}", True),
        (f"{GOOD}```", True),
        (f"{GOOD}```\nThis adds them.", True),
        (f"~~~python\n{GOOD}~~~", True),
        ("1. So:\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n", True),
        (f"```python\n{GOOD}```\nFor example:\n{EXAMPLE}", True),
        (f"```python\n{GOOD}```\nIt prints\n```\n3\n```", True),
        (f"```python\ndef add(a, b):\n    return 0\n```\nNo:\n```python\n{GOOD}```", True),
        (f"```python\n{GOOD}```\nNo:\n```python\ndef add(a, b):\n    return 0\n```", False),
        ("```python\ndef add(a, b):\n    r'''\n    ```\n    add(1, 2)\n    ```\n    '''\n    return a + b\n```", True),
        (f"```python\nfrom typing import Any\nadd: Any = lambda a, b: a + b\n```\n{EXAMPLE}", True),
        (f"```python\nadd, sub = (lambda a, b: a + b), 0\n```\n{EXAMPLE}", True),
        (f"<answer>\n{GOOD}</answer>", True),
        (f"<answer>no</answer> or <answer>\n{GOOD}</answer>", True),
        (f"```python\n{GOOD} ```\nThis works.", True),
        ("```py\ndef plus(a, b):\n    return a + b\n```\n```py\ndef add(a, b):\n    return plus(a, b)\n```", True),
        ("```python\nadd = lambda a, b: a + b\n```", True),
        (f"<think>\n```python\n{GOOD}```\n</think>\nI do not know.", False),
        (f"a thought\n```python\nx\n```\n</think>\n```python\n{GOOD}```", True),
        (f"```python\r\n{GOOD}```".replace("\n", "\r\n"), True),
        ("```python3\ndef add(a, b):\n    return a - b\n```", False),
        (GOOD, True),
        ("no code", False),
        (f"```java\nint x;\n```\n```python\n{GOOD}```", True),
    ],
)  # fmt: skip
def test_the_block_that_defines_what_tests_use_is_the_code(text, right):
    scope = {}
    with contextlib.suppress(SyntaxError, NameError):
        exec(code_of(text, [TEST]), scope)
    assert ("add" in scope and scope["add"](1, 2) == 3) == right


def test_the_block_that_defines_the_entry_point_is_the_code():
    text = "```python\nTEN = 10\n\ndef f(x):\n    return x + TEN\n```\nSo:\n```python\nprint(f(2))\n```"
    given = {"tests": ["def check(candidate):\n    assert candidate(2) == 12"], "entry_point": "f"}
    assert code_passes([""], [text], answer=[None], metadata=[given], isolation="best-effort") == [1.0]


def test_the_block_that_reads_input_is_the_program():
    program = "```python\nprint(int(input()) + 1)\n```\nAn example:\n```python\nprint(2 + 1)\n```"
    assert code_of(program, [{"input": "2", "output": "3"}]) == "print(int(input()) + 1)\n"
    assert code_of("```\nx = 1\n```\n```python\nx = 2\n```") == "x = 2\n"


def test_earlier_definitions_are_taken_as_they_are_written():
    long = "def g():  # long\n    return " + "+".join(["1"] * 1500)
    cached = "import functools; x = 1\n@functools.cache\n@str\ndef h(): return 'ä'; pass"
    text = f"```python\n{long}\n{cached}\nprint(h)\n```\nand\n```python\ndef add(a, b): return a + b\n```"
    kept = cached.replace("; x = 1", "")
    assert code_of(text, [TEST]) == f"{long}\n{kept}\ndef add(a, b): return a + b\n"


def test_code_of_any_depth_and_length_is_read():
    assert may_deceive(f"import math\nmath{'.x' * 2000} = 1") and not may_deceive(f"node{'.next' * 2000} = 1")
    many = "".join(f"def f{n}(x): return x\n" for n in range(3000))
    began = time.process_time()
    assert code_of(f"```python\n{many}```\n```python\nf = 1\n```").count("\n") == 3001
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("printed", "expected", "verdict"),
    [
        ("1 / 3, 2.5", "0.333333 2.50", 1.0),
        ("0.3334, 2.5", "0.333333 2.50", 0.0),
        ("1000000001", "1000000000", 0.0),
        ("'nan'", "1.5", 0.0),
        ("7, 7.0", "7.0", 0.0),
        ("10**5000 + 1", "1" + "0" * 4999 + "1", 1.0),
    ],
)
def test_printed_numbers_are_read_as_judges_of_contests_do(printed, expected, verdict):
    assert passes(f"print({printed})", [{"input": "", "output": expected}]) == verdict


def test_code_passes_its_tests_or_a_share_of_them():
    tests = [TEST, "assert add(1, 1) == 3"]
    assert passes(ADD, tests[:1]) == 1.0
    assert passes(ADD, tests, partial=True) == 0.5
    # The first test that fails decides.
    assert passes(ADD, [*tests, "import time; time.sleep(60)"], seconds=60) == 0.0
    assert passes("print(sum(map(int, input().split())))", [{"input": "1 2", "output": "3\n"}]) == 1.0
    assert code_passes(["p"] * 2, [ADD] * 2, answer=["assert add(2, 2) == 4", None], metadata=[{}, {}]) == [1.0, None]


REPLACED = """
import builtins, json, os
def nothing(*a, **k): return None
for name in ("exec", "compile", "abs", "all", "isinstance", "print"):
    setattr(builtins, name, nothing)
builtins.sum = lambda *a: 3
"""
FORGERIES = {
    "the names of its callers": """
import os, sys
def add(a, b):
    frame = sys._getframe()
    while frame := frame.f_back:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if type(value) is int and value not in (a, b):
                return value
    os._exit(0)
""",
    "the constants of its caller": """
import sys
def add(a, b):
    return [c for c in sys._getframe(1).f_code.co_consts if isinstance(c, int)][-1]
""",
    "an object that equals all": """
class E:
    def __eq__(self, other): return True
    __lt__ = __le__ = __bool__ = __contains__ = __ne__ = __eq__
def add(a, b): return E()
""",
    "a number that equals all": """
class E(int):
    def __eq__(self, other): return True
def add(a, b): return E(0)
""",
    "an object that is near all": """
class E:
    def __sub__(self, other): return self
    def __abs__(self): return 0
    def __lt__(self, other): return True
    __rsub__ = __float__ = __int__ = __sub__
def add(a, b): return E()
""",
    "what equals all in the library": "from unittest.mock import ANY\ndef add(a, b): return ANY",
    "a function of the test": """
def add(a, b, test=None):
    return test.__globals__ if test else 0
def near(test): return test.__globals__
""",
}


FORGERIES |= {
    f"it has {line}": f"def add(a, b): return 0\n{line}"
    for line in (
        "abs = lambda x: 0",
        "(abs := lambda x: 0)",
        "try: all = bool\nexcept ValueError: pass",
        "from operator import truth as all",
        "import math; math.isclose = lambda *a, **k: True",
        "import json.decoder\nif True: json.decoder.loads = print",
        "import sys; sys.modules['math'] = None",
        "import unittest; unittest.TestCase.assertEqual = lambda *a: None",
        "import traceback; traceback.StackSummary",
    )
}


@pytest.mark.parametrize("name", FORGERIES)
def test_code_that_can_make_a_test_pass_is_suspect(name):
    assert may_deceive(f"```python\n{FORGERIES[name]}\n```")


def test_usual_code_is_not_suspect():
    assert not may_deceive(ADD) and not may_deceive(f"I use gc and inspect.\n{ADD}")
    assert not may_deceive("import math\ndef f(x):\n    sum = math.pi\n    for id in x: sum += id\n    return sum")
    assert not may_deceive("import sys\nclass Node: pass\nroot = Node()\nroot.next = None\nlimit = sys.maxsize")
    assert not may_deceive("class A:\n    def __init__(self): self.back = 1\n    def __len__(self): return 1")


def test_what_the_code_makes_of_builtins_does_not_reach_the_test():
    assert passes(REPLACED, ["assert sum([1, 1]) == 3"]) == 0.0
    assert passes(REPLACED + GOOD, [f"{TEST}; assert sum([1, 1]) == 2 and abs(-1) == 1"]) == 1.0


NAMES = """
import collections, enum
class Color(enum.Enum):
    RED = 1
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
    def __repr__(self): return f"Node({self.value})"
    def __neg__(self): return Node(-self.value)
Pair = collections.namedtuple("Pair", "a b")
calls = 0
def count():
    global calls
    calls += 1
def pair(): return Pair(1, 2)
def color(): return Color.RED
def append(head, node): head.next = node
def copied(items): return list(items)
async def later(): return 3
def fail(kind): raise kind("no")
"""
USES = """
import asyncio, unittest
count()
assert calls == 1 and pair().a == 1 and color() is Color.RED and asyncio.run(later()) == 3
node = Node(1)
append(node, Node(2))
assert repr(node.next) == "Node(2)" and (-node).value == -1 and node in [node]
class Own(Node): pass
tail = Own(3)
append(node, tail)
assert node.next is tail and copied([1]) == [1]
class Test(unittest.TestCase):
    def test(self):
        with self.assertRaises(KeyError):
            fail(KeyError)
assert unittest.defaultTestLoader.loadTestsFromTestCase(Test).run(unittest.TestResult()).wasSuccessful()
"""


def test_a_test_runs_in_the_names_of_the_code():
    assert passes(NAMES, [USES]) == 1.0
    assert passes(NAMES, [USES.replace("next is tail", "next is node")]) == 0.0
    assert passes("def copied(items): return items", ["a = [1]; assert copied(a) is not a"]) == 0.0


PUBLISHED = {
    "pytest": "import pytest\n\ndef test_add():\n    assert add(1, 2) == 3\n",
    "a class of pytest": "class TestAdd:\n    def test_add(self):\n        assert add(1, 2) == 3\n",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(add(1, 2), 3)\n",
    "HumanEval": "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n",
    "a called check": "def check(candidate):\n    assert candidate(1, 2) == 3\n\ncheck(add)\n",
}
PUBLISHED |= {
    "a class below another": PUBLISHED["unittest"].replace("T(", "Base(").replace("test_a", "helper")
    + "class T(Base):\n    def setUp(self): self.three = 3\n    def test_b(self): assert add(1, 2) == self.three\n",
    "main by its name": f"from unittest import main\n{PUBLISHED['unittest']}main()\n",
    "an assert before main": "import unittest\nif __name__ == '__main__':\n    assert add(1, 2) == 3;unittest.main()\n",
    "a runner of its own": PUBLISHED["unittest"]
    + "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\n",
    "odd ends of lines": "def test_add():\n    assert add(1, 2) == 3, '\x0c\u2028\x85'\n",
}
PUBLISHED["a main program"] = f"{PUBLISHED['unittest']}if __name__ == '__main__':\n    unittest.main()\n"


@pytest.mark.parametrize("form", PUBLISHED)
def test_tests_run_in_each_form_that_data_sets_publish(form):
    test = PUBLISHED[form].replace("import pytest\n", "")
    codes = [GOOD, GOOD.replace("a + b", "a - b")]
    given = {"answer": [None] * 2, "metadata": [{"tests": [test], "entry_point": "add"}] * 2}
    assert code_passes(["p"] * 2, codes, **given) == [1.0, 0.0]


@pytest.mark.parametrize(
    "test",
    [
        "import pytest\n@pytest.mark.parametrize('a,b', [(1, 2)])\ndef test_add(a, b): assert add(a, b) == 3",
        "import math\ndef test_add(tmp_path): assert add(1, 2) == 3",
        "import math\nasync def test_add(): assert add(1, 2) == 3",
        "import math\ndef check(candidate): assert candidate(1, 2) == 3",
        "class TestAdd:\n    def setup_method(self): self.a = 1\n    def test_a(self): assert add(self.a, 2) == 3",
        "import unittest\nunittest.main()",
    ],
)
def test_a_test_that_cannot_be_run_is_refused_before_a_run(test):
    with pytest.raises(ValueError, match="call it|call its tests|metadata.entry_point|no statement that can fail"):
        runnable(test)
    assert passes(GOOD, [test]) == 0.0


def test_code_may_end_as_scripts_do_and_is_tested_all_the_same():
    assert passes("import sys\ndef add(a, b): return a + b\nsys.exit(0)", [TEST]) == 1.0


def test_code_whose_threads_go_on_has_passed_at_once():
    code = f"import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n{GOOD}"
    assert passes(code, [TEST], seconds=30.0) == 1.0


def test_a_test_of_any_length_is_handed_over_or_refused_with_its_code():
    long = "#" * 300_000 + f"\n{TEST}"
    assert passes(ADD, [long]) == 1.0
    # A runner that ends before it has read the test keeps nobody waiting.
    assert passes(ADD, [long], seconds=0.001) == 0.0


def test_all_of_the_output_is_compared():
    code = "print('\\n'.join(map(str, range(20000))))"
    numbers = [str(n) for n in range(20000)]
    assert passes(code, [{"input": "", "output": "\n".join(numbers)}]) == 1.0
    assert passes(code, [{"input": "", "output": "\n".join([*numbers[:-1], "x"])}]) == 0.0


@pytest.mark.parametrize(
    ("extra", "value"), [("#" * 200_000, 1.0), ("\0", 0.0), ("\ud800", 0.0)], ids=["long", "nul", "bad"]
)
def test_any_text_is_code_that_is_right_or_wrong(extra, value):
    assert passes(f"def add(a, b): return a + b\n{extra}", [TEST]) == value


def test_a_program_that_takes_too_long_is_wrong_and_no_failure_of_the_reward():
    tests = ["while True: pass"] * 3
    sample = Sample("p", "x = 1", metadata={"tests": tests})
    # The limit around the call is below those of the program, and gives way.
    arguments = {"seconds": 0.2, "budget_seconds": 0.3, "partial": True}
    (found,) = evaluate("code_passes", arguments, [sample], seconds=0.1, workers=1)
    assert (found.value, found.failure) == (0.0, None)
    assert longest_seconds(budget_seconds=0.3) > 0.3


@pytest.mark.parametrize(
    "code",
    ["while True: pass", "x = bytearray(2**30)", "open('big', 'wb').write(b'0' * 2**26)"],
    ids=["loop", "memory", "disk"],
)
def test_limits(code):
    started = time.monotonic()
    assert run_python(code, seconds=0.5, megabytes=256)[0] != 0
    assert time.monotonic() - started < 5


LOOK = """
import json, os, resource, socket, subprocess, sys
seen = {"environment": sorted(os.environ), "files": [], "written": []}
for path in json.loads(input()):
    try:
        open(path).read()
        seen["files"].append(path)
    except OSError:
        pass
    try:
        open(os.path.join(os.path.dirname(path), "x"), "w")
        seen["written"].append(path)
    except OSError:
        pass
seen["network"] = len(open("/proc/net/dev").readlines()) - 2
seen["processes"] = sorted(int(p) for p in os.listdir("/proc") if p.isdigit())
seen["limited"] = resource.getrlimit(resource.RLIMIT_NPROC)[0] < 1_000_000
subprocess.Popen(["sleep", sys.argv[-1] if len(sys.argv) > 1 else TOKEN], start_new_session=True)
print(json.dumps(seen))
"""


def test_nothing_of_the_caller_is_seen_and_nothing_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_TEST", "x")
    (tmp_path / "answers").write_text("42")
    token = f"60.{uuid.uuid4().int % 10**9:09d}"
    paths = [str(tmp_path / "answers"), f"/proc/{os.getpid()}/environ", os.path.abspath(__file__), os.__file__]
    with socket.create_server(("127.0.0.1", 0)):
        status, out = run_python(LOOK.replace("TOKEN", repr(token)), json.dumps(paths), seconds=5, megabytes=256)
    assert status == 0
    seen = json.loads(out)
    assert "SECRET_OF_THE_TEST" not in seen["environment"] and seen["limited"]
    # It has left the session of the program, and ends with it all the same.
    assert running(token) == []
    if "files" not in "".join(gaps()):
        # Python's own, for reading.
        assert (seen["files"], seen["written"]) == ([os.__file__], [])
    if "network" not in gaps():
        assert seen["network"] <= 1
    if "processes" not in gaps():
        assert max(seen["processes"]) < 10


REFUSED = """
import json, sys
from rlhf.tuning.rewards.sandbox import code_passes, gaps, run_python
look, search = json.load(sys.stdin)
status, out = run_python(look, "[]", seconds=5, megabytes=256)
given = {"answer": ["assert add(1, 2) == 3"] * 3, "metadata": [{}] * 3}
found = code_passes(["p"] * 3, ["exit()", "def add(a, b): return a + b", search], isolation="best-effort", **given)
print(json.dumps([gaps(), status, found]))
code_passes(["p"] * 3, ["x"] * 3, **given)
"""
# Looks for the word among the files of every process that it sees, those of its callers included, and says it.
SEARCHED_ALL = """
import json, os
for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        continue
    for number in numbers:
        try:
            with open(os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                word = json.loads(file.read(1 << 16))["word"]
        except Exception:
            continue
        for told in range(3, 64):
            try:
                os.write(told, word.encode())
            except OSError:
                pass
        os._exit(0)
"""


def test_a_machine_that_refuses_namespaces_is_told_and_strays_end_there_too():
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("this machine gives no user namespace in which others could be refused")
    token = f"60.{uuid.uuid4().int % 10**9:09d}"
    # In a namespace of users that may have none below it, as a root that may do nothing.
    bare = "setpriv --bounding-set=-all --inh-caps=-all"
    shell = f'echo 0 > /proc/sys/user/max_user_namespaces && exec {bare} "$0" -c "$1"'
    given = json.dumps([LOOK.replace("TOKEN", repr(token)), SEARCHED_ALL])
    done = subprocess.run(
        [unshare, "-Ur", "sh", "-c", shell, sys.executable, REFUSED],
        input=given, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert json.loads(done.stdout) == [["network", "files", "processes"], 0, [0.0, 1.0, 0.0]]
    assert f"{Outage.__name__}: on this machine the code of completions can reach: network, files" in done.stderr
    assert running(token) == []


def test_the_sandbox_is_the_same_for_a_user_who_keeps_files_private():
    before = os.umask(0o077)
    try:
        assert gaps.__wrapped__() == gaps()
    finally:
        os.umask(before)
