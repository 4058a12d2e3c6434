"""How `rlhf run` starts a run: with a private Prefect server only if a stage has to run."""

import pytest

from rlhf.flows.cli import launch
from rlhf.flows.recipe.reading import load_recipe


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The ways in which runs were started."""
    ways = []
    monkeypatch.setattr(launch, "run_with_prefect", lambda recipe, **_: ways.append("prefect"))
    monkeypatch.setattr("rlhf.flows.running.plain.run_plain", lambda recipe, **_: ways.append("plain"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "no-profiles"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return ways


def test_a_run_that_is_cached_starts_no_private_server(smoke_store, started, monkeypatch):
    recipe = load_recipe("smoke", sets=[f"store={smoke_store}"])
    launch.launch(recipe, False)
    launch.launch(recipe, False, force={"export"})
    launch.launch(load_recipe("smoke", sets=[f"store={smoke_store}", "seed=7"]), False)
    # A configured server shows cached runs too.
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    launch.launch(recipe, False)
    assert started == ["plain", "prefect", "prefect", "prefect"]
