"""A tool answers its call or says what went wrong with it; no call costs more than its time."""

import dataclasses
import importlib.util
import sys
import time
import typing

import pytest

from rlhf.tuning.agents import tools
from rlhf.tuning.agents.contract import Spec
from rlhf.tuning.agents.tools import calculator, python, schemas
from rlhf.tuning.chat.calls import Call
from tests.tuning.agents import own_environments

OWN = "tests.tuning.agents.own_environments"

# A server as the MCP package's guide shows one.
SERVER = '''
import os, time
from mcp.server import MCPServer

server = MCPServer("numbers")


@server.tool()
def double(number: int, shift: int = 0) -> int:
    """Doubles a number."""
    if number > 99:
        raise ValueError("too large")
    return 2 * number + shift


@server.tool()
def process() -> int:
    """The server's process."""
    return os.getpid()


@server.tool()
def sleep(seconds: float) -> str:
    """Sleeps."""
    time.sleep(seconds)
    return "slept"


server.run()
'''


def answered(spec, *calls, seconds=None):
    """Results of calls, and whether each has failed."""
    with tools.opened(spec) as table:
        _, told = table.run([Call(name, arguments) for name, arguments in calls], [], seconds)
    return [(one["result"], one["failed"]) for one in told]


@pytest.mark.parametrize(
    "expression, result",
    [
        ("12 * (3 + 4)", "84"),
        ("7 / 2", "3.5"),
        ("8 / 2", "4"),
        ("0.1 + 0.2", "0.3"),
        ("2 ^ 10 - -1", "1025"),
        ("17 × 23 ÷ 17", "23"),
        ("7 // 2 + 7 % 4", "6"),
        ("1e300 / 3", "3.33333333333e+299"),
    ],
)
def test_the_calculator_computes(expression, result):
    assert calculator.make()(expression) == result


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "a + 1", "9**9**9", "2**(-1)**0.5", "1e308 * 10", "1/0", "True + 1", "'a' * 3", "(" * 250, ""],
)
def test_the_calculator_computes_nothing_but_arithmetic(expression):
    start = time.monotonic()
    with pytest.raises((ValueError, ZeroDivisionError, OverflowError)):
        calculator.make()(expression)
    assert time.monotonic() - start < 1.0


def test_a_program_gets_its_output_its_last_value_or_its_error():
    run = python.make(seconds=10.0)
    assert run("```python\nx = 20\nprint('x', x)\nx + 1\n```") == "x 20\n21"
    with pytest.raises(python.ToolError) as failed:
        run("def half(n):\n    return n / 0\nhalf(1)")
    assert str(failed.value).splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert 'File "main.py", line 2' in str(failed.value) and "exec" not in str(failed.value)


def test_functions_of_ones_own_are_tools_and_the_recipe_may_fix_arguments():
    spec = Spec(tools=[f"{OWN}:shout", "calculator"], tool_arguments={"shout": {"times": 2}})
    with tools.opened(spec) as table:
        function = table.schemas[0]["function"]
    assert list(function["parameters"]["properties"]) == ["text"] and function["description"] == "Writes in capitals."
    calls = [("shout", {"text": "hi"}), ("calculator", {"expression": "1/0"}), ("shout", {"text": "a", "times": 9})]
    calls += [("shot", {}), ("shout", {})]
    found = answered(spec, *calls)
    assert found[0] == ("HI HI", False)
    assert found[1] == ("error: ZeroDivisionError: division by zero", True)
    assert found[2] == ("error: TypeError: unexpected argument 'times'", True)
    assert found[3] == ("error: there is no tool 'shot': did you mean shout?", True)
    assert found[4][0].startswith("error: TypeError: missing a required argument: 'text'")


@pytest.mark.slow
def test_schemas_are_those_of_transformers():
    """`get_json_schema` imports torch, which takes seconds."""
    from transformers.utils import get_json_schema

    counter = own_environments.Counter()
    for function in (own_environments.choose, own_environments.shout, counter.add, counter.wait, calculator.make()):
        assert schemas.schema_of(function) == get_json_schema(function)


def test_a_schema_says_types_choices_and_what_may_be_left_out():
    function = schemas.schema_of(own_environments.choose, hidden=["more"])["function"]
    assert function["description"].startswith("Chooses among several.\n\nIn two paragraphs")
    assert function["parameters"]["required"] == ["way", "kind", "sizes"]
    assert function["parameters"]["properties"] == {
        "way": {"type": "string", "enum": ["left", "right"], "description": "Where to go, one of several ways."},
        "kind": {"type": "string", "enum": ["a", "b"], "description": "Which kind: a or b."},
        "sizes": {"type": "array", "items": {"type": "integer"}, "description": "How large."},
        "then": {"type": "integer", "nullable": True, "description": "What next."},
        "some": {"type": "boolean", "description": "Whether some are enough."},
    }
    assert function["return"] == {"type": "array", "items": {"type": "string"}, "description": "What was chosen."}


