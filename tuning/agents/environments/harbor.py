"""Tasks of Harbor: the policy works in a shell, then the task's tests give the reward.

    instruction.md, task.toml    the prompt and the settings
    environment/                 a Dockerfile on a plain image of Python, Debian or Ubuntu, and files that it copies
    tests/test.sh                writes /logs/verifier/reward.txt or reward.json
    solution/solve.sh            passes the tests, which `python -m rlhf.tuning.agents.environments.harbor` checks

The format is that of package harbor 0.25, which is not used: it needs Python 3.12, and a container for each episode.
Here each command runs in the sandbox (`rlhf.tuning.rewards.sandbox`), without a network, with the system's programs
and this Python. The work folder is all that lasts from one command to the next; tests and solution are not in the
sandbox before the policy's last turn. A task that needs more is refused.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import math
import posixpath
import re
import shlex
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.tuning.agents.tools.python import ToolError
from rlhf.tuning.rewards.confine import SYSTEM
from rlhf.tuning.rewards.sandbox import refuse_gaps, run_python

LOGS = "/logs/verifier"
PLAIN = re.compile(r"(docker\.io/)?(library/)?(python|debian|ubuntu)(:[\w.-]+)?", re.ASCII)
"""Images with no more than the sandbox has."""
TAKEN = {*(path.split("/")[1] for path in SYSTEM), "dev", "proc", "root", "tmp", "var", "logs", "tests", "solution", ""}
"""Folders at the root that cannot be a work folder."""
UNMET: Mapping[str, tuple[str, ...]] = {
    "": ("steps",),
    "environment": ("gpus", "tpu", "mcp_servers", "healthcheck", "skills_dir", "allowed_hosts"),
    "verifier": ("environment", "collect", "user", "allowed_hosts"),
    "agent": ("user", "allowed_hosts"),
    "solution": (),
}
"""Settings by table that the sandbox does not offer."""

# Unpacks the folders and runs the command. Its output is a file, so that what it leaves running holds no pipe.
PROGRAM = """
import base64, io, json, os, signal, subprocess, sys, tarfile
given = json.load(sys.stdin)
for folder, data in given["folders"].items():
    os.makedirs(folder, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(data))) as tar:
        tar.extractall(folder, filter="tar")
variables = {"PATH": os.path.dirname(sys.executable) + ":/usr/local/bin:/usr/bin:/bin"} | given["variables"]
with open("/sandbox/output", "w+b") as file:
    process = subprocess.Popen(
        given["command"], cwd=given["work"], env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=file,
        stderr=file, start_new_session=True,
    )
    try:
        status = process.wait(given["seconds"])
    except subprocess.TimeoutExpired:
        status = None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    file.seek(0)
    output = file.read(1 << 20).decode(errors="replace")
kept = io.BytesIO()
if not given["results"]:
    with tarfile.open(fileobj=kept, mode="w") as tar:
        tar.add(given["work"], ".")
found = [open(path).read(4096) for path in given["results"] if os.path.isfile(path)]
print(json.dumps([status, output, base64.b64encode(kept.getvalue()).decode(), *found]))
"""


class Refused(ValueError):
    """A task that the sandbox cannot run."""


class Shell:
    """The work folder of a task, and commands in it. Raises Refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings, self._work, self._variables, self._files = opened(folder)

    def run(self, command: Sequence[str], seconds: float, table: str = "", tests: bool = False) -> tuple[Any, ...]:
        """Run a command; return exit status (None past the time), output, and the reward's files.

        table: of further variables, and name of a folder of the task that the command sees.
        tests: whether it is the last command, which writes a reward.
        """
        folders = {f"/{table}": packed([(self.folder / table, ".")])} if table else {}
        name = "verifier" if tests else table
        given = {
            "folders": {self._work: self._files, **folders},
            "variables": self._variables | literal(self.settings, name),
            "command": command,
            "work": self._work,
            "seconds": seconds,
            "results": [f"{LOGS}/reward.json", f"{LOGS}/reward.txt"] if tests else [],
        }
        megabytes = max(2048, int(table_of(self.settings, "environment").get("memory_mb", 0)))
        roots = [path.split("/")[1] for path in (self._work, LOGS, *folders)]
        # Unpacking and packing take time too.
        status, text = run_python(PROGRAM, json.dumps(given), seconds=seconds + 5.0, megabytes=megabytes, folders=roots)
        if status != 0:
            raise ToolError(f"ended beyond {megabytes} MB of memory or 10 MB of files, or its files cannot be read")
        done, output, files, *found = json.loads(text)
        self._files = files or self._files
        return done, output, *found

    def reward(self) -> float:
        """Run the tests. Raises RuntimeError if not exactly one file has a finite number, alone or as `reward`."""
        seconds = float(table_of(self.settings, "verifier").get("timeout_sec", 600.0))
        command = f"mkdir -p {LOGS} /logs/artifacts && bash /tests/test.sh"
        status, output, *found = self.run(["bash", "-c", command], seconds, "tests", tests=True)
        number = math.nan
        with contextlib.suppress(IndexError, ValueError, TypeError, KeyError):
            value = json.loads(found[0])
            number = float(value["reward"] if isinstance(value, Mapping) else value)
        # A program of the policy may have written the second.
        if status is None or len(found) != 1 or not math.isfinite(number):
            end = f"took longer than {seconds:g} s" if status is None else f"expected a reward, found {found}"
            raise RuntimeError(f"tests/test.sh of {self.folder}: {end}; its output ends {output[-200:]!r}")
        return number


