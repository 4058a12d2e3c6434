"""Options `--set`: each reaches every place of a recipe, lies over its file, and is named where it is wrong."""

from pathlib import Path

import pytest

from rlhf.flows.recipe.reading import checked, load_recipe
from tests.flows.recipe.support import refused


def test_set_reaches_every_depth():
    loaded = load_recipe(
        "smoke",
        sets=[
            "seed=7",
            "sft.optimizer.learning_rate=1e-4",
            "rl.score.rewards.digits.arguments.pattern='[a-z]+'",
            "rl.score.rewards.short={function: length_at_most, weight: 0.1, arguments: {tokens: 4}}",
            "data.splits=[sft, prompts, heldout, preference]",
            "evaluate=null",
        ],
    )
    assert loaded.seed == 7
    assert loaded.sft.optimizer.learning_rate == 0.0001
    assert loaded.sft.epochs == load_recipe("smoke").sft.epochs
    assert loaded.rl.score.rewards["digits"].arguments == {"pattern": "[a-z]+"}
    assert loaded.rl.score.rewards["digits"].weight == 0.5
    assert loaded.rl.score.rewards["short"].arguments == {"tokens": 4}
    assert loaded.data.splits[-1] == "preference"
    assert loaded.evaluate is None


def test_set_of_a_mapping_by_names_takes_its_place_and_of_a_section_adds_to_it():
    mine = "rl.score.rewards={mine: {function: tagged}}"
    assert list(load_recipe("smoke", sets=[mine]).rl.score.rewards) == ["mine"]
    arguments = "rl.score.rewards.digits.arguments={pattern: x}"
    assert load_recipe("smoke", sets=[arguments]).rl.score.rewards["digits"].arguments == {"pattern": "x"}
    loaded = load_recipe("smoke", sets=["data.source_args={wrong_answers: 1}", "data.source_args={}", "rl={rounds: 1}"])
    assert loaded.data.source_args == {} and loaded.rl.rollout == load_recipe("smoke").rl.rollout
    two = ["evaluate.judges={a: {function: tagged}}", "evaluate.judges.b.function=tagged"]
    assert list(load_recipe("smoke", sets=two).evaluate.judges) == ["a", "b"]
    # A reward with the name of a setting of rewards.
    reward = "rl.score.rewards.arguments={function: tagged, arguments: {k: 3}}"
    named = load_recipe("smoke", sets=[reward, "rl.score.rewards.arguments={weight: 5}"]).rl.score.rewards["arguments"]
    assert (named.weight, named.arguments) == (5, {"k": 3})
    # So is an entry of a mapping without sections.
    loaded = load_recipe("smoke", sets=["data.fields.answer={from: a, pattern: x}", "data.fields.answer={from: b}"])
    assert loaded.data.fields == {"answer": {"from": "b"}}


def test_a_mapping_among_the_parameters_of_a_deployment_takes_its_place_too():
    rl = {"rounds": 1, "score": {"rewards": {"mine": {"function": "tagged"}}}}
    loaded = load_recipe("smoke", {"rl": rl, "data": {"source_args": {}}, "evaluate": None}).rl
    assert list(loaded.score.rewards) == ["mine"] and loaded.rollout == load_recipe("smoke").rl.rollout


def test_several_sources_take_the_place_of_the_recipes_one_and_no_option_hides_behind_them(recipe):
    loaded = load_recipe("smoke", sets=["data.sources=[{source: a.jsonl}]"]).data
    assert [s.source for s in loaded.all_sources()] == ["a.jsonl"]
    assert load_recipe("smoke", {"data": {"sources": [{"source": "a.jsonl"}]}}).data.sources == loaded.sources
    several = recipe("data: {sources: [{source: a.jsonl}]}\n")
    both = "data={source: addition, sources: [{source: a.jsonl}]}"
    for said in (refused(several, sets=["data.source=addition"]), refused("smoke", sets=[both])):
        assert "`sources` stands in place of `source`, which each entry of `sources` may have" in said
    # A record has every setting.
    record = load_recipe(several).model_dump(mode="json")
    assert checked(record, Path("run first")).data.sources[0].source == "a.jsonl"


