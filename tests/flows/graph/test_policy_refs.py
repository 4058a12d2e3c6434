"""A run starts from what it has started from, and a recipe that names the base starts from the base."""

import pytest

from rlhf.flows.graph.policy_refs import Held, Standing, standing_of
from rlhf.flows.recipe.reading import load_recipe
from rlhf.stages.store import registry
from rlhf.stages.store.registry import Policy
from tests.stages.gate.support import Lab


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


def promoted(lab: Lab, run: str) -> Held:
    """Makes the champion a policy of this run."""
    base, policy = lab.commit("base", {"of": run}), lab.policy(run, lab.data(1))
    of = Policy(run, "sft", policy.stage, policy.key, policy.digest, base.key, base.digest)
    entry = registry.promote(lab.store, "champion", of, "better")
    return Held("champion", entry.number, run, policy.stage, policy.key, policy.digest, base.key, base.digest)


def recipe(lab: Lab, *sets: str):
    return load_recipe("smoke", sets=[f"store={lab.store.url}", "gate.first=promote", *sets])


def recorded(lab: Lab, run: str, standing: Standing, decided: Held | None = None) -> None:
    """The record of a run that has found this, and whose gate has promoted the policy `decided`."""
    told: dict = {} if standing == Standing() else {"standing": standing.as_json()}
    if decided is not None:
        told["decision"] = {"decision": "promoted", "candidate": decided.digest}
    lab.store.write_json({"name": run, "recipe": {}, "nodes": {}} | told, "runs", run, "run.json")


def test_a_run_that_found_no_champion_goes_on_from_the_base_after_its_own_promotion(lab):
    own = promoted(lab, "night")
    recorded(lab, "night", Standing(), own)
    found = standing_of(recipe(lab, "start_from=champion"), lab.store, "night")
    assert (found.start, found.champion) == (None, None)
    # Another night starts from its policy.
    assert standing_of(recipe(lab, "start_from=champion"), lab.store) == Standing(own, own)


@pytest.mark.parametrize("run", ["second", "night"], ids=["another run's", "one of its own, by hand"])
def test_a_run_that_found_a_champion_goes_on_from_that_one_and_is_compared_with_the_one_of_now(lab, run):
    first = promoted(lab, "first")
    recorded(lab, "night", Standing(first, first))
    now = promoted(lab, run)
    found = standing_of(recipe(lab, "start_from=champion"), lab.store, "night")
    assert (found.start, found.champion) == (first, now)


def test_rollouts_of_a_run_that_started_from_a_champion_are_no_start_for_a_recipe_that_names_the_base(lab):
    champion = promoted(lab, "first")
    recorded(lab, "source", Standing(champion, champion))
    promoted(lab, "second")
    of_source = ("rl.rollouts_from=source",)
    assert standing_of(recipe(lab, *of_source, "start_from=base"), lab.store).start is None
    assert standing_of(recipe(lab, *of_source, "start_from=champion"), lab.store).start == champion
