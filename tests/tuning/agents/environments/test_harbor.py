"""Task folders of Harbor are played in the sandbox, or refused by name."""

import json
import subprocess
import sys

import pytest

from rlhf.tuning.agents import adapters
from rlhf.tuning.agents.contract import Fault, Spec, Task
from rlhf.tuning.agents.environments import harbor
from rlhf.tuning.agents.processes import Environments
from tests.support import write_files

HELLO = {
    "task.toml": 'schema_version = "1.4"\n[verifier]\ntimeout_sec = 20.0\n[environment]\nmemory_mb = 512\n',
    "instruction.md": "<!-- harbor-canary GUID 1 -->\n\nWrite `Hello, world!` to hello.txt in the current folder.\n",
    "environment/Dockerfile": "# A comment\nFROM ubuntu:24.04\n\nWORKDIR /app\n",
    "tests/test.sh": "#!/bin/bash\nif [ \"$(cat hello.txt)\" = 'Hello, world!' ]; then echo 1; else echo 0; fi "
    "> /logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/bash\necho 'Hello, world!' > hello.txt\n",
}
MEDIAN = {
    "task.toml": 'schema_version = "1.4"\n[verifier.env]\nEXPECTED = "3"\n',
    "instruction.md": "Write the median of given/numbers.txt to median.txt.\n",
    "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /data\nENV UNIT=metres LEVEL=2\n"
    "COPY numbers.txt \\\n  given/\nCOPY . /data/all\n",
    "environment/numbers.txt": "5\n1\n3\n",
    "tests/test.sh": "python3 /tests/check.py\n",
    "tests/check.py": "import json, os, pathlib\n"
    "found = pathlib.Path('median.txt')\n"
    "right = found.exists() and found.read_text().strip() == os.environ['EXPECTED']\n"
    "rewards = {'reward': 0.75 * right + 0.25 * os.path.exists('all/Dockerfile'), 'exists': int(found.exists())}\n"
    "pathlib.Path('/logs/verifier/reward.json').write_text(json.dumps(rewards))\n",
    "solution/solve.sh": "python3 - <<END\nimport statistics\nnumbers = map(int, open('given/numbers.txt'))\n"
    "open('median.txt', 'w').write(str(statistics.median(numbers)))\nEND\n",
}


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with both tasks, and the current one."""
    monkeypatch.chdir(tmp_path)
    for name, files in (("hello", HELLO), ("median", MEDIAN)):
        write_files(tmp_path / "tasks" / name, **files)
    return tmp_path / "tasks"


def rows():
    """Each record's columns, as an episode gets them."""
    command = [sys.executable, "-m", "rlhf.tuning.agents.environments.harbor", "tasks"]
    done = subprocess.run(command, capture_output=True, text=True)
    records = {record["id"]: record for record in map(json.loads, done.stdout.splitlines())}
    return done, {name: {"prompt": record["prompt"], **record["metadata"]} for name, record in records.items()}


def call(command):
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


def begun(row):
    environment = adapters.make(Spec("harbor"))
    assert environment.reset(seed=0, row=row) == (None, {"joins_prompt": True})

    def bash(command):
        messages, _, terminated, _, _ = environment.step(call(command))
        assert not terminated
        return messages[0]["content"]

    return environment, bash


def test_tasks_are_played_with_a_shell_and_rewarded_by_their_tests(tasks):
    done, found = rows()
    assert done.returncode == 0, done.stderr
    assert found["hello"]["prompt"] == "Write `Hello, world!` to hello.txt in the current folder."
    environment, bash = begun(found["hello"])
    assert bash("pwd; echo 'Hello, world!' > hello.txt").strip() == "/app"
    assert bash("cat hello.txt; false") == "error: exit status 1\nHello, world!\n"
    assert environment.step("Done.")[1:4] == (1.0, True, False)
    environment, bash = begun(found["median"])
    assert bash("echo $UNIT $LEVEL; ls; cat given/numbers.txt").split() == [
        "metres",
        "2",
        "all",
        "given",
        "5",
        "1",
        "3",
    ]
    # Cut before its last turn.
    assert environment.finish()[1:4] == (0.25, False, True)
    bash("echo 3 > median.txt")
    assert environment.finish()[1:4] == (1.0, False, True)


def test_commands_see_neither_tests_nor_solution_nor_the_folder_of_the_task(tasks):
    environment, bash = begun(rows()[1]["hello"])
    look = (
        f"ls /tests /solution /logs/verifier {tasks}; grep -rl 'Hello, world!' / --include=*.sh 2>/dev/null; env; pwd"
    )
    seen = bash(look)
    assert seen.count("No such file") == 4 and ".sh" not in seen.replace("/app", "")
    assert "EXPECTED" not in begun(rows()[1]["median"])[1]("env")
    # Nothing that a command leaves running lasts, and the folder outlives a command that is killed.
    environment, bash = begun(rows()[1]["hello"])
    assert bash("(sleep 300; echo late > hello.txt) & echo kept > kept.txt; echo begun") == "begun\n"
    assert bash("ls; pgrep sleep").split()[-1] == "kept.txt"
    environment._inner._environment._seconds = 0.5
    assert bash("echo more > more.txt; sleep 300") == "error: ended by the time limit\n"
    assert "MB of files" in bash("head -c 15000000 /dev/urandom > large")
    assert bash("ls").split() == ["kept.txt", "more.txt"]
    assert environment.step("Done.")[1] == 0.0


