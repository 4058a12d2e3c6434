"""What the section data takes from the sections that read it."""

import pytest

from rlhf.flows.recipe.model import Recipe
from rlhf.flows.recipe.reading import load_recipe
from tests.flows.recipe.support import refused


@pytest.mark.parametrize(
    ("text", "splits"),
    [
        ("{}", ["sft", "prompts", "heldout"]),
        ("sft: null", ["prompts", "heldout"]),
        ("{rl: null, evaluate: null}", ["sft", "heldout"]),
        ("{rl: null, evaluate: null, reward: {}}", ["sft", "preference", "heldout"]),
        ("{sft: null, evaluate: null}", ["prompts"]),
        ("{sft: null, rl: null, evaluate: null, distill: {teacher: 'random:tiny'}}", ["sft", "heldout"]),
        ("{sft: null, evaluate: null, data: {heldout_fraction: 0.25}}", ["prompts", "heldout"]),
        ("{sft: null, evaluate: null, data: {heldout_fraction: 0}}", ["prompts"]),
        ("{rl: null, sft: null, preference: {loss: kto}}", ["preference", "heldout"]),
        ("data: {splits: [sft, preference, prompts, heldout]}", ["sft", "preference", "prompts", "heldout"]),
    ],
)
def test_only_splits_that_a_section_reads_are_wanted_unless_named(recipe, text, splits):
    assert load_recipe(recipe(text)).data.splits == splits


@pytest.mark.parametrize(
    ("text", "fraction"),
    [
        ("{rl: null}", 1.0),
        ("{rl: null, evaluate: null, data: {sft_fraction: 0.5}}", 0.5),
        ("{rl: null, preference: {}}", 0.33),
        ("{rl: null, reward: {}}", 0.33),
        ("{}", 0.33),
    ],
)
def test_sft_has_all_records_where_no_section_reads_the_rest(recipe, text, fraction):
    assert load_recipe(recipe(text)).data.sft_fraction == fraction


@pytest.mark.parametrize(
    ("text", "verifiers"),
    [
        ("{}", ["exact_match"]),
        ("rl: {score: {rewards: {n: {function: number_match}, e: {function: exact_match}}}}",
         ["exact_match", "number_match"]),
        ("{rl: {score: {rewards: {m: {function: math_equal}}}}, evaluate: {judge: number_match}}",
         ["number_match", "math_equal"]),
        ("{rl: null, evaluate: {judge: code_passes}}", ["code_passes"]),
        ("{data: {verifiers: []}, evaluate: {judge: code_passes}}", []),
    ],
)  # fmt: skip
def test_answers_must_be_readable_for_the_built_in_rewards_and_the_judge(recipe, text, verifiers):
    assert load_recipe(recipe(text)).data.verifiers == verifiers


def test_fields_of_a_source_are_checked_with_the_recipe(recipe):
    text = 'data: {source: gsm8k.jsonl, fields: {prompt: question, answer: {from: answer, pattern: "#### (.*)"}}}'
    loaded = load_recipe(recipe(text))
    assert loaded.data.fields["answer"] == {"from": "answer", "pattern": "#### (.*)"}
    assert Recipe.model_validate_json(loaded.model_dump_json()) == loaded
    assert "fields.answer: '(' is not a regular expression" in refused(
        recipe('data: {fields: {answer: {from: answer, pattern: "("}}}')
    )
    assert "data.fields.answer" in refused(recipe("data: {fields: {answer: {form: answer}}}"))
