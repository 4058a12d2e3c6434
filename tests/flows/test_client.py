"""`rlhf.open` gives what a run has as data frames, reads local and remote stores, and writes nothing."""

import pytest

import rlhf
from rlhf.flows.records import UnknownRun
from rlhf.stages.store.artifacts import Store
from tests.flows.report.support import Maker, recipe_of

pytest.importorskip("pandas")


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def opened(request, tmp_path, monkeypatch):
    """A store with one run, here and on an S3 server."""
    monkeypatch.setenv("RLHF_SCRATCH", str(tmp_path / "scratch"))
    url = str(tmp_path / "store") if request.param == "local" else f"{request.getfixturevalue('s3')}/client"
    Maker(Store(url), recipe_of(url), tmp_path, "demo-a").run()
    return rlhf.open(url)


def test_a_run_is_read_as_frames_from_local_and_remote_stores(opened):
    runs = opened.runs()
    assert list(runs.index) == ["demo-a"] and runs["scores.rl"].iloc[0] == pytest.approx(33 / 40)
    assert str(runs.started.dtype).startswith("datetime64")
    run = opened.run("demo")
    assert (run.name, run.record["status"]) == ("demo-a", "finished") and "demo-a: finished" in repr(run)
    assert list(run.rounds().index) == list(range(8)) and run.rounds().reward.is_monotonic_increasing
    assert len(run.steps("sft")) == 24 and run.nodes().stage["round-003.update"] == "update"
    samples = run.samples(0)
    assert len(samples) == 16 and samples.total.isna().sum() == 1 and "prompt_id" in samples
    assert list(run.scores().index) == ["base", "sft", "rl"]
    assert run.answers("rl").score.mean() == pytest.approx(run.scores().score["rl"])
    assert run.path("export", "content.json").is_file()


def test_an_empty_system_prompt_is_none(opened, monkeypatch):
    asked = []
    monkeypatch.setattr("rlhf.stages.serving.policy.answers", lambda *given: asked.append(given[-1]))
    run = opened.run("demo")
    run.record["recipe"]["data"]["system_prompt"] = "of the recipe"
    for system in (None, "", "other"):
        run.generate(["1 + 1 ="], system=system)
    assert asked == ["of the recipe", "", "other"]


def test_reading_writes_nothing(smoke_store):
    def tree():
        return {path: path.stat().st_mtime_ns for path in smoke_store.rglob("*")}

    before = tree()
    store = rlhf.open(str(smoke_store))
    run = store.run()
    assert len(run.samples(2)) == len(run.table("round-002.rollout", "rollouts/")) == 32 and len(store.runs()) == 1
    assert tree() == before


def test_missing_things_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no store at .*none: `rlhf run` creates one"):
        rlhf.open(str(tmp_path / "none"))
    store = rlhf.open(str(tmp_path))
    assert len(store.runs()) == 0
    with pytest.raises(UnknownRun, match="no run or recipe 'x'"):
        store.run("x")
    with pytest.raises(UnknownRun, match="no sweep x in .*; `rlhf sweep` makes one"):
        store.sweep("x")
