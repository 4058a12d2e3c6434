"""Code from a completion, run with limits in a world of its own (`rlhf.tuning.rewards.confine`), and a reward for it.

On Linux with namespaces the code sees no network, no files but Python's and the system's, and no processes but its
own, of which none outlives it; it is nobody's, and calls of the kernel that programs do not need are refused. Where a
machine refuses that (many containers do), `gaps` says what the code can reach, and none is run unless the caller says
so; limits of time, memory, file size and number of processes hold on each Unix. The kernel is shared: for code that
means harm, run the pipeline in a virtual machine.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import io
import json
import math
import os
import re
import secrets
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from rlhf.tuning.allowed import NotAllowed, check_isolation
from rlhf.tuning.parallel.children import kill
from rlhf.tuning.python_syntax import parse
from rlhf.tuning.rewards import confine
from rlhf.tuning.rewards.answers import runnable, tests_of
from rlhf.tuning.rewards.failures import Outage
from rlhf.tuning.rewards.texts import begun, spoken

Isolation = Literal["required", "best-effort"]
"""Whether code runs on machines where it can reach something."""
START_SECONDS = 10.0
"""Time that a run may take beyond its limit, to start and to clean up."""

# Runs the code, then the test in its names. Only a test that has come to its end writes the word. The pipe with both is
# drained before the code runs, and all that is used after the code is bound, so that changed builtins and modules reach
# neither this program nor the test.
RUNNER = """
import builtins, json, os, sys

def main(run=exec, write=os.write, leave=os._exit, end=SystemExit):
    given, passed = map(int, sys.argv[1:])
    own = dict(vars(builtins))
    with os.fdopen(given, "rb") as file:
        task = json.load(file)
    with open("main.py", "rb") as file:
        code = file.read()
    test, word = compile(task["test"], "test.py", "exec"), task["word"].encode()
    code = compile(code, "main.py", "exec")
    del sys.argv[1:]
    sys.orig_argv[:] = sys.argv[:]
    scope = {"__name__": "__main__", "__file__": "main.py", "__builtins__": builtins}
    try:
        run(code, scope)
    except end:
        # A script may end so; its definitions are tested all the same.
        pass
    scope["__builtins__"] = own
    run(test, scope)
    write(passed, word)
    # Threads of the code may go on.
    leave(0)

main()
"""
_DECEIVES = re.compile(
    r"_getframe|currentframe|\bf_(back|locals|globals|code)\b|\b(tb|gi|cr)_frame\b|__globals__|__closure__|co_consts"
    r"|\b(gc|inspect|ctypes|mock|traceback|setattr|TestCase|TestResult)\b|set(trace|profile)|_current_frames|/proc/self"
    r"|sys\.modules|__(r?sub|abs|eq|ne|lt|le|gt|ge|contains|hash|instancecheck|getattribute|dict)__"
)
"""Names of frames, memory and comparisons: code can read in them what a test expects, or equal anything."""

_FENCE = re.compile(r"^[ \t]*(?:```+|~~~+)([^\n`]*)$", re.MULTILINE)
_READS_INPUT = re.compile(r"\binput\(|\bstdin\b|\bopen\(0\b")


def code_of(text: str, tests: Sequence[Any] = ()) -> str:
    """The code of a completion, after its thoughts: a fenced block of Python, or of no language; else the whole text.

    Of several blocks it is the last that defines a name which the `tests` use, or, for tests of input and output, the
    last that reads input: examples may come after it. Functions, classes and imports of earlier blocks come before it.
    A block may lack its end; an end without a start belongs to code that the prompt has begun.
    """
    text = spoken(text).replace("\r\n", "\n")
    named = {name for test in tests if isinstance(test, str) for name in re.findall(r"\w+", test)}
    blocks = _blocks(text)
    if not blocks:
        return re.split("</?answer>", text.rpartition("<answer>")[2])[0]
    chosen = len(blocks) - 1
    for number, block in enumerate(blocks):
        if named & _defined(block) if named else _READS_INPUT.search(block):
            chosen = number
    earlier = [text for block in blocks[:chosen] for text in _definitions(block)]
    return "\n".join([*earlier, blocks[chosen]])


def _blocks(text: str) -> list[str]:
    """The blocks of Python, or without any those of no language."""
    fences = list(_FENCE.finditer(text))
    if len(fences) % 2 and not fences[0][1].strip() and _statements(text[: fences[0].start()], _WORKS):
        return [text[: fences[0].start()]]
    pairs: list[tuple[re.Match[str], int]] = []
    start: re.Match[str] | None = None
    for fence in fences:
        # One that is indented further, as in a docstring, belongs to the block.
        if start and _indent(fence) <= max(3, _indent(start)):
            pairs.append((start, fence.start()))
            start = fence if fence[1].strip() else None
        elif not start:
            start = fence
    found: dict[bool, list[str]] = {True: [], False: []}
    for opened, end in [*pairs, (start, len(text))] if start else pairs:
        language = opened[1].strip().lower().strip("{.}")
        if not language or language.startswith("py"):
            found[bool(language)].append(textwrap.dedent(text[opened.end() + 1 : end]))
    return found[True] or found[False]


def _indent(fence: re.Match[str]) -> int:
    return len(fence[0]) - len(fence[0].lstrip())


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_WORKS = (*_DEFINITIONS, ast.Assign, ast.AnnAssign, ast.For, ast.While, ast.If)


def _statements(code: str, kinds: tuple[type[ast.stmt], ...]) -> list[ast.stmt]:
    """The statements of these kinds at the top of a program; none of a text that is not Python."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return [node for node in parse(code).body if isinstance(node, kinds)]
    # Text with a null character, or nested too deep, is a ValueError or worse.
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []


