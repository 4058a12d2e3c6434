"""What plays an episode is in the key: the project's modules, the user's, and the files that settings name."""

from pathlib import Path

import pytest

from rlhf.stages.contract.fingerprint import reached
from rlhf.stages.sampling.environment import Environment, modules_of, source_digests
from rlhf.stages.store.keys import config_content
from rlhf.tuning import agents
from tests.support import write_files

GAMES = "rlhf.tuning.agents.environments"


@pytest.mark.parametrize("settings", [{"name": "guess"}, {"tools": ["calculator"]}, {"name": "own:Class"}], ids=str)
def test_each_module_that_makes_observations_rewards_and_results_of_tools_is_in_the_key(settings):
    folder = Path(agents.__file__).parent
    named = {
        ".".join(("rlhf.tuning.agents", *p.relative_to(folder).with_suffix("").parts)) for p in folder.rglob("*.py")
    }
    plays = {name for name in named if not name.startswith(GAMES) and (not name.endswith("__init__"))}
    plays |= {
        "rlhf.tuning.agents.adapters",
        "rlhf.tuning.agents.tools",
        *([f"{GAMES}.guess"] if "guess" in str(settings) else []),
    }
    keyed = set(reached(*modules_of(Environment(**settings))).modules)
    assert plays - keyed == set()
    # Another game's rules are none of its own.
    assert f"{GAMES}.frozenlake" not in keyed
    assert modules_of(None) == ()


def changed(folder, settings, name, text, monkeypatch):
    """Whether the digests of settings change with a file's text, and back with it."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    path = folder / name
    environment, before = Environment(**settings), path.read_text()
    first = source_digests(environment)
    path.write_text(text)
    second = source_digests(environment)
    path.write_text(before)
    assert source_digests(environment) == first
    return first != second


@pytest.mark.parametrize(
    ("settings", "name", "text", "expected"),
    [
        ({"name": "gymnasium:X-v0", "arguments": {"renderer": "shows:f"}}, "shows.py", "f = max", True),
        ({"name": "gymnasium:X-v0", "arguments": {"parser": "shows:f"}}, "below.py", "X = 2", True),
        ({"name": "games:Game", "arguments": {"parser": "shows:f"}}, "shows.py", "f = max", True),
        ({"name": "games:Game", "arguments": {"parser": "plain"}}, "shows.py", "f = max", False),
        ({"name": "gymnasium:games:X-v0"}, "games.py", "Game = max", True),
        ({"name": "gymnasium:X-v0"}, "games.py", "Game = max", False),
        ({"tools": ["mcp:python server.py --at 'a b.json'"]}, "server.py", "pass", True),
        ({"tools": ["mcp:python server.py --at 'a b.json'"]}, "a b.json", "{}", True),
        ({"tools": ["mcp:http://localhost:8000/server.py"]}, "server.py", "pass", False),
    ],
)
def test_a_file_that_the_settings_name_is_in_the_key(settings, name, text, expected, tmp_path, monkeypatch):
    modules = {"shows.py": "import below\nf = min\n", "below.py": "X = 1\n", "games.py": "Game = min\n"}
    write_files(tmp_path, **modules, **{"server.py": "import mcp\n", "a b.json": "[]"})
    assert changed(tmp_path, settings, name, text, monkeypatch) is expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "gymnasium:nomodule:X-v0"}, "environment.name: no module 'nomodule'"),
        ({"tools": ["mcp:python 's.py"]}, "environment.tools: .* is not a command"),
        (
            {"name": "gymnasium:X-v0", "arguments": {"parser": "lost:f"}},
            "environment.arguments.parser: no module 'lost'",
        ),
    ],
)
def test_a_module_that_is_not_there_is_an_error_by_the_settings_name(settings, message):
    with pytest.raises(ValueError, match=message):
        source_digests(Environment(**settings))


@pytest.mark.parametrize("name", ["tool_seconds", "step_seconds"])
def test_limits_whose_errors_the_policy_reads_are_in_keys(name):
    plain = config_content(Environment(tools=["search"]))
    assert config_content(Environment(tools=["search"], **{name: 60.0})) != plain
    assert config_content(Environment(tools=["search"], reset_seconds=90.0, processes=2)) == plain
