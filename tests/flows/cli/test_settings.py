"""`rlhf settings`: every setting with type, default and sentence, as the models have them."""

import json

import pytest

from rlhf.flows.cli.run import with_options
from rlhf.flows.cli.settings import every_setting
from rlhf.flows.recipe.model import Recipe
from rlhf.flows.recipe.reading import RECIPES, load_recipe, with_sets
from tests.flows.commands import typed


def test_every_setting_has_a_type_a_default_and_a_sentence():
    settings = list(every_setting())
    assert len({s.place for s in settings}) == len(settings) > 200
    assert [s.place for s in settings if not (s.kind and s.default and len(s.text) > 5)] == []


OF_THE_GRAPH = {
    "rl.rollout.round",
    "rl.rollout.first",
    "rl.update.round",
    "rl.update.prompt_limit",
    "rl.update.completion_limit",
    "rl.update.store_state",
    "rl.update.store_weights",
    "rl.score.round_scale",
}


@pytest.mark.parametrize("name", sorted(p.stem for p in RECIPES.glob("*.yaml")))
def test_every_setting_of_a_resolved_recipe_is_listed(name):
    listed = {s.place for s in every_setting()}

    def check(values: dict, above: str) -> None:
        for key, value in values.items():
            place = f"{above}{key}"
            inside = [s for s in listed if s.startswith(f"{place}.")]
            assert place in listed or f"{above}*" in listed or place in OF_THE_GRAPH or above.endswith(".*."), place
            if isinstance(value, dict) and inside:
                starred = any(s.startswith(f"{place}.*") for s in inside)
                for inner in value.values() if starred else [value]:
                    check(inner, f"{place}.*." if starred else f"{place}.")

    check(load_recipe(name, sets=["gate={}"]).model_dump(mode="json"), "")


def test_a_section_alone_and_piped_one_line_each():
    lines = typed("settings", "rl.rollout").stdout.splitlines()
    assert lines[0].startswith("rl.rollout: section = {...}  Sampling of each round.")
    assert all(line.startswith("rl.rollout") for line in lines)
    assert any(line.startswith("rl.rollout.completions: integer (>= 1) = 8  ") for line in lines)
    assert "grpo" in typed("settings", "rl.update.algorithm").stdout
    assert "rl.score.rewards.*.clip: list of number (2) | null = null" in typed("settings", "rl.score").output
    assert "did you mean rl.update?" in typed("settings", "rl.updat", code=2).stderr
    defaults = {s.place: s.default for s in every_setting()}
    assert json.loads(defaults["rl.rounds"]) == Recipe().rl.rounds
    # The default of a section's own, not of the class that sections share.
    assert json.loads(defaults["rl.update.optimizer.learning_rate"]) == Recipe().rl.update.optimizer.learning_rate


def test_init_writes_the_usual_settings_with_their_comments(tmp_path):
    file = tmp_path / "mine.yaml"
    typed("init", file)
    assert load_recipe(str(file)) == load_recipe(str(file), sets=["seed=0"]) == Recipe(name="mine")
    lines = file.read_text().splitlines()
    texts = " ".join(line.strip().removeprefix("# ") for line in lines)
    listed = {s.place: s.text for s in every_setting()}
    for place in ("sft", "sft.epochs", "rl.rollout.completions", "rl.update.optimizer.learning_rate", "preference"):
        assert listed[place] in texts
    assert max(map(len, lines)) <= 100


def test_init_leaves_a_file_that_is_there(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("seed: 1\n")
    assert "exists; name another file" in typed("init", file, code=2).stderr
    assert file.read_text() == "seed: 1\n"


@pytest.mark.parametrize("store", ["/data/runs #2", "2026", "{a}", "~", 'a "b" \\c: ü'])
def test_the_store_of_a_command_is_its_text(store):
    values, _ = with_sets({}, with_options(None, store, None))
    assert values == {"store": store}