def _definitions(code: str) -> Iterator[str]:
    """The text of each function, class and import at the top of a program, with its decorators."""
    # Not `ast.unparse`, which recurses, or `ast.get_source_segment`, which splits the program for each statement.
    lines = [line.encode(errors="surrogatepass") for line in io.StringIO(code, newline=None)]
    for node in _statements(code, _DEFINITIONS):
        first: Any = next(iter(getattr(node, "decorator_list", ())), node)
        last = (node.end_lineno or 0) - 1
        # The decorator's sign is before its expression.
        start = 0 if first is not node else node.col_offset
        part = b"".join([*lines[first.lineno - 1 : last], lines[last][: node.end_col_offset]])
        yield part[start:].decode()


def _defined(code: str) -> set[str]:
    """The names that a program defines at its top."""
    names = set()
    for node in _statements(code, _WORKS):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        parts = [part for target in targets for part in getattr(target, "elts", [target])]
        names |= {getattr(part, "name", getattr(part, "id", "")) for part in parts}
    return names


def run_python(
    code: str, stdin: str = "", *, seconds: float, megabytes: int, folders: Sequence[str] = ()
) -> tuple[int, str]:
    """(exit status, standard output) of a Python program; status 137 where it was killed.

    folders: names of folders at the root that it may write in, besides its own.
    """
    with tempfile.TemporaryFile() as out:
        status = _run(["main.py"], code, stdin, out, seconds, megabytes, folders=folders)
        out.seek(0)
        return status, out.read().decode(errors="replace")


def passes_test(code: str, test: str, *, seconds: float, megabytes: int) -> bool:
    """Whether `test`, run after the code and in its names, comes to its end without an error.

    Code or a test that ends the program before that has not passed.
    """
    word = secrets.token_hex(16)
    task = json.dumps({"test": test, "word": word}).encode()
    with tempfile.TemporaryFile() as passed, tempfile.TemporaryFile() as out, _handed_over(task) as given:
        arguments = ["-c", RUNNER, str(given), str(passed.fileno())]
        status = _run(arguments, code, "", out, seconds, megabytes, keep=(given, passed.fileno()))
        passed.seek(0)
        return status == 0 and passed.read() == word.encode()


def may_deceive(completion: str) -> bool:
    """Whether the code of a completion has means to pass a test that it fails: such names, or a builtin of its own."""
    code = code_of(completion)
    return _DECEIVES.search(code) is not None or _replaces(code)


def _replaces(code: str) -> bool:
    """Whether a program, outside of its functions and classes, gives a builtin or a name of a module another value."""
    modules: set[str] = set()
    names: list[str] = []
    left: list[ast.AST] = list(_statements(code, (ast.stmt,)))
    for node in left:
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
            modules |= set(bound)
            names += bound if isinstance(node, ast.ImportFrom) else []
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
            continue
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            inner: Any = node
            while isinstance(inner, ast.Attribute):
                inner = inner.value
            names += ["print"] if getattr(inner, "id", "") in modules else []
        left += ast.iter_child_nodes(node)
    return not set(names).isdisjoint(vars(builtins))


@contextlib.contextmanager
def _handed_over(data: bytes) -> Iterator[int]:
    """The end of a pipe from which the data can be read once: a file would be there for others to read again."""
    end, start = os.pipe()

    def write() -> None:
        # Whoever was to read it may have ended.
        with contextlib.suppress(BrokenPipeError), os.fdopen(start, "wb") as pipe:
            pipe.write(data)

    # A pipe holds 64 KiB: what is more is written as it is read.
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield end
    finally:
        os.close(end)
        writer.join()


@functools.cache
def gaps() -> tuple[str, ...]:
    """The parts of this machine that the code can reach: `network`, `files`, `processes`, `system calls`, `memory of
    many
    processes`; empty where it is kept from all.

    Raises Outage where no program runs.
    """
    with tempfile.TemporaryFile() as report, tempfile.TemporaryFile() as out:
        status = _run(["main.py"], "print('ran')", "", out, 60.0, 256, report=report.fileno())
        report.seek(0)
        out.seek(0)
        if status != 0 or out.read() != b"ran\n":
            raise Outage(f"no program runs in the sandbox (status {status}): can other users read {sys.prefix}?")
        return tuple(json.loads(report.read() or b'["network", "files", "processes"]'))