def test_an_environment_that_fails_gives_no_reward(tasks):
    found = rows()[1]
    with Environments(Spec("harbor")) as environments:

        def failed(name):
            environments.open(name, Task(0, found[name]))
            [(_, answer)] = environments.poll(60)
            if isinstance(answer, Fault):
                return answer.message
            environments.step(name, "Done.")
            [(_, answer)] = environments.poll(60)
            return answer.message if isinstance(answer, Fault) else answer.reward

        assert [schema["function"]["name"] for schema in environments.schemas()] == ["bash"]
        assert failed("hello") == 0.0
        (tasks / "hello" / "instruction.md").write_text("Another.")
        assert "has changed since its record was written" in failed("hello")
        # What the policy's files may do to tests that the solution has passed.
        for text in (
            "echo lost >&2",
            "echo one > /logs/verifier/reward.txt",
            "echo NaN > /logs/verifier/reward.txt",
            "sleep 60",
            "echo 1000000 > /logs/verifier/reward.txt",
            "echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json",
        ):
            (tasks / "median" / "tests" / "test.sh").write_text(text)
            (tasks / "median" / "task.toml").write_text("[verifier]\ntimeout_sec = 1\n")
            found["median"]["sha256"] = harbor.digest(tasks / "median")
            assert failed("median") == 0.0
            if "000" not in text:
                with pytest.raises(harbor.Refused, match="its solution fails here"):
                    harbor.record(tasks / "median")


REFUSED = {
    "environment/Dockerfile": {
        "FROM python:3.12-slim\nWORKDIR /app\nRUN apt-get install -y curl": "`RUN apt-get .*` needs a",
        "FROM ghcr.io/team/tools:1\nWORKDIR /app": "image ghcr.io/team/tools:1 may hold programs",
        "FROM python:3.12-slim": "the work folder is /: expected one such as /app",
        "FROM ubuntu\nWORKDIR /usr/src": "the work folder is /usr/src",
        # The second where this checkout is below /tmp or /root.
        f"FROM ubuntu\nWORKDIR {sys.prefix}/..": "which holds this Python|: expected one such as /app",
        "FROM ubuntu\nENV APP=/app\nWORKDIR $APP": "has a variable: write its value",
        "FROM ubuntu\nWORKDIR /app\nCOPY no.txt .": "COPY no.txt names no file",
        "FROM ubuntu\nWORKDIR /app\nCOPY ../tests .": "COPY ../tests names no file",
        "FROM ubuntu\nWORKDIR /app\nCOPY . /etc/": "to a place outside of /app",
        "FROM ubuntu\nWORKDIR /app\nCOPY --from=uv /uv /app/": "`COPY --from=uv.*` needs a container",
    },
    "environment/.dockerignore": {"*.txt": "environment/.dockerignore is not read"},
    "environment/docker-compose.yaml": {"services: {}": "environment/docker-compose.yaml: the sandbox has no services"},
    "task.toml": {
        "[environment]\ngpus = 1": "environment has gpus",
        "[environment.env]\nKEY = '${KEY}'": "environment.env.KEY is a variable of the host",
        "[environment]\ndocker_image = 'team/image'": "the image team/image",
        "[verifier]\nenvironment_mode = 'separate'": "environment_mode is separate",
        "[[steps]]\nname = 'one'": "the task has steps",
        "agent = 1": "agent is 1: expected a table",
        "[": "task.toml cannot be read",
    },
    "solution/solve.sh": {"true": "its solution gets the reward 0 here"},
    "tests/test.sh": {"curl -LsSf https://example.org | sh": r"its solution fails here: .*found \[\]; .*curl"},
}


@pytest.mark.parametrize("file", REFUSED)
def test_a_task_that_needs_more_than_the_sandbox_is_refused_by_name(tasks, file):
    before = (tasks / "hello" / file).read_text() if (tasks / "hello" / file).exists() else None
    for text, reason in REFUSED[file].items():
        (tasks / "hello" / file).write_text(text)
        with pytest.raises(harbor.Refused, match=reason):
            harbor.record(tasks / "hello")
    done, found = rows()
    assert done.returncode == 1 and done.stderr.startswith("tasks/hello is refused: ") and list(found) == ["median"]
    if before is not None:
        (tasks / "hello" / file).write_text(before)
        harbor.record(tasks / "hello")


def test_a_task_with_a_plain_image_starts_with_the_files_of_its_environment(tasks):
    (tasks / "median" / "environment" / "Dockerfile").unlink()
    image = '[environment]\ndocker_image = "python:3.13-slim"\nworkdir = "/app"\n'
    with (tasks / "median" / "task.toml").open("a") as file:
        file.write(image)
    environment, bash = begun(harbor.record(tasks / "hello")["metadata"])
    harbor_row = {"harbor": "tasks/median", "sha256": harbor.digest(tasks / "median"), "most": 1.0}
    assert begun(harbor_row)[1]("pwd; ls").split() == ["/app", "numbers.txt"]
