"""What people have is played as it is: games of packages, older contracts, and TRL's environment classes."""

import importlib.util
import json
import subprocess
import sys

import pytest

from rlhf.tuning.agents import adapters
from rlhf.tuning.agents.adapters.step_environment import result_of
from rlhf.tuning.agents.contract import Observed, Spec, Task
from rlhf.tuning.agents.processes import Environments

OWN = "tests.tuning.agents.own_environments"


def package(name):
    """Skips a test where an optional package lacks."""
    lacks = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(lacks, reason=f"needs the optional package {name}")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs packages for one test: their pins contradict ours, or they bring much that only they need."""

    def install(name, *packages):
        if importlib.util.find_spec(name) is None:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
            if subprocess.run([*command, *packages], capture_output=True, timeout=300).returncode:
                pytest.skip(f"{name} is not here, and cannot be installed")
            # Processes of environments get this path too.
            monkeypatch.syspath_prepend(str(tmp_path))

    return install


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def begun(name, arguments=None, seed=3, row=None, **options):
    """An environment, and what its reset gave."""
    environment = adapters.make(Spec(name, arguments or {}, **options))
    return environment, environment.reset(seed=seed, row=row or {})


@pytest.mark.parametrize("name", ["Dice", "Asynchronous"])
def test_a_text_environment_is_played_as_it_is_with_and_without_coroutines(name):
    environment, first = begun(f"{OWN}:{name}", {"sides": 1})
    assert first == ("0 0", {"state": [3]})
    assert environment.step("throw") == ("throw: 0", 0.0, True, False, {"action": "throw"})
    assert environment.finish() == (None, 0.0, False, True, {})
    environment.close()


def test_the_older_tuple_of_four_gets_its_task_at_construction():
    row = {"question": "2 + 2?", "answer": "4"}
    environment, (seen, info) = begun(f"{OWN}:Older", {"bonus": 0.5}, row=row)
    assert json.loads(seen) == {"question": "2 + 2?"} and info == {"level": 1}
    assert environment.step("4") == ("", 1.5, True, False, {"right": "4"})


@pytest.mark.parametrize("info", [{}, {"TimeLimit.truncated": True}])
def test_a_limit_of_time_of_the_older_tuple_is_a_cut(info):
    _, _, terminated, truncated, _ = result_of(("", 0.0, True, info), None)
    assert (terminated, truncated) == (not info, bool(info))


def test_objects_as_answers_of_reset_and_step_are_read_by_their_attributes():
    environment, first = begun(f"{OWN}:Steps", seed=8)
    assert first == ("at 8", {})
    assert environment.step("1") == ("at 9", 0.5, False, False, {"place": 9})
    assert environment.step("2") == ("at 11", 0.5, True, False, {"place": 11})


def test_an_environment_class_of_trl_is_tools_and_a_reward():
    row = {"start": 4, "prompt": "Count."}
    environment, first = begun(f"{OWN}:Counter", row=row)
    assert first == ("\nThe counter is at 4.", {"joins_prompt": True})
    assert [schema["function"]["name"] for schema in environment.schemas] == ["add", "wait"]
    add = environment.schemas[0]["function"]["parameters"]
    assert add["required"] == ["amount"] and add["properties"]["amount"]["type"] == "integer"
    both = f"First.\n{call('add', amount=3, twice=True)}\n{call('wait', seconds=0)}"
    messages, reward, terminated, truncated, info = environment.step(both)
    assert [m["content"] for m in messages] == ["The counter is at 10.", "waited"]
    assert {m["role"] for m in messages} == {"tool"} and (reward, terminated, truncated) == (0.0, False, False)
    assert info["calls"][0] == {
        "name": "add",
        "arguments": {"amount": 3, "twice": True},
        "result": "The counter is at 10.",
        "failed": False,
    }
    # Cut here, or answered: the reward is what `get_reward` says, which is a coroutine.
    assert environment.finish() == (None, 1.0, False, True, {})
    assert environment.step("It is ten.") == (None, 1.0, True, False, {})
    environment.close()


def test_an_environment_class_of_trl_that_wants_the_task_gets_that_of_each_episode():
    environment, first = begun(f"{OWN}:Shop", row={"prompt": "Buy.", "budget": 3})
    assert first == (" The budget is 3.", {"joins_prompt": True})
    buy, currency = environment.schemas
    assert (buy["function"]["name"], currency["function"]["name"]) == ("buy", "currency")
    assert list(buy["function"]["parameters"]["properties"]) == ["price"]
    messages, *_ = environment.step(call("buy", price=2) + call("currency") + call("buy", price=2, twice=1))
    assert [m["content"] for m in messages[:2]] == ["1 left", "euro"] and "twice" in messages[2]["content"]
    assert environment.step("Done.")[1] == 1.0
    # Another episode has another object.
    assert begun(f"{OWN}:Shop", row={"budget": 7})[1][0] == " The budget is 7."
    # Schemas are listed before any task is known.
    assert len(adapters.make(Spec(f"{OWN}:Shop")).schemas) == 2


def test_without_get_reward_the_attribute_reward_is_the_reward():
    environment, first = begun(f"{OWN}:Attribute", row={"prompt": "Press."})
    assert first[0] is None
    messages, *_ = environment.step(call("press"))
    assert messages[0]["content"] == '{"pressed": true}'
    assert environment.step("Done.")[1] == 1.0


def test_faults_of_the_policy_are_answers_to_it():
    environment, _ = begun(f"{OWN}:Counter", row={"start": 0})
    turn = [call("add", amount=-1), call("ad", amount=1), call("add", wrong=1), "<tool_call>\n{\n</tool_call>"]
    messages, reward, terminated, _, info = environment.step("\n".join(turn))
    texts = [m["content"] for m in messages]
    assert len(texts) == 4 and all(text.startswith("error: ") for text in texts)
    assert texts[0] == "error: ValueError: the counter only grows" and any("ad" in text for text in texts[1:])
    assert [one["failed"] for one in info["calls"]] == [True] * 4
    assert not terminated and info["valid"] is False and reward == 0.0
    assert environment.step(call("add", amount=1))[4]["valid"] is True


def test_tools_beside_an_environment_answer_calls_and_the_environment_all_else():
    environment, first = begun(f"{OWN}:Steps", seed=0, tools=["calculator"])
    assert first[0] == "at 0"
    messages, *_ = environment.step(call("calculator", expression="2 + 3"))
    assert messages[0]["content"] == "5"
    assert environment.step("5")[0] == "at 5"


def test_tools_alone_end_with_a_turn_without_calls():
    environment = adapters.make(Spec(tools=["calculator"]))
    assert environment.reset(seed=1, row={}) == (None, {})
    assert environment.step("It is 4.") == (None, 0.0, True, False, {})


def test_what_cannot_be_made_is_refused_by_name():
    refused = {
        "gues": "environment 'gues': did you mean guess",
        "calculator": "made of tools alone",
        f"{OWN}:Nobody": "Nobody",
    }
    if importlib.util.find_spec("textarena") is None:
        refused["textarena:Nim-v0"] = r"needs the package textarena \(pip install textarena\)"
    for name, told in refused.items():
        with pytest.raises((ValueError, ImportError), match=told):
            adapters.load(Spec(name))
            adapters.make(Spec(name)).reset(seed=1, row={})


@package("gymnasium")
def test_frozen_lake_of_gymnasium_is_shown_as_text_and_moved_by_names_or_numbers():
    environment, (seen, info) = begun("gymnasium:FrozenLake-v1", {"is_slippery": False})
    assert seen == "[S]FFF\nFHFH\nFFFH\nHFFG" and info["state"] == 0
    seen, reward, terminated, truncated, info = environment.step("I could go left, but right it is: Right.")
    assert seen.splitlines()[1] == "S[F]FF" and (reward, terminated, truncated) == (0.0, False, False)
    assert info["action"] == "right" and info["valid"] and info["state"] == 1
    seen, *_, info = environment.step("nowhere, or 7")
    assert info == {"valid": False, "state": 1}
    assert seen == "No action found. Answer with one of: left, down, right, up."
    assert environment.step("1")[2] is True
    environment.close()


@package("gymnasium")
def test_a_renderer_and_a_parser_of_ones_own_stand_between():
    arguments = {"is_slippery": False, "renderer": f"{OWN}:seen", "parser": f"{OWN}:first_letter"}
    environment, (seen, _) = begun("gymnasium:FrozenLake-v1", arguments)
    assert seen == "square 0"
    assert environment.step("d")[0] == "square 4"
    environment, (seen, _) = begun("gymnasium:CartPole-v1", {"actions": ["west", "east"]}, seed=5)
    assert len(json.loads(seen)) == 4 and environment.step("East!")[4]["action"] == "east"
    with pytest.raises(ValueError, match="an argument `parser: module:function` is needed"):
        begun("gymnasium:Pendulum-v1")


@pytest.mark.parametrize("form", ["mapping", "object"])
def test_a_step_that_is_no_tuple_is_rendered_and_its_actions_may_come_with_the_reset(form):
    arguments = {"form": form, "renderer": f"{OWN}:seen", "actions": ["west", "east"]}
    environment, (seen, _) = begun(f"{OWN}:Walk", arguments)
    assert seen == "square 0"
    seen, reward, terminated, truncated, info = environment.step("East!")
    assert (seen, reward, terminated, truncated) == ("square 1", 0.5, False, False)
    assert info == {"action": "east", "valid": True, "state": 1}


@pytest.mark.slow
def test_a_game_of_gem_is_played_unchanged_in_its_process(installed):
    installed("gem", "gem-llm==0.1.0")
    played("gem:game:GuessTheNumber-v0-easy", "\\boxed{5}")


@pytest.mark.slow
def test_games_of_textarena_are_for_one_player(installed):
    """In one of two, a context would hold the other's private observation, and both be trained with one's reward."""
    installed("textarena", "textarena==0.7.4", "nltk", "joblib", "chess", "websockets", "python-dotenv")
    played("textarena:GuessTheNumber-v0", "[10]")
    with pytest.raises(ValueError, match=r"textarena:Nim-v0 cannot begin with one player.*wrapper with an opponent"):
        begun("textarena:Nim-v0")


def played(name, action):
    """An episode's first two observations are of its seed alone."""
    with Environments(Spec(name)) as environments:
        found = {}
        for key, seed in enumerate([1, 2, 1, 3, 4, 5]):
            environments.open(key, Task(seed))
        for _ in range(2):
            answers = {}
            while len(answers) < 6 and (more := environments.poll(60.0)):
                answers.update(more)
            for key, answer in answers.items():
                assert isinstance(answer, Observed), answer
                found.setdefault(key, []).append((answer.observation, answer.reward))
                if len(found[key]) == 1:
                    environments.step(key, action)
        assert found[0] == found[2] and len({str(answers) for answers in found.values()}) > 1
