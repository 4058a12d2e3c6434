"""Functions that a recipe names are looked up, with their arguments, without being executed."""

import re

import pytest

from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.running.checks import check, check_columns
from rlhf.stages.contract import signatures
from rlhf.stages.tools.try_algorithm import fault
from rlhf.tuning.algorithms.settings import Objective
from tests.support import write_files

CODE = """
raise SystemExit("executed")
from helpers import shared as borrowed

def vowels(prompts, completions, *, scale=1.0, level=None, **_):
    return [1.0]

def open_ended(prompts, completions, **columns):
    return [1.0]

def algorithm(objective, *, decay=0.9):
    return None

def no_objective():
    return None

def problems(size, seed=0):
    yield {}

def of_prompts(prompts): ...
def of_one(completion, answer): ...
def of_completions(completions, **columns): ...
def of_names(completions, task): ...
def compute_score(data_source, solution_str, ground_truth, extra_info): ...
async def slow(prompts, completions): ...
def of_any(*texts, **columns): ...
"""
ENVIRONMENTS = """
raise SystemExit("executed")
import dataclasses
from elsewhere import Unknown

class Door:
    def __init__(self, high=7, *, colour="red"): ...

class Needy:
    def __init__(self, level, task=None): ...
class Strange(Unknown): ...
class Grid:
    def __init__(self, size=3): ...
@dataclasses.dataclass
class Data:
    size: int = 3
def made(high=7): ...
def tool(text: str, path: str) -> str: ...
"""
HELPERS = """
def shared(prompts, completions, *, x=1): ...
"""
REWARD = """
def right(prompts, completions): ...
"""
MINE = "rl.score.rewards={mine: {function: 'own_code:%s', arguments: %s}}"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Recipes whose code is in the current folder."""
    write_files(tmp_path, **{"own_code.py": CODE})
    write_files(tmp_path, **{"own_env.py": ENVIRONMENTS, "helpers.py": HELPERS})
    write_files(tmp_path, **{"code.py": REWARD, "lacking.py": f"import json\nimport nowhere.inside\n{REWARD}"})
    write_files(tmp_path, **{"placing.py": f"import sys\nsys.path.insert(0, 'there')\nimport nowhere\n{REWARD}"})
    write_files(tmp_path, **{"trying.py": f"try:\n    import nowhere\nexcept ImportError:\n    pass\n{REWARD}"})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def recipe(*sets):
        return load_recipe("smoke", sets=[f"store={tmp_path / 'store'}", *sets])

    return recipe


def test_a_file_that_a_package_of_this_project_hides_is_named(tmp_path, monkeypatch):
    write_files(tmp_path, **{"rlhf.py": REWARD})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="/rlhf.py has the name of a module of Python or of this project; give"):
        check(load_recipe("smoke", sets=["rl.score.rewards={j: {function: 'rlhf:right'}}"]))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([MINE % ("vowls", "{}")], "mine.function: own_code.py has no function 'vowls'; did you mean vowels?"),
        (["rl.score.rewards={j: {function: 'lacking:right'}}"], "lacking.py, line 2: no module 'nowhere' can be im"),
        ([MINE % ("vowels", "{scal: 2}")], "own_code:vowels takes no argument 'scal'; did you mean scale?"),
        ([MINE % ("vowels", "{prompts: 2}")], "the pipeline itself passes prompts to own_code:vowels"),
        ([MINE % ("borrowed", "{y: 2}")], "own_code:borrowed takes no argument 'y'"),
        ([MINE % ("of_prompts", "{}")], "own_code:of_prompts takes 1 of its arguments by position; it is called"),
        ([MINE % ("of_one", "{}")], "own_code:of_one takes answer among its first two arguments; it is called with"),
        ([MINE % ("slow", "{}")], "mine.function: own_code:slow is `async def`: it is called, and not awaited"),
        (["rl.score.rewards={j: {function: 'code:right'}}"], "/code.py has the name of a module of Python or of this"),
        (["rl.score.rewards={j: {function: 'own_code.py:vowels'}}"], "is a file: a module is written"),
        (["rl.score.rewards={t: {function: token_share}}"], "t.arguments: token_share needs token"),
        (["rl.score.rewards={t: {function: exact_match, arguments: {extrct: a}}}"], "did you mean extract?"),
        (["evaluate.judge=token_share"], "evaluate.judge_arguments: token_share needs token"),
        (["evaluate.judge=own_code:nothing"], "evaluate.judge: own_code.py has no function 'nothing'"),
        (["rl.update.algorithm=own_code:algoritm"], "no function 'algoritm'; did you mean algorithm?"),
        (["rl.update={algorithm: 'own_code:algorithm', algorithm_arguments: {deca: 1.0}}"], "did you mean decay?"),
        (["rl.update.algorithm=own_code:no_objective"], "takes no objective"),
        (["data.source=own_code:problems"], "own_code:problems needs size"),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_refused_before_any_work(own, sets, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        check(own(*sets))


@pytest.mark.parametrize(
    "sets",
    [
        [MINE % ("vowels", "{scale: 2.0}")],
        [MINE % ("open_ended", "{anything: 2.0}")],
        [MINE % ("of_any", "{}")],
        [MINE % ("borrowed", "{x: 2}")],
        ["rl.score.rewards={j: {function: 'trying:right'}}"],
        ["rl.score.rewards={j: {function: 'placing:right'}}"],
        ["rl.update={algorithm: 'own_code:algorithm', algorithm_arguments: {decay: 1.0}}"],
        ["data={source: 'own_code:problems', source_args: {size: 3}}"],
    ],
)
def test_what_can_be_called_is_accepted_and_nothing_is_executed(own, sets):
    check(own(*sets))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("{name: 'own_env:Dor'}", "environment.name: own_env.py has no class 'Dor'; did you mean Door?"),
        ("{name: 'own_env:Door', arguments: {hihg: 3}}", "own_env:Door takes no argument 'hihg'; did you mean high?"),
        ("{name: 'own_env:Needy'}", "environment.arguments: own_env:Needy needs level, which the recipe does not give"),
        ("{name: 'own_env:Grid', arguments: {options: 3}}", "own_env:Grid takes no argument 'options'"),
        ("{name: gues}", "environment.name: environment 'gues': did you mean guess?"),
        ("{name: calculator}", "environment.name: environment 'calculator' is made of tools alone"),
        ("{name: guess, arguments: {hihg: 3}}", "environment.arguments: guess takes no argument 'hihg'; did you mean"),
        ("{name: frozenlake, arguments: {rows: 9}}", "environment.arguments: environment frozenlake: argument rows"),
        ("{tools: [calculater]}", "environment.tools: unknown tool 'calculater'; did you mean calculator?"),
        ("{tools: ['own_env:tool'], tool_arguments: {tool: {pth: a}}}", "tool_arguments.tool: own_env:tool takes no"),
    ],
)  # fmt: skip
def test_an_environment_that_cannot_be_made_is_refused_before_any_work(own, environment, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        check(own(f"environment={environment}"))


@pytest.mark.parametrize(
    "environment",
    [
        "{name: 'own_env:Door', arguments: {high: 3, colour: blue}}",
        "{name: 'own_env:Needy', arguments: {level: 3}}",
        "{name: 'own_env:Strange', arguments: {anything: 3}}",
        "{name: 'own_env:Data', arguments: {size: 3}}",
        "{name: 'own_env:Grid', arguments: {size: 4, actions: [up, down], options: 3}}",
        "{name: 'own_env:made'}",
        "{name: 'gymnasium:Any-v1', arguments: {anything: 3}}",
        "{name: guess, arguments: {high: 3}}",
        "{tools: [calculator, 'own_env:tool', 'mcp:server'], tool_arguments: {tool: {path: a}}}",
        "{agent: [agent]}",
    ],
)
def test_an_environment_that_can_be_made_is_accepted_and_nothing_is_executed(own, environment):
    check(own(f"environment={environment}"))


def test_names_that_a_tree_cannot_tell_are_accepted(tmp_path, monkeypatch):
    text = "from elsewhere import *\nimport functools\nif True:\n    made = functools.partial(print)\n"
    write_files(tmp_path, **{"starred.py": text, "plain.py": text.replace("from elsewhere import *\n", "")})
    monkeypatch.syspath_prepend(tmp_path)
    assert signatures.of_name("starred:anything", "x") is None
    assert signatures.of_name("plain:made", "x") is None
    with pytest.raises(ValueError, match="plain.py has no function 'anything'"):
        signatures.of_name("plain:anything", "x")


ALGORITHM = """
import jax.numpy as jnp
from rlhf.tuning.algorithms.algorithm import Algorithm, clipped, group_relative
from rlhf.tuning.losses.policy import reinforce