class Harbor:
    """A task's shell; the policy's tool is `bash`.

    Args:
        seconds: limit of a command.
    """

    def __init__(self, seconds: float = 8.0) -> None:
        self._seconds = seconds

    def reset(self, harbor: str, sha256: str, most: float) -> None:
        """Begins the task of a folder. Raises ValueError if its files are not those of the record.

        most: the reward of the task's solution, which none exceeds.
        """
        self._most = most
        # Without its own files the sandbox would write into this machine's.
        refuse_gaps("required")
        if digest(Path(harbor)) != sha256:
            raise ValueError(f"the task {harbor} has changed since its record was written: write the records again")
        self._shell = Shell(Path(harbor))

    def bash(self, command: str) -> str:
        """Runs a command of bash in the work folder and returns what it prints.

        Args:
            command: The command. Files in the work folder stay for the next one, variables and processes do not.
        """
        status, output = self._shell.run(["bash", "-c", command], self._seconds)
        if status == 0:
            return str(output)
        raise ToolError(f"{f'exit status {status}' if status else 'ended by the time limit'}\n{output}")

    def get_reward(self) -> float:
        """Runs the tests.

        They gave the solution a reward here, so that a policy whose files hang them, break them or write a larger
        reward gets 0.
        """
        try:
            reward = self._shell.reward()
        except (RuntimeError, ToolError) as error:
            print(f"reward 0: {error}")
            return 0.0
        if reward > self._most:
            print(
                f"reward 0: tests/test.sh of {self._shell.folder} gave {reward:g}, and {self._most:g} to the solution"
            )
            return 0.0
        return reward


