"""Settings that are rarely meant are told of once they are known, and nothing is refused."""

import pytest

from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.running.recipe_warnings import of_data, of_recipe
from rlhf.flows.running.runner import stages_of
from rlhf.flows.running.session import Session
from tests.flows.commands import typed
from tests.flows.lines import Lines

ALL_FROM_THE_START = "every round samples from the policy that RL starts from"


@pytest.mark.parametrize(
    ("rounds", "staleness", "said"),
    [
        (3, 0, None),
        (3, 1, None),
        (
            3,
            2,
            f"rl.staleness 2 with rl.rounds 3: {ALL_FROM_THE_START}; to sample from trained ones too, set the "
            "former to 1 or less",
        ),
        (3, 5, f"rl.staleness 5 with rl.rounds 3: {ALL_FROM_THE_START}"),
        (2, 1, "set the former to 0 or less"),
        (1, 1, "rl.staleness 1 changes nothing"),
        (1, 0, None),
    ],
)
def test_a_staleness_of_all_rounds_is_told(rounds, staleness, said):
    found = of_recipe(load_recipe("smoke", sets=[f"rl.rounds={rounds}", f"rl.staleness={staleness}"]))
    assert [said in line for line in found] == ([True] if said else [])


def test_ratios_to_policies_that_are_known_to_be_older_are_told():
    older, sampler = "rl.staleness=1", "rl.update.old_logps=sampler"
    (found,) = of_recipe(load_recipe("smoke", sets=[older, sampler]))
    assert found.startswith("rl.staleness 1 with rl.update.old_logps sampler: ratios are to the older policies")
    assert not of_recipe(load_recipe("smoke", sets=[older])) and not of_recipe(load_recipe("smoke", sets=[sampler]))


def test_rounds_without_rollouts_of_their_own_have_no_remark():
    sets = ["rl.staleness=9", "rl.rollout.prompts=9999"]
    for more in (["rl=null"], ["rl.rollouts_from=first"]):
        recipe = load_recipe("smoke", sets=[*(sets if more != ["rl=null"] else []), *more])
        assert not of_recipe(recipe) and not of_data(recipe, {"rows": {"prompts": 10}})


def test_rounds_of_more_prompts_than_there_are_are_told_by_plan_and_when_the_data_is_prepared(store):
    told = "! rl.rollout.prompts is 600, and the data has 516 prompts: a round draws some of them more than once"
    options = ["--set", "rl.staleness=2", "--store", str(store)]
    for count, expected in ((600, 1), (516, 0)):
        done = typed("plan", "smoke", "--set", f"rl.rollout.prompts={count}", *options)
        assert done.stdout.count(told) == expected
        assert f"! rl.staleness 2 with rl.rounds 3: {ALL_FROM_THE_START}" in done.stderr
    recipe, said = load_recipe("smoke", sets=["rl.rollout.prompts=600", f"store={store}"]), Lines()
    session = Session(recipe, said, "many")
    for name in ("base", "prepare"):
        session.run_node(name)
    session.finish("finished")
    assert sum(told in line for line in said.lines) == 1


def test_a_reward_that_takes_a_column_the_data_lacks_ends_the_run_before_anything_is_sampled(
    store, tmp_path, monkeypatch
):
    (tmp_path / "mine_columns.py").write_text(
        "def right(prompts, completions, solution, task, **_):\n    return [1.0 for _ in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sets = ["rl.score.rewards.mine.function=mine_columns:right", f"store={store}"]
    recipe = load_recipe("smoke", sets=sets)
    for name in ("lacking", "lacking-again"):
        session = Session(recipe, Lines(), name)
        with pytest.raises(RecipeError) as e:
            for node in stages_of(session):
                session.run_node(node.name)
        session.finish("failed")
        assert list(session.made) == ["base", "prepare"]
        message = str(e.value)
        assert message.startswith(
            "rl.score.rewards.mine.function: mine_columns:right takes solution, and prompts has no such column"
        )
        assert "its columns are task, completion_ids, answer, metadata" in message
    done = typed("plan", "smoke", "--store", store, "--set", sets[0])
    assert "miss   round-000.score" in done.stdout
    ends = "! a run of the whole recipe ends after prepare: rl.score.rewards.mine.function: mine_columns:right takes"
    assert ends in done.stdout
    session.finish("partial")
    given = load_recipe("smoke", sets=[*sets, "rl.score.rewards.mine.arguments.solution=4"])
    session = Session(given, Lines(), "with-columns")
    for node in stages_of(session):
        if node.name == "sft":
            break
        session.run_node(node.name)
    session.finish("finished")