def test_trls_beta_is_kl_coef_and_has_no_default_under_that_name():
    for beta in ("0.1", "0.5"):
        said = refused("smoke", sets=[f"rl.update.beta={beta}"])
        assert "beta has no meaning with algorithm grpo" in said and "did you mean rl.update.kl_coef?" in said


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("sft.lora.dropout", "not supported"),
        ("sft.packing_strategy", "there are "),
        ("preference.truncation_mode", "there are "),
        ("rl.num_train_epochs", "did you mean rl.rounds?"),
        ("sft.num_train_epochs", "did you mean sft.epochs?"),
        ("preference.rpo_alpha", "did you mean preference.sft_weight?"),
        ("rl.importance_sampling_level", "gspo"),
        ("sft.learning_rte", "did you mean sft.optimizer.learning_rate?"),
        ("sft.max_steps", "set sft.epochs"),
        ("train_on_inputs", "leave it out"),
        ("wandb_project", "set WANDB_PROJECT"),
    ],
)
def test_a_name_of_other_libraries_or_a_typing_error_names_the_setting_that_is_meant_and_no_other(place, said):
    found = refused("smoke", sets=[f"{place}=1"])
    assert f"{place}: unknown key; " in found and said in found


def test_set_opens_a_section_that_is_null(recipe):
    assert load_recipe(recipe("sft: null\n"), sets=["sft.epochs=2"]).sft.epochs == 2


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("rl.score.rewards.digit.weight=2", "rl.score.rewards.digit.function: Field required"),
        ("sft.epoch=2", "--set sft.epoch: unknown key; did you mean epochs?"),
        # No setting of its section is near: the nearest of any section, by its whole place.
        (
            "rl.update.learing_rate=1",
            "--set rl.update.learing_rate: unknown key; did you mean rl.update.optimizer.learning_rate?",
        ),
        (
            "rl.rollout.learning_rate=1",
            "--set rl.rollout.learning_rate: unknown key; did you mean rl.update.optimizer.learning_rate?",
        ),
        ("update.kl_coef=1", "--set update.kl_coef: update: unknown key; did you mean rl.update?"),
        ("sft.zzzz=1", "--set sft.zzzz: unknown key; there are epochs,"),
        ("stf.epochs=2", "--set stf.epochs: stf: unknown key; did you mean sft?"),
        ("data.fields={answer: 3}", "--set data.fields.answer: Input should be a valid string or a mapping (found 3)"),
        (
            "data.fields={answer: {patern: x}}",
            "--set data.fields.answer.patern: unknown key; expected 'from', 'pattern' or 'template'",
        ),
        ("data.fields={answer: {from: [1]}}", "--set data.fields.answer.from: Input should be a valid string"),
        ("sft.lora={targets: [q, foo]}", "--set sft.lora.targets.1: Input should be 'q', 'k', 'v', 'o',"),
        ("sft.lora={targets: foo}", "--set sft.lora.targets: Input should be 'all-linear' or a list (found 'foo')"),
        (
            "rl.score.rewards={a: {function: tagged, weight: 0}, b: {function: tagged, weight: 0}}",
            "rewards.a.weight, rewards.b.weight 0: every total would be 0",
        ),
        ("rl.update.algorithm=gropo", "--set rl.update.algorithm: rl.update: no algorithm 'gropo'; did you mean grpo?"),
        ("rl.rollout.completions=1", "--set rl.rollout.completions: rl: rollout.completions is 1, and grpo compares"),
        ("rl.update.kl_coef=null", "--set rl.update.kl_coef: expected a valid number, not null: leave it out for"),
        ("rl.update.algorithm=online-dpo", "Leave it out, or set it to 0.0"),
        ("sft.learning_rate=-1", "--set sft.learning_rate: Input should be greater than 0 (found -1)"),
        ("sft.decay_steps=2", "--set sft.decay_steps: sft.optimizer: decay_steps has no meaning with"),
        ("sft.epochs", "--set sft.epochs: expected a.b=value"),
        ("sft=[1", "--set sft=[1: the value cannot be read: not YAML"),
        ("data.source_args.day=2026-01-01", "--set data.source_args.day=2026-01-01: the value cannot be read: '2026"),
        ("data.splits=[sft, prompts, heldout]", "--set data.splits: data.splits lacks"),
    ],
)
def test_a_wrong_set_is_named(item, message):
    assert message in refused("smoke", sets=[item])