def right(objective): return Algorithm(group_relative("std"), clipped(objective))
def raises(objective): return {}["my bug"]
def shapes(objective): return Algorithm(lambda s: jnp.ones((3, 1)) * jnp.ones((4, 8)), clipped(objective))
def few(objective): return Algorithm(lambda s: jnp.ones((3, 1)), clipped(objective))
def silent(objective):
    return Algorithm(group_relative("std"), lambda t: (reinforce(t)[0], {}))
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("right", None),
        ("raises", "tried.py, line 7: KeyError: 'my bug'"),
        ("shapes", "tried.py, line 8: "),
        ("few", "advantages have the shape (3, 1) for 8 completions of 3 tokens"),
        ("silent", None),
    ],
)
def test_an_algorithm_of_ones_own_is_called_once_before_a_run(tmp_path, monkeypatch, name, message):
    write_files(tmp_path, **{"tried.py": ALGORITHM})
    monkeypatch.syspath_prepend(tmp_path)
    found = fault(Objective(algorithm=f"tried:{name}"), 4)
    assert found is None if message is None else message in found


def test_a_reward_in_trls_form_is_taken_and_its_columns_are_checked(own):
    reward = "rl.score.rewards={{r: {{function: 'own_code:{}'}}}}"
    check(own(reward.format("of_completions")))
    check_columns(own(reward.format("compute_score")), {"columns": {"prompts": []}}, ["score"])
    recipe = own(reward.format("of_names"))
    check(recipe)
    with pytest.raises(RecipeError, match="own_code:of_names takes task, and .* has no such column"):
        check_columns(recipe, {"columns": {"prompts": ["level"]}}, ["score"])
