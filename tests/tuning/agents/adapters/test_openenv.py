"""Environments of OpenEnv's own server are played over its WebSocket."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from rlhf.tuning.agents import adapters
from rlhf.tuning.agents.adapters.openenv import InvalidAction, OpenEnv
from rlhf.tuning.agents.contract import Fault, Spec, Task
from rlhf.tuning.agents.processes import EnvironmentRefused, Environments

# An environment of package openenv: a game of text, and tools of MCP.
SERVER = """
from fastmcp import FastMCP
from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    number: int

class Answer(Observation):
    text: str = ""

class Game(Environment):
    def __init__(self):
        super().__init__()
        self._state = State(episode_id="one", step_count=0)

    def reset(self, seed=None, episode_id=None, high=7):
        self.hidden = 1 + seed % high
        return Answer(text=f"A number from 1 to {high}?")

    def step(self, action, timeout_s=None):
        if action.number > 100:
            raise RuntimeError("the game broke")
        right = action.number == self.hidden
        text = "right" if right else "higher" if action.number < self.hidden else "lower"
        return Answer(text=text, reward=float(right), done=right)

    @property
    def state(self):
        return self._state

class Echo(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("echo")

        @mcp.tool
        def echo(message: str) -> str:
            "Echo a message."
            return message

        super().__init__(mcp)
        self._state = State(episode_id="one", step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(metadata={"seed": seed})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return self._state

game = create_app(Game, Guess, Answer, env_name="game")
echo = create_app(Echo, CallToolAction, CallToolObservation, env_name="echo", max_concurrent_envs=4)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python with OpenEnv's server, whose fastmcp excludes our version of mcp."""
    folder = tmp_path_factory.mktemp("openenv")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    for words in (
        ["--no-deps", "openenv==0.10.0"],
        ["fastmcp==3.4.11", "fastapi", "uvicorn", "websockets", "requests"],
    ):
        install = [folder / "bin" / "pip", "install", "--quiet", "--no-compile", *words]
        if subprocess.run(install, capture_output=True).returncode:
            pytest.skip("openenv cannot be installed")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def served(python, tmp_path_factory):
    """The URL of an application's server, by its name."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "server.py").write_text(SERVER)
    processes = []

    def start(name):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [python, "-m", "uvicorn", f"server:{name}", "--port", str(port)]
        processes.append(subprocess.Popen(command, cwd=folder, env=os.environ | {"PYTHONPATH": ""}))
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                return f"openenv:http://127.0.0.1:{port}"
            except OSError:
                assert processes[-1].poll() is None
                time.sleep(0.5)
        raise AssertionError("the server does not start")

    yield start
    for process in processes:
        process.kill()
        process.wait()


def call(**arguments):
    return f"<tool_call>\n{json.dumps({'name': 'echo', 'arguments': arguments})}\n</tool_call>"


@pytest.mark.slow
def test_a_game_is_played_in_sessions_of_its_server(served):
    name = served("game")
    spec = Spec(name, {"version": "1.0.0", "field": "text", "high": 5})
    with Environments(spec) as environments:

        def answered():
            [(_, answer)] = environments.poll(60)
            return answer

        assert environments.schemas() == []
        # The server has room for one session, and the second episode waits for it.
        for seed, guesses in {7: ("3",), 6: ("two", '{"number": 1}', "2")}.items():
            environments.open(seed, Task(seed))
            first = answered()
            assert (first.observation, first.info["state"]["text"]) == ("A number from 1 to 5?",) * 2
            for guess in guesses:
                environments.step(seed, guess)
                last = answered()
                if guess == "two":
                    assert last.observation.startswith("Invalid action. number: Input should be a valid integer")
                    assert not last.info["valid"] and not last.terminated
            assert (last.observation, last.reward, last.terminated) == ("right", 1.0, True)
            environments.discard(seed)
        environments.open(1, Task(1))
        answered()
        environments.step(1, "101")
        fault = answered()
        assert isinstance(fault, Fault) and "EXECUTION_ERROR: the game broke" in fault.message
    for version in (None, "2.0.0"):
        reason = f"version is {version!r}, and openenv.* serves version '1.0.0'"
        with (
            Environments(Spec(name, {"version": version})) as environments,
            pytest.raises(EnvironmentRefused, match=reason),
        ):
            environments.schemas()


@pytest.mark.slow
def test_tools_of_a_server_are_the_policys(served):
    environment = adapters.make(Spec(served("echo"), {"version": "1.0.0"}))
    assert [schema["function"]["name"] for schema in environment.schemas] == ["echo"]
    assert environment.reset(seed=3, row={}) == (None, {"state": {"metadata": {"seed": 3}}})
    messages, reward, terminated, _, info = environment.step(call(message="one") + call(message="two") + call(text="x"))
    assert [m["content"] for m in messages[:2]] == ["one", "two"] and messages[2]["content"].startswith("error: ")
    assert (reward, terminated, info["valid"], len(info["calls"])) == (0.0, False, False, 2)
    assert environment.step("Done.")[:3] == (None, 0.0, True)
    environment.close()


def test_a_text_is_the_only_field_of_an_action_or_all_as_json():
    environment = OpenEnv("http://127.0.0.1:1", Spec("openenv:http://127.0.0.1:1"))
    metadata = {"metadata": {"type": "object"}}
    environment._action = {"properties": {"message": {"type": "string"}, **metadata}, "required": ["message"]}
    assert environment._parsed(" 5\n") == {"message": "5"} and environment._parsed('{"a": 1}') == {
        "message": '{"a": 1}'
    }
    assert environment._parsed('{"message": "hello"}') == {"message": "hello"}
    environment._action = {"properties": {"move": {"$ref": "#/$defs/Move"}}, "$defs": {"Move": {"type": "integer"}}}
    assert environment._parsed("5") == {"move": 5} and environment._parsed("up") == {"move": "up"}
    environment._action = {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}
    assert environment._parsed('{"x": 1, "y": 2}') == {"x": 1, "y": 2}
    with pytest.raises(InvalidAction, match="a JSON object with the fields x, y"):
        environment._parsed("1 2")
    with pytest.raises(ValueError, match=r"does not combine with environment\.tools"):
        adapters.make(Spec("openenv:http://127.0.0.1:1", tools=["calculator"]))


def test_a_call_of_the_wrong_form_is_a_mistake_of_the_policy(monkeypatch):
    def refuse(*_):
        raise InvalidAction("Invalid action. arguments.message: a text")

    environment = OpenEnv("http://127.0.0.1:1", Spec("openenv:http://127.0.0.1:1", tool_format="hermes"))
    schema = {"type": "object", "properties": {"message": {}}}
    environment._tools = [{"type": "function", "function": {"name": "echo", "parameters": schema}}]
    monkeypatch.setattr(environment, "_ask", refuse)
    messages, reward, done, _, info = environment.step(call(message=3))
    assert messages[0]["content"] == "error: Invalid action. arguments.message: a text"
    assert (reward, done, info["calls"][0]["failed"]) == (0.0, False, True)
