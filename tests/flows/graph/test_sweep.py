"""The variants of a sweep: values, shared nodes, and the rounds at which halving stops settings."""

import math

import pytest

from rlhf.flows.graph.build import build
from rlhf.flows.graph.sweep import axes_of, identities, needs_of, rungs_of, variants_of
from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe


def names(*sets: str) -> dict[str, str]:
    return identities(build(load_recipe("smoke", sets=list(sets))))


def test_values_are_split_at_commas_and_ranges_count():
    axes = axes_of(["rl.update.kl_coef=0,1e-3", "seed=0..2", "sft={epochs: 1, tied: [1, 2]},null", 'name="a,b",c'])
    assert axes["rl.update.kl_coef"] == ["0", "1e-3"] and axes["seed"] == ["0", "1", "2"]
    assert axes["sft"] == ["{epochs: 1, tied: [1, 2]}", "null"] and axes["name"] == ['"a,b"', "c"]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["seed"], "expected different values"),
        (["seed="], "expected different values"),
        (["seed=1,1"], "expected different values"),
        (["seed=2..0"], "expected different values"),
        (["=1,2"], "expected different values"),
        (["sft=[1"], "not YAML"),
        (["sft.learning_rate=1,2", "sft.optimizer.learning_rate=3"], "appears twice"),
        (["store=a,b"], "store: the variants of a sweep share it"),
        (["workers.train={},null"], "workers: the variants of a sweep share it"),
        (["seed=0..1000000"], "1000 at most"),
    ],
    ids=str,
)
def test_an_axis_that_cannot_be_is_refused(texts, said):
    with pytest.raises(RecipeError, match=said):
        axes_of(texts)


def test_a_typo_in_a_place_is_refused_with_the_right_name():
    with pytest.raises(RecipeError, match=r"--set rl.update.optimizer.lerning_rate: unknown key.*learning_rate"):
        variants_of("smoke", axes_of(["rl.update.optimizer.lerning_rate=1e-3,2e-3"]), [])
    with pytest.raises(RecipeError, match="gate: each variant of a sweep could move the name"):
        variants_of("smoke", axes_of(["seed=0..1"]), ["gate={}"])
    with pytest.raises(RecipeError, match="evaluate is null"):
        variants_of("smoke", axes_of(["seed=0..1"]), ["evaluate=null"])


def test_nodes_are_one_if_their_settings_seed_and_ancestors_are():
    plain, other, seeded = names(), names("rl.update.kl_coef=0.02"), names("seed=1")
    same = {name for name in plain if plain[name] == other[name]}
    assert same == {
        "base", "prepare", "sft", "reward", "round-000.rollout", "round-000.score", "evaluate.base", "evaluate.sft"
    }  # fmt: skip
    # The model of smoke is random.
    assert not set(plain.values()) & set(seeded.values())
    one, two = (names(f"seed={seed}", "base.source=hub:org/name", "evaluate.temperature=0") for seed in (0, 1))
    assert {name for name in one if one[name] == two[name]} == {"base", "prepare", "evaluate.base"}
    # Execution settings and further nodes change nothing.
    assert names("evaluate.every=1", "rl.score.workers=2").items() >= plain.items()


def test_the_longest_chain_is_needed_most_then_what_most_runs_have():
    sets = {"one": [], "two": ["rl.update.kl_coef=0.02"], "long": ["rl.rounds=4"]}
    found = needs_of({name: build(load_recipe("smoke", sets=of)) for name, of in sets.items()})
    one, two, long = found.values()
    assert one["base"] == two["base"] == long["base"] and one["base"][:2] == (-15, -3)
    assert one["round-000.rollout"] == two["round-000.rollout"] < one["evaluate.base"]
    assert one["round-000.update"] == long["round-000.update"] < two["round-000.update"]
    assert min(one["sft"], one["reward"]) == one["sft"] and one["export"][0] == 0


def test_the_union_counts_each_stage_once(smoke_store):
    axes = axes_of(["rl.update.kl_coef=0.01,0.02", "rl.rounds=3,4"])
    first, longer, other, both = variants_of("smoke", axes, [f"store={smoke_store}"])
    nodes = len(first.planned)
    assert first.counts == (nodes, 0, 0) and len(first.first) == nodes
    # A fourth round, and a policy to evaluate and export; the third round now leaves its state to the fourth.
    assert longer.counts[0] + longer.counts[2] == len(longer.planned) and longer.counts[1] == 0
    assert other.counts == (8, 0, nodes - 8)
    assert both.counts[0] == 8 and both.counts[1] > 0
    assert [dict(v.values) for v in (first, both)] == [
        {"rl.update.kl_coef": "0.01", "rl.rounds": "3"}, {"rl.update.kl_coef": "0.02", "rl.rounds": "4"}
    ]  # fmt: skip


def test_halving_leaves_one_setting_for_the_last_rounds():
    assert rungs_of(8, 4) == [2, 4, 8] and rungs_of(100, 8) == [12, 24, 48, 96, 100]
    assert rungs_of(3, 12) == [1, 2, 3] and rungs_of(1, 4) == [1] and rungs_of(5, 1) == [5]
    for rounds in range(1, 40):
        for settings in range(2, 40):
            rungs = rungs_of(rounds, settings)
            assert rungs[-1] == rounds and rungs == sorted(set(rungs))
            left = settings
            for _ in rungs[:-1]:
                left = math.ceil(left / 2)
            assert left == 1 or rounds < settings
