"""A night never gets the name of another one: Prefect draws its words without looking at those that it has drawn."""

import pytest

from rlhf.flows.pipeline import free_name
from rlhf.flows.recipe.model import Recipe
from rlhf.stages.store.artifacts import Store


@pytest.fixture
def flow_run(monkeypatch):
    def is_called(name: str, attempt: int = 1) -> None:
        # Prefect's own way to say what a run is called where there is none.
        monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__NAME", name)
        monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "0198c0de-0000-7000-8000-00000badcafe")
        monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", str(attempt))

    return is_called


def test_a_run_is_called_as_its_flow_run_and_otherwise_where_that_is_taken(tmp_path, flow_run):
    recipe = Recipe(name="night", store=str(tmp_path))
    flow_run("tall-owl")
    assert free_name(recipe, None) == "night-tall-owl"
    Store(recipe.store).write_json(
        {"name": "night-tall-owl", "status": "finished"}, "runs", "night-tall-owl", "run.json"
    )
    assert free_name(recipe, None) == "night-tall-owl-0badcafe"
    # A name that was asked for is that of a run that goes on, or is refused.
    assert free_name(recipe, "night-tall-owl") == "night-tall-owl"
    flow_run("tall-owl", attempt=2)
    # Of a second attempt the name is that of the first, which has a record.
    assert free_name(recipe, None) == "night-tall-owl-2"