@dataclasses.dataclass
class Part:
    title: str
    default: int = 3


@dataclasses.dataclass
class Tree:
    branches: list["Tree"]


def test_a_schema_has_the_fields_of_classes_whatever_their_names_and_no_references():
    fields = {"title": {"type": "string"}, "default": {"type": "integer"}}
    part = {"type": "object", "properties": fields, "required": ["title"]}
    assert schemas.type_of(Part) == part
    assert schemas.type_of(list[Part]) == {"type": "array", "items": part}
    assert schemas.type_of(Part | int) == {"anyOf": [part, {"type": "integer"}]}
    for refused in (Tree, typing.TypedDict("Old", {"a": int}) if sys.version_info < (3, 12) else bytearray):
        with pytest.raises(ValueError, match="expected one that JSON has"):
            schemas.type_of(refused)


def test_a_slow_tool_is_told_so_and_a_turn_has_time_for_all_of_its_calls():
    """The slow one catches exceptions in a loop."""
    spec = Spec(tools=[f"{OWN}:stall", "calculator"], tool_seconds=0.1)
    found = answered(spec, ("stall", {"seconds": 60}), ("calculator", {"expression": "1 + 1"}))
    assert found == [("error: stall took longer than 0.1 s", True), ("2", False)]
    spec = Spec(tools=[f"{OWN}:doze", f"{OWN}:stall"], tool_seconds=0.1)
    found = answered(spec, ("doze", {"seconds": 60}), ("doze", {"seconds": 0}))
    assert found == [("error: doze took longer than 0.1 s", True), ("awake", False)]
    found = answered(spec, ("stall", {"seconds": 60}), ("stall", {"seconds": 60}), seconds=0.05)
    assert found[0][0].startswith("error: stall took longer") and "the time of the turn is used up" in found[1][0]


@pytest.mark.parametrize("name", ["unanswered", "unanswered_later"])
def test_a_limit_of_a_tool_s_own_is_not_told_as_that_of_the_call(name):
    found = answered(Spec(tools=[f"{OWN}:{name}"], tool_seconds=60), (name, {}))
    assert found == [("error: TimeoutError: the service did not answer", True)]


def test_tools_that_are_none_are_refused():
    refused = {
        "no type hints": (Spec(tools=[f"{OWN}:untold"]), "tool untold: no docstring"),
        "twice": (Spec(tools=["calculator", "calculator"]), "two tools 'calculator'"),
        "a stranger": (Spec(tools=["calculator"], tool_arguments={"calc": {}}), "tool_arguments of 'calc'"),
        "a setting": (Spec(tools=["python"], tool_arguments={"python": {"second": 1}}), "tool_arguments of python"),
        "a name": (Spec(tools=["pythn"]), "did you mean python"),
    }
    for spec, told in refused.values():
        with pytest.raises(ValueError, match=told), tools.opened(spec):
            pass


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="needs the optional package mcp")
def test_an_mcp_server_gives_its_tools_and_ends_with_the_episode(tmp_path):
    import psutil

    (tmp_path / "server.py").write_text(SERVER)
    command = f"mcp:{sys.executable} {tmp_path / 'server.py'}"
    spec = Spec(tools=[command], tool_arguments={"double": {"shift": 1}}, tool_seconds=60.0)
    with tools.opened(spec) as table:
        schemas = {s["function"]["name"]: s["function"] for s in table.schemas}
        assert set(schemas) == {"double", "process", "sleep"} and schemas["double"]["description"]
        assert list(schemas["double"]["parameters"]["properties"]) == ["number"]
        names = [("double", {"number": 4}), ("double", {"number": 100}), ("double", {"number": "x"}), ("process", {})]
        _, told = table.run([Call(*one) for one in names], [])
        assert told[0]["result"] == "9" and [one["failed"] for one in told] == [False, True, True, False]
        assert told[1]["result"].startswith("error: Error executing tool double")
        _, late = table.run([Call("sleep", {"seconds": 60}), Call("double", {"number": 1})], [], 0.3)
        assert late[0]["result"].startswith("error: sleep took longer")
    until = time.monotonic() + 5
    while psutil.pid_exists(int(told[3]["result"])) and time.monotonic() < until:
        time.sleep(0.02)
    assert not psutil.pid_exists(int(told[3]["result"]))
    with (
        pytest.raises(ValueError, match="MCP server no-such-command"),
        tools.opened(Spec(tools=["mcp:no-such-command"])),
    ):
        pass
