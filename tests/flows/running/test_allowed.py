"""On a worker with RLHF_ALLOW_CODE a recipe executes nothing but what that names, and no setting changes it."""

import sys

import pytest

from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.running.checks import check_allowed
from rlhf.tuning.agents.adapters.gym import made
from rlhf.tuning.algorithms import algorithm
from rlhf.tuning.algorithms.objective import Objective
from rlhf.tuning.allowed import NotAllowed, check_module
from rlhf.tuning.names import function_of
from rlhf.tuning.rewards import sandbox
from rlhf.tuning.rewards.failures import Outage

ENGINE = "{kind: vllm, version: '1', command: [PROGRAM, serve]}"
CODE = {
    "a reward": ["rl.score.rewards.x={function: 'os:system'}"],
    "a judge": ["evaluate.judge=os:system"],
    "a source": ["data.source=os:system"],
    "a source of evaluation prompts": ["data.decontaminate={sources: ['os:system']}"],
    "a rule": ["data.rules=['os:system']"],
    "an algorithm": ["rl.update.algorithm=os:system"],
    "a server": [f"rl.rollout.engine={ENGINE.replace('PROGRAM', sys.executable)}"],
    "code of this package": ["rl.score.rewards.x={function: 'rlhf.tuning.rewards.sandbox:run_python'}"],
    "a secret for a judge": [
        "rl.score.rewards.x={function: judge, arguments: {url: 'http://h/v1', model: m, key_variable: AWS_KEY}}"
    ],
    "a secret for a server": ["rl.rollout.engine={kind: vllm, version: '1', url: 'http://h:1', key_variable: AWS_KEY}"],
    "code of data outside of the sandbox": [
        "rl.score.rewards.x={function: code_passes, arguments: {isolation: best-effort}}"
    ],
    "a tool outside of the sandbox": [
        "environment={tools: [python], tool_arguments: {python: {isolation: best-effort}}}"
    ],
    "a module that registers an environment": ["environment={name: 'gymnasium:team.others:Env-v0'}"],
    "a cluster of others": ["workers={cluster: 'elsewhere:6379'}"],
    "options of Beam": ["data.runner.options={setup_file: /tmp/x.py}"],
}


def recipe(sets):
    try:
        return load_recipe("smoke", sets=sets)
    except RecipeError as error:
        pytest.fail(f"the case is no recipe: {error}")


@pytest.mark.parametrize("case", CODE)
@pytest.mark.parametrize("allowed", ["none", "team.rewards", "/nowhere/at/all"])
def test_what_is_not_named_is_refused_before_anything_runs(monkeypatch, case, allowed):
    found = recipe(CODE[case])
    check_allowed(found)
    monkeypatch.setenv("RLHF_ALLOW_CODE", allowed)
    with pytest.raises(RecipeError, match="RLHF_ALLOW_(CODE|KEYS)"):
        check_allowed(found)


@pytest.mark.parametrize("name", ["os:system", "subprocess:call", "posix:system", "builtins:eval", "nothing.here:f"])
def test_it_is_refused_again_where_it_would_be_imported(monkeypatch, name):
    monkeypatch.setenv("RLHF_ALLOW_CODE", "none")
    with pytest.raises(NotAllowed, match="is not allowed here"):
        function_of(name)
    with pytest.raises(NotAllowed):
        algorithm.find(Objective(algorithm=name))


def test_folders_and_packages_are_allowed_and_what_links_out_of_them_is_not(monkeypatch, tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
        (folder / f"in_{folder.name}.py").write_text("def f(prompts, completions, **_): return [1.0]\n")
        monkeypatch.syspath_prepend(str(folder))
    (ours / "linked.py").symlink_to(theirs / "in_theirs.py")
    monkeypatch.setenv("RLHF_ALLOW_CODE", f"team.rewards, {ours}")
    assert function_of("in_ours:f")([], []) == [1.0]
    for module in ("in_theirs", "linked", "team", "team.rewards_of_others", "os", "posix", "sys", "rlhf.tuning.names"):
        with pytest.raises(NotAllowed):
            check_module(module)
    for module in ("team.rewards", "team.rewards.math", "in_ours", "rlhf.tuning.rewards.sentiment"):
        check_module(module)


@pytest.mark.parametrize("module", ["os", "sys", "posix", "builtins", "_frozen_importlib"])
def test_a_module_without_a_file_is_in_no_folder(monkeypatch, tmp_path, module):
    """Not in the current one either, when that is allowed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHF_ALLOW_CODE", str(tmp_path))
    with pytest.raises(NotAllowed):
        check_module(module)


def test_a_package_without_a_file_of_its_own_is_where_its_modules_are(monkeypatch, tmp_path):
    for folder in ("ours", "theirs"):
        (tmp_path / folder / f"parts_of_{folder}").mkdir(parents=True)
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    monkeypatch.setenv("RLHF_ALLOW_CODE", str(tmp_path / "ours"))
    check_module("parts_of_ours")
    with pytest.raises(NotAllowed):
        check_module("parts_of_theirs")


def test_a_recipe_is_a_built_in_one_or_in_an_allowed_folder(monkeypatch, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("sft: null\n")
    monkeypatch.setenv("RLHF_ALLOW_CODE", "none")
    check_allowed(load_recipe("smoke"))
    check_allowed(load_recipe("demo"))
    with pytest.raises(RecipeError, match="or name a built-in recipe"):
        load_recipe(str(path))
    monkeypatch.setenv("RLHF_ALLOW_CODE", str(tmp_path))
    load_recipe(str(path))


def test_isolation_and_clusters_are_as_the_worker_says(monkeypatch):
    found = recipe([*CODE["code of data outside of the sandbox"], "workers={cluster: 'here:6379'}"])
    monkeypatch.setenv("RLHF_ALLOW_CODE", "none,best-effort")
    monkeypatch.setenv("RAY_ADDRESS", "here:6379")
    check_allowed(found)
    monkeypatch.setenv("RLHF_ALLOW_CODE", "none")
    monkeypatch.setattr(sandbox, "gaps", lambda: ("files",))
    with pytest.raises(Outage, match="isolation: best-effort is not allowed here"):
        sandbox.refuse_gaps("best-effort")


def test_an_environment_is_registered_by_an_allowed_module_alone(monkeypatch, tmp_path):
    gym = pytest.importorskip("gymnasium")
    (tmp_path / "registering.py").write_text(
        "import gymnasium\ngymnasium.register('Registered-v0', 'gymnasium.envs.toy_text:TaxiEnv')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RLHF_ALLOW_CODE", "none")
    with pytest.raises(NotAllowed):
        made("registering:Registered-v0", {})
    monkeypatch.setenv("RLHF_ALLOW_CODE", "registering")
    assert made("registering:Registered-v0", {}).render_mode == "ansi"
    del gym.registry["Registered-v0"]