def table_of(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table of task.toml; the whole for an empty name. Raises Refused for another value of that name."""
    table = settings.get(name, {}) if name else settings
    if not isinstance(table, Mapping):
        raise Refused(f"task.toml: {name} is {table!r}: expected a table")
    return table


def literal(settings: Mapping[str, Any], table: str) -> dict[str, str]:
    """Return the variables of a table. Raises Refused for one whose value is the host's."""
    variables = {name: str(value) for name, value in table_of(table_of(settings, table), "env").items()}
    for name, value in variables.items():
        if "${" in value:
            raise Refused(f"task.toml: {table}.env.{name} is a variable of the host, {value}")
    return variables


def opened(folder: Path) -> tuple[dict[str, Any], str, dict[str, str], str]:
    """Return (settings, work folder, variables, packed files) of a task. Raises Refused."""
    try:
        settings = tomllib.loads((folder / "task.toml").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"task.toml cannot be read: {error}") from error
    shown = (*SYSTEM, sys.prefix, sys.base_prefix)
    if above := next((path for path in shown if folder.resolve().is_relative_to(Path(path).resolve())), None):
        raise Refused(f"the task is below {above}, which programs in the sandbox read: move it elsewhere")
    for table, names in UNMET.items():
        # Variables too are checked here.
        literal(settings, table)
        if name := next((name for name in names if table_of(settings, table).get(name)), None):
            raise Refused(f"task.toml: {table or 'the task'} has {name}, which the sandbox does not offer")
    environment, there = table_of(settings, "environment"), folder / "environment"
    if table_of(settings, "verifier").get("environment_mode", "shared") != "shared":
        raise Refused("task.toml: verifier.environment_mode is separate, and the tests run where the policy worked")
    if missing := next((name for name in ("instruction.md", "tests/test.sh") if not (folder / name).is_file()), None):
        raise Refused(f"{missing} is missing")
    if (there / ".dockerignore").exists():
        raise Refused("environment/.dockerignore is not read: remove the files that it names, and it")
    if compose := next(there.glob("*compose.y*ml"), None):
        raise Refused(f"environment/{compose.name}: the sandbox has no services")
    if (image := environment.get("docker_image")) is None:
        work, variables, files = built(there)
    else:
        check_image(image, "task.toml: environment.docker_image")
        work, variables, files = "/", {}, [(there, ".")] if there.is_dir() else []
    work = posixpath.normpath(environment.get("workdir") or work)
    if work.lstrip("/").split("/")[0] in TAKEN or not work.startswith("/"):
        raise Refused(f"the work folder is {work}: expected one such as /app, by WORKDIR or environment.workdir")
    if any(Path(prefix).is_relative_to(work) for prefix in (sys.prefix, sys.base_prefix)):
        raise Refused(f"the work folder is {work}, which holds this Python: install the pipeline elsewhere")
    places = [(path, posixpath.relpath(posixpath.join(work, to), work)) for path, to in files]
    if outside := next((path for path, to in places if to.startswith("..")), None):
        raise Refused(f"environment/Dockerfile copies {outside.name} to a place outside of {work}")
    return settings, work, variables | literal(settings, "environment"), packed(places)


def built(folder: Path) -> tuple[str, dict[str, str], list[tuple[Path, str]]]:
    """Return (work folder, variables, files with their places) of a Dockerfile.

    Raises Refused for instructions other than FROM a plain image, WORKDIR, ENV, LABEL, and COPY of the folder's files.
    """
    file = folder / "Dockerfile"
    if not file.is_file():
        raise Refused("environment/Dockerfile is missing, and task.toml has no environment.docker_image")
    work, variables, files = "/", dict[str, str](), list[tuple[Path, str]]()
    text = re.sub(r"^\s*#.*$", "", file.read_text("utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        word, *words = shlex.split(line)
        if "$" in line:
            raise Refused(f"environment/Dockerfile: `{line[:80]}` has a variable: write its value")
        match word.upper(), words:
            case "FROM", [image]:
                check_image(image, "environment/Dockerfile")
            case "WORKDIR", [path]:
                work = posixpath.join(work, path)
            case "ENV", _ if all("=" in each for each in words):
                variables |= dict(each.split("=", 1) for each in words)
            case "COPY", [*sources, to] if sources and not words[0].startswith(("-", "[")):
                files += copied(folder, sources, posixpath.join(work, to))
            case "LABEL", _:
                pass
            case _:
                raise Refused(f"environment/Dockerfile: `{line[:80]}` needs a container")
    return work, variables, files


def copied(folder: Path, sources: Sequence[str], to: str) -> Iterator[tuple[Path, str]]:
    """Yield the files and folders that COPY names, with their places. Raises Refused for a missing one."""
    for source in sources:
        path = (folder / source.lstrip("/")).resolve()
        if not path.exists() or not path.is_relative_to(folder.resolve()):
            raise Refused(f"environment/Dockerfile: COPY {source} names no file of the folder")
        # Of a folder the content is copied.
        into = path.is_file() and (len(sources) > 1 or to.endswith(("/", "/.")))
        yield path, posixpath.join(to, path.name) if into else to


def check_image(image: str, where: str) -> None:
    """Raises Refused for an image that may hold more than the sandbox."""
    if not PLAIN.fullmatch(image):
        raise Refused(f"{where}: the image {image} may hold programs that the sandbox does not have")


def packed(files: Sequence[tuple[Path, str]]) -> str:
    """Return a tar of files and folders at their places, in base64."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for path, to in files:
            tar.add(path, to)
    return base64.b64encode(data.getvalue()).decode()


def digest(folder: Path) -> str:
    """Return a hash of the names, modes and contents of a task's files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    content = [
        (str(path.relative_to(folder)), path.stat().st_mode & 0o111, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in files
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def record(folder: Path) -> dict[str, Any]:
    """Return the record of a task. Raises Refused, also for a task that its own solution does not solve here."""
    shell = Shell(folder)
    if not (folder / "solution" / "solve.sh").is_file():
        raise Refused("solution/solve.sh is missing: without it nothing shows that the tests can run here")
    try:
        shell.run(["bash", "/solution/solve.sh"], 600.0, "solution")
        reward = shell.reward()
    except (RuntimeError, ToolError) as error:
        raise Refused(f"its solution fails here: {error}") from error
    if reward <= 0:
        raise Refused(f"its solution gets the reward {reward:g} here")
    text = re.sub(r"\A((<!--.*canary.*-->|#.*canary.*)?\s*\n)+", "", (folder / "instruction.md").read_text("utf-8"))
    metadata = {"harbor": str(folder), "sha256": digest(folder), "most": reward}
    return {"id": folder.name, "prompt": text.strip(), "metadata": metadata}


def main(folders: Sequence[str]) -> int:
    """Print the records of task folders, and of those in other folders; name the refused ones on standard error."""
    refuse_gaps("required")
    refused = False
    for path in map(Path, folders):
        for task in [path] if (path / "task.toml").is_file() else sorted(p.parent for p in path.glob("*/task.toml")):
            try:
                print(json.dumps(record(task), ensure_ascii=False))
            except ValueError as error:
                refused = True
                print(f"{task} is refused: {error}", file=sys.stderr)
    return int(refused)


ENVIRONMENT = Harbor

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