def test_an_item_of_a_list_is_set_by_its_number(recipe):
    path = recipe("data: {sources: [{source: a.jsonl, weight: 2}, {source: b.jsonl}]}\n")
    sources = load_recipe(path, sets=["data.sources.1.source=c.jsonl"]).data.sources
    assert [(s.source, s.weight) for s in sources] == [("a.jsonl", 2), ("c.jsonl", 1)]
    wrong = "--set data.sources.{0}=x: data.sources is a list of 2: expected a number from 0 to 1 for {1!r}, or --set"
    assert wrong.format("2.source", "2") in refused(path, sets=["data.sources.2.source=x"])
    assert wrong.format("b.source", "b") in refused(path, sets=["data.sources.b.source=x"])
    several = recipe("data:\n  sources:\n    - source: a.jsonl\n    - source: b.jsonl\n      wieght: 2\n")
    assert "mine.yaml:5: data.sources.1.wieght: unknown key" in refused(several)
    # A mistake of an option that the file has a line for, and one of a field that follows another.
    assert refused(path, sets=["data.sources.0.weight=-1"]).startswith("--set data.sources.0.weight: Input should be")
    with_rl = recipe("data: {sources: [{source: a.jsonl}]}\nrl: {rounds: 2}\n")
    both = refused(with_rl, sets=["rl.rollout.temperature=-1"]).splitlines()
    # The update takes its temperature over, and is not told of.
    assert both == ["--set rl.rollout.temperature: Input should be greater than 0 (found -1)"]
    prompts = refused(with_rl, sets=["rl.rollout.prompts=-4"])
    assert prompts == "--set rl.rollout.prompts: Input should be greater than or equal to 1 (found -4)"


def test_a_mistake_in_the_file_is_not_blamed_on_set(recipe):
    text = refused(recipe("sft:\n  epochs: 1\n  lr: 3\n"), sets=["sft.epochs=2"])
    assert "mine.yaml:3: sft.lr" in text
    assert "--set" not in text


@pytest.mark.parametrize("file", ["learning_rate: 1e-3", "optimizer: {learning_rate: 1e-3}"])
@pytest.mark.parametrize("place", ["sft.learning_rate", "sft.optimizer.learning_rate"])
def test_an_option_wins_over_the_file_however_each_is_written(recipe, file, place):
    path = recipe(f"sft:\n  epochs: 2\n  {file}\n")
    assert load_recipe(path, sets=[f"{place}=5e-3"]).sft.optimizer.learning_rate == 5e-3
    over = {"sft": {"optimizer": {"learning_rate": 5e-3}}}
    assert load_recipe(path, over).sft.optimizer.learning_rate == 5e-3
    assert refused(path, sets=[f"{place}=-1"]).startswith(f"--set {place}: Input should be greater than 0")
    assert "mine.yaml:3: sft.optimizer.epsilon: Input" in refused(recipe("sft:\n  epochs: 2\n  epsilon: -1\n"))
    both = recipe("sft: {learning_rate: 1e-3, optimizer: {learning_rate: 1e-4}}\n")
    assert "learning_rate is here and in optimizer.learning_rate" in refused(both)


def test_overrides_lie_below_sets():
    loaded = load_recipe("smoke", {"sft": {"epochs": 2, "examples_per_step": 4}}, ["sft.epochs=3"])
    assert (loaded.sft.epochs, loaded.sft.examples_per_step) == (3, 4)
