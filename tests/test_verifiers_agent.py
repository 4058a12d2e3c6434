"""An environment of the package verifiers is played unchanged by the example's program."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

from tests.pages import ROOT

PROGRAM = ROOT / "examples" / "verifiers_agent.py"
TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Task(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def long(self, trace) -> float:
        return float(len(trace.last_reply or "") > 0)

class Words(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        words = ("abc", "step", "turn", "word")
        return [Task(Data(prompt=f"Reverse {word}.", answer=word[::-1]), self.config.task) for word in words]

__all__ = ["Words"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the program's files, and a Python for verifiers, whose pins contradict ours."""
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "words.py").write_text(TASKSET)
    (folder / "vf.txt").write_text("verifiers==0.4.0\n")
    (folder / "vf.toml").write_text(
        'taskset = {id = "words"}\nagent = {harness = {id = "null"}, runtime = {type = "subprocess"}}\n'
    )
    uv = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder / "uv", "uv"]
    install = [folder / "uv" / "bin" / "uv", "pip", "install", "--quiet", "--python", folder / "vf" / "bin" / "python"]
    for command in (uv, [sys.executable, "-m", "venv", folder / "vf"], [*install, "-r", folder / "vf.txt", "uv"]):
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("verifiers cannot be installed")
    return folder


def run(folder, *words, **variables):
    command = [folder / "vf" / "bin" / "python", PROGRAM, *words]
    env = os.environ | {"PYTHONPATH": str(folder)} | variables
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1200)


@pytest.mark.slow
def test_the_recipe_of_the_program_trains_on_an_environment_of_verifiers(rlhf, folder):
    done = run(folder, "vf.toml", "vf.txt", "5")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["prompt"] for record in records][:2] == ["Reverse abc.", "Reverse step."]
    assert "cba" not in done.stdout
    (folder / "tasks.jsonl").write_text(done.stdout)
    recipe = re.search(r"^    name: verifiers\n(?:    .+\n)+", PROGRAM.read_text(), re.MULTILINE)
    assert recipe is not None
    (folder / "verifiers.yaml").write_text(textwrap.dedent(recipe[0]))
    (folder / PROGRAM.name).write_text(PROGRAM.read_text())
    sets = ("rl.rounds=1", "evaluate=null", "data.heldout_fraction=0", "environment.episode_seconds=1800")
    words = [word for value in sets for word in ("--set", value)]
    # uv gets the certificates of this machine.
    variables = {"RLHF_PASS_VARIABLES": "SSL_CERT_FILE,PYTHONPATH", "PYTHONPATH": f"{ROOT / 'src'}:{folder}"}
    rlhf("run", "verifiers.yaml", "--no-prefect", *words, cwd=folder, env=os.environ | variables)
    assert "failed" not in rlhf("episodes", cwd=folder).stdout


@pytest.mark.slow
def test_another_version_another_task_and_code_next_to_the_answers_are_refused(folder):
    (folder / "other.txt").write_text("verifiers==0.3.1\n")
    assert "has verifiers==0.3.1, and 0.4.0 is installed" in run(folder, "vf.toml", "other.txt", "1").stderr
    (folder / "bash.toml").write_text('taskset = {id = "words"}\nagent = {runtime = {type = "subprocess"}}\n')
    assert "the harness bash of agent runs commands of the policy" in run(folder, "bash.toml", "vf.txt", "1").stderr
    task = {"RLHF_TASK": json.dumps({"index": 1, "key": "another", "seed": 3})}
    assert "task 1 is another one than in the data" in run(folder, "vf.toml", "vf.txt", **task).stderr
    record = json.loads(run(folder, "vf.toml", "vf.txt", "1").stdout)
    task["RLHF_TASK"] = json.dumps({**record["metadata"], "seed": 3})
    done = run(folder, "vf.toml", "vf.txt", OPENAI_BASE_URL="http://127.0.0.1:9/v1", OPENAI_API_KEY="none", **task)
    assert done.returncode and "reward" not in done.stdout
