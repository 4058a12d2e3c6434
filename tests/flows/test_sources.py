"""A recipe of several sources is told before a run what is wrong with them, and after it where their rows went."""

import json

import pytest

from rlhf.flows.recipe.field_paths import fields_at, hint
from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.running.checks import check_columns
from rlhf.flows.running.recipe_warnings import of_data, of_recipe
from tests.flows.commands import typed
from tests.stages.prepare.support import write

CHAT = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]}
PROBLEM = {"question": "2 + 2?", "answer": "4"}


@pytest.fixture
def sources(tmp_path):
    chats, problems = (write(tmp_path / f"{n}.jsonl", [r] * 3) for n, r in (("chats", CHAT), ("math", PROBLEM)))

    def sources(column="question", **more):
        math = {"source": problems, "fields": {"prompt": column, "answer": "answer"}}
        return f"data.sources={json.dumps([{'source': chats} | more, math])}"

    return sources


def test_files_without_a_record_are_named_before_the_base_is_made(tmp_path):
    for name, text in (("a", ""), ("b", "\n\n")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    empty = [f"data.source={tmp_path}"]
    assert of_recipe(load_recipe("smoke", sets=empty)) == [f"{tmp_path}: there are no records in it"]
    write(tmp_path / "b.jsonl", [PROBLEM])
    assert not of_recipe(load_recipe("smoke", sets=empty))


def plan(*sets, code=0):
    options = [option for one in sets for option in ("--set", one)]
    return typed("plan", "smoke", "--set", "base.source=random:tiny", *options, code=code)


def test_a_plan_names_a_source_that_has_to_state_its_use_and_a_column_that_is_not_there(sources, tmp_path):
    store = f"store={tmp_path / 'store'}"
    done = plan(sources(), store)
    assert "data.sources.0 " in done.stderr and "can be used for sft, prompts" in done.stderr
    done = plan(sources("qestion", **{"for": ["sft"]}), store)
    assert "data.sources.0 " not in done.stderr
    assert "the first record of " in done.stderr and "nothing at `qestion`" in done.stderr
    assert not of_recipe(load_recipe("smoke", sets=[sources(**{"for": ["sft"]})]))


@pytest.mark.parametrize(
    ("rewards", "missing", "is_error"),
    [
        ("{right: {function: number_match}}", 66, True),
        ("{right: {function: number_match}, form: {function: matches, arguments: {pattern: x}}}", 66, False),
        ("{right: {function: number_match}, form: {function: matches, arguments: {pattern: x}}}", 129, True),
        ("{form: {function: matches, arguments: {pattern: x}}}", 129, False),
    ],
)
def test_prompts_that_no_reward_can_judge_end_a_run_before_it_trains(tmp_path, rewards, missing, is_error):
    (tmp_path / "mine.yaml").write_text(f"rl: {{score: {{rewards: {rewards}}}}}\nevaluate: {{judge: number_match}}\n")
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    metrics = {"rows": {"prompts": 129, "heldout": 32}, "unanswered": {"prompts": missing, "heldout": 15}}
    told = f"rl.score.rewards.right.function: number_match compares with `answer`, which {missing} of 129 rows"
    if is_error:
        with pytest.raises(RecipeError, match=told.replace(".", r"\.")):
            check_columns(recipe, metrics, ("score", "evaluate"))
    else:
        check_columns(recipe, metrics, ("score", "evaluate"))
    remarks = of_data(recipe, metrics)
    assert any(line.startswith(told) for line in remarks) == (not is_error and "number_match" in rewards)
    assert any("which 15 of 32 rows of heldout do not have" in line for line in remarks)
    check_columns(recipe, metrics, ("sft",))


def test_held_out_rows_without_answers_have_remedies_that_a_recipe_of_pairs_can_use(tmp_path):
    (tmp_path / "mine.yaml").write_text("data: {source: addition}\nsft: null\npreference: {}\nrl: null\n")
    metrics = {"rows": {"heldout": 16}, "unanswered": {"heldout": 16}}
    with pytest.raises(
        RecipeError, match="(?s)evaluate.judge.* compares with `answer`, which 16 of 16 rows of heldout.*evaluate: null"
    ) as e:
        check_columns(load_recipe(str(tmp_path / "mine.yaml")), metrics, ("evaluate",))
    # Every record would go to the pairs then, and none would be held out.
    assert "`for:" not in str(e.value)


def test_settings_of_a_source_are_listed_by_the_names_that_a_recipe_has_and_no_managed_ones():
    assert "for" in fields_at(["data", "sources", "0"]) and "uses" not in fields_at(["data", "sources", "0"])
    assert hint(["data", "sources", "0", "fro"]) == "did you mean for?"
    assert not {"round", "first"} & set(fields_at(["rl", "rollout"]))
    shown = typed("settings", "data.sources").stdout
    assert "data.sources.*.for: " in shown and "such as [sft] or [prompts]" in shown and "uses:" not in shown