def refuse_gaps(isolation: Isolation) -> None:
    """Raises Outage where code is to be kept from this machine and is not. Also where no program runs."""
    try:
        check_isolation(isolation)
    except NotAllowed as error:
        raise Outage(str(error)) from error
    found = gaps()
    if isolation == "required" and found:
        raise Outage(
            f"on this machine the code of completions can reach: {', '.join(found)}. Allow namespaces (Docker: "
            "--security-opt seccomp=unconfined for a user, --cap-add SYS_ADMIN for root; Kubernetes: the same in the "
            "securityContext), or, in a container without secrets and network, say `isolation: best-effort` among the "
            "arguments"
        )


def _run(
    arguments: Sequence[str],
    code: str,
    stdin: str,
    out: BinaryIO,
    seconds: float,
    megabytes: int,
    keep: Sequence[int] = (),
    report: int | None = None,
    folders: Sequence[str] = (),
) -> int:
    """The exit status of a Python with these arguments, in a folder with the code as main.py."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as source:
        # Text of a model may hold what is no UTF-8; Python then refuses the file, and the code has failed.
        (Path(folder) / "main.py").write_bytes(code.encode(errors="surrogatepass"))
        source.write(stdin.encode(errors="replace"))
        source.seek(0)
        plan = {
            # Isolated: no user site, no environment, no folder of the caller on the path.
            # Integers are printed whatever their length.
            "command": [sys.executable, "-I", "-X", "int_max_str_digits=0", *arguments],
            "environment": {"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1"},
            "folder": folder,
            "prefixes": sorted({sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))}),
            "seconds": seconds,
            "megabytes": megabytes,
            "report": report,
            "folders": folders,
        }
        # Files, not pipes: a child of the program may hold a pipe open, and reading to its end would block.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", confine.__file__, json.dumps(plan)],
            stdin=source,
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            pass_fds=[*keep, *([] if report is None else [report])],
            start_new_session=True,
        )
        try:
            return process.wait(timeout=seconds + START_SECONDS)
        except subprocess.TimeoutExpired:
            return confine.KILLED
        finally:
            # The session is a process group of its own.
            kill(process.pid)
            process.wait()


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
    isolation: Isolation = "required",
    **_: Any,
) -> list[float | None]:
    """1 where the completion's code passes its tests; else 0. With `partial` the share of tests that pass.

    Tests are `metadata["tests"]`: programs (text) that run after the code in its names (`runnable`; a function `check`
    gets the name in `metadata["entry_point"]`), or {"input", "output"} for standard input and output. Without them the
    answer is one such program, or each of a list of answers. Without any test the reward does not apply. A test that
    runs for longer than `seconds`, takes more than `megabytes` or ends the program has failed; so have those that
    `budget_seconds` for all tests of a completion leaves no time for.
    `isolation: required` raises an Outage on a machine where the code can reach something (`gaps`); `best-effort` runs
    it there.
    """
    refuse_gaps(isolation)

    def one(text: str, answer: str | None, meta: dict[str, Any]) -> float | None:
        tests = tests_of(answer, meta)
        if not tests:
            return None
        code = code_of(begun(text, meta), [*tests, meta.get("entry_point")])
        passed, deadline = 0, time.monotonic() + budget_seconds
        for test in tests:
            left = deadline - time.monotonic()
            good = left > 0 and _passes(code, test, meta.get("entry_point"), min(seconds, left), megabytes)
            if not good and not partial:
                return 0.0
            passed += good
        return passed / len(tests)

    return [one(c, a, m) for c, a, m in zip(completions, answer, metadata, strict=True)]


def longest_seconds(*, budget_seconds: float = 60.0, **_: Any) -> float:
    """Longest that the tests of one completion take: their budget, and the end of the last run."""
    return budget_seconds + 2 * START_SECONDS


def _passes(code: str, test: str | dict[str, str], entry_point: str | None, seconds: float, megabytes: int) -> bool:
    if isinstance(test, str):
        try:
            program = runnable(test, entry_point)
        # Data is refused for such a test before a run.
        except (SyntaxError, ValueError):
            return False
        return passes_test(code, program, seconds=seconds, megabytes=megabytes)
    status, out = run_python(code, test["input"], seconds=seconds, megabytes=megabytes)
    # As judges of programming contests do: only the tokens count, not the white space.
    said, expected = out.split(), test["output"].split()
    return status == 0 and len(said) == len(expected) and all(map(_same_token, said, expected))


def _same_token(said: str, expected: str) -> bool:
    """Whether a program prints what is expected, of a number with a decimal point to 1e-6."""
    try:
        return said == expected or (
            "." in expected and math.isclose(float(said), float(expected), rel_tol=1e-6, abs_tol=1e-6)
        )
    except ValueError:
        return False
