"""`plan` before `run`: hit or miss for each node, and why it misses; nothing is run and nothing written."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rlhf.flows.graph.plan import Planned, plan
from rlhf.flows.recipe.reading import load_recipe
from rlhf.stages.store.artifacts import Store
from tests.support import RLHF, copy_project


def planned(store: Path, *sets: str, force: set[str] | None = None) -> dict[str, Planned]:
    recipe = load_recipe("smoke", sets=[f"store={store}", *sets])
    return {p.node.name: p for p in plan(recipe, force)}


def states(found: dict[str, Planned], state: str) -> set[str]:
    return {name for name, p in found.items() if p.state == state}


def tree(store: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in sorted(store.rglob("*"))}


def test_in_an_empty_store_the_first_stage_is_missing_and_the_rest_waits(tmp_path):
    found = planned(tmp_path / "store")
    assert states(found, "miss") == {"base"}
    assert found["base"].reasons == ["never made"]
    assert found["sft"].reasons == ["after base, prepare"]
    assert not (tmp_path / "store").exists()


def test_a_changed_setting_is_named_with_both_values_and_what_follows_waits(smoke_store):
    before = tree(smoke_store)
    found = planned(smoke_store, "sft.optimizer.learning_rate=0.001")
    assert states(found, "hit") == {"base", "prepare", "reward", "evaluate.base"}
    assert states(found, "miss") == {"sft"}
    assert found["sft"].reasons == ["sft.optimizer.learning_rate: 0.003 -> 0.001"]
    assert found["round-000.rollout"].reasons == ["after sft"]
    assert states(found, "waits") == set(found) - states(found, "hit") - {"sft"}
    assert tree(smoke_store) == before


def test_an_input_that_is_read_no_more_has_no_other_content(smoke_store):
    without = planned(smoke_store, "rl.update.kl_coef=0")["round-000.update"]
    assert without.reasons == ["rl.update.kl_coef: 0.01 -> 0.0", "input reference is read no more"]


def test_the_time_of_a_plan_grows_with_rounds_that_were_never_made(rlhf_here, smoke_store):
    def expected(rounds: int, *sets: str) -> dict:
        command = ["plan", "smoke", "--store", smoke_store, "--json", "--set", f"rl.rounds={rounds}", *sets]
        return json.loads(rlhf_here(*command).stdout)

    few, many = expected(4), expected(200)
    assert few["untimed"] == many["untimed"] == 0
    made = {p.node.name: p.seconds for p in planned(smoke_store).values()}
    in_round = sum(made[f"round-{i:03d}.{stage}"] for i in range(3) for stage in ("rollout", "score", "update")) / 3
    assert many["seconds"] - few["seconds"] == pytest.approx(196 * in_round, rel=0.01)
    # Of a stage of which none was made nothing is known.
    assert expected(3, "--set", "rl.refills=1")["untimed"] == 3


def test_the_environment_is_named_as_the_recipe_has_it(smoke_store):
    found = planned(smoke_store, "environment={name: guess}")
    for name in ("round-000.rollout", "evaluate.base"):
        reasons = found[name].reasons
        assert any(r.startswith("environment: null -> {") for r in reasons), name
        assert not any("rollout.environment" in r or "evaluate.environment" in r for r in reasons), name


@pytest.mark.parametrize(
    ("setting", "reason", "missing", "hits"),
    [
        ("rl.score.rewards.digits.weight=0.25", "0.5 -> 0.25", "round-000.score", "round-000.rollout sft reward"),
        ("rl.rollout.shard_prompts=2", "4 -> 2", "round-000.rollout", "sft reward evaluate.base evaluate.sft"),
        ("rl.update.clip_high=0.3", "0.2 -> 0.3", "round-000.update", "round-000.rollout round-000.score evaluate.sft"),
        ("data.sft_fraction=0.3", "0.2 -> 0.3", "prepare", "base"),
        ("evaluate.samples=3", "2 -> 3", "evaluate.base evaluate.sft evaluate.rl", "sft round-002.update export"),
        ("rl.rounds=4", "never made", "round-003.rollout", "round-002.update"),
    ],
)
def test_a_change_in_the_middle_keeps_what_comes_before(smoke_store, setting, reason, missing, hits):
    found = planned(smoke_store, setting)
    assert states(found, "miss") == set(missing.split())
    name = setting.partition("=")[0]
    for node in missing.split():
        assert found[node].reasons == [reason if reason == "never made" else f"{name}: {reason}"]
    assert set(hits.split()) <= states(found, "hit")


def test_a_forced_node_is_a_miss(smoke_store):
    found = planned(smoke_store, force={"reward"})
    assert found["reward"].state == "miss"
    assert found["reward"].reasons == ["forced"]


def test_an_artifact_that_is_gone_or_damaged_is_a_miss_and_stays_where_it_is(store):
    artifacts = Store(str(store))
    entry = artifacts.read_json("runs", "first", "run.json")["nodes"]["sft"]
    weights = Path(artifacts.get("sft", entry["key"]).local("model/model.safetensors"))
    os.truncate(weights, 10)
    before = tree(store)
    found = planned(store)
    assert found["sft"].reasons == ["its artifact is gone or damaged"]
    assert tree(store) == before
    shutil.rmtree(weights.parents[1])
    assert planned(store)["sft"].reasons == ["its artifact is gone or damaged"]


def test_work_in_progress_is_told(store):
    entry = Store(str(store)).read_json("runs", "first", "run.json")["nodes"]["sft"]
    shutil.rmtree(store / "artifacts" / "sft")
    (store / "work" / "sft" / entry["key"] / "checkpoints").mkdir(parents=True)
    assert any("resumes from work in progress" in r for r in planned(store)["sft"].reasons)


def test_a_failed_try_does_not_hide_what_changed(store):
    """The newest entry failed; the plan still compares with the newest that was made."""
    artifacts = Store(str(store))
    record = artifacts.read_json("runs", "first", "run.json")
    later = record | {"name": "later", "started": "2999-01-01T00:00:00+00:00", "status": "failed"}
    later["nodes"] = record["nodes"] | {"sft": {"stage": "sft", "key": "f" * 64, "state": "failed"}}
    artifacts.write_json(later, "runs", "later", "run.json")
    found = planned(store, "sft.optimizer.learning_rate=0.001")
    assert found["sft"].reasons == ["sft.optimizer.learning_rate: 0.003 -> 0.001"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of this project's code, to be edited."""
    folder = tmp_path_factory.mktemp("project")
    copy_project(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("stages/sft.py", "    config, base = ", "    # A remark.\n    config, base = ", " 0 miss, 0 wait"),
        ("stages/sft.py", '"""Supervised fine-tuning."""', '"""SFT."""', " 0 miss, 0 wait"),
        ("stages/sft.py", "return metrics |", "return {} | metrics |", "+     return {} | metrics |"),
        ("tuning/losses/sft.py", "\n\n\ndef ", "\n\n\nX = 1\n\n\ndef ", "code rlhf.tuning.losses.sft changed"),
    ],
    ids=["comment", "docstring", "stage", "core"],
)
def test_an_edit_of_the_code_is_named_and_a_remark_is_none(smoke_store, project, file, old, new, expected):
    path = project / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    try:
        command = [RLHF, "plan", "smoke", "--set", f"store={smoke_store}"]
        env = os.environ | {"PYTHONPATH": str(project / "src")}
        out = subprocess.check_output(command, cwd=project, env=env, text=True)
    finally:
        path.write_text(text)
    assert expected in out


@pytest.mark.slow
def test_a_module_that_has_moved_and_changed_is_named_at_both_places(smoke_store, project, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(project, moved, symlinks=True)
    target = moved / "tuning/models/nll.py"
    (moved / "tuning/losses/sft.py").rename(target)
    for path in moved.rglob("*.py"):
        path.write_text(path.read_text().replace("rlhf.tuning.losses.sft", "rlhf.tuning.models.nll"))
    target.write_text(target.read_text() + "\n\nX = 1\n")
    command = [RLHF, "plan", "smoke", "--set", f"store={smoke_store}"]
    out = subprocess.check_output(command, cwd=moved, env=os.environ | {"PYTHONPATH": str(moved / "src")}, text=True)
    assert "code rlhf.tuning.losses.sft gone" in out and "code rlhf.tuning.models.nll new" in out
