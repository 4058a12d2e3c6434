"""The choice among policies has the content of the one that is best by its evaluation, and loads as that one."""

import json

import pytest

from rlhf.stages import select
from rlhf.stages.store.artifacts import Store
from rlhf.stages.update.stage import FATES
from rlhf.tuning.rows import FateRow, write_table
from tests.stages.support import context


def commit(store, folder, stage, key, files, **manifest):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return store.commit(folder, {"stage": stage, "key": key, "config": {}, "inputs": {}, "metrics": {}} | manifest)


@pytest.fixture
def candidates(tmp_path):
    """Policies of three rounds, with weights that are no content, and their scores: the second and third are alike."""
    store, inputs = Store(str(tmp_path / "store")), {}
    for number, score in ((1, 0.2), (3, 0.7), (5, 0.7)):
        name = f"{number:03d}"
        files = {"policy.json": f"p{number}", "adapter/config.json": f"a{number}", "state/model/x": "w"}
        fates = [FateRow(place=0, sample=0, prompt_id="p", fate="trained", advantage=score)]
        write_table(tmp_path / f"u{name}" / FATES / "part-00000.parquet", fates, FateRow.schema())
        inputs[f"candidate_{name}"] = commit(store, tmp_path / f"u{name}", "update", f"u{name}", files)
        scores = {"score": score, "pass_at_2": 1 - score, "maj_at_2": None, "judges": {"form": {"score": 1 / number}}}
        made = commit(store, tmp_path / f"e{name}", "evaluate", f"e{name}", {"scores.json": json.dumps(scores)})
        inputs[f"evaluation_{name}"] = made
    return store, inputs


def chosen(tmp_path, candidates, metric):
    store, inputs = candidates
    ctx = context(select.Config(metric=metric), tmp_path / "out", inputs=inputs)
    metrics = select.run(ctx)
    refs = {name: {"stage": a.stage, "key": a.key, "digest": a.digest} for name, a in inputs.items()}
    return ctx, store.commit(ctx.out, {"stage": "select", "key": "s", "config": {}, "inputs": refs, "metrics": metrics})


def test_of_equals_the_earliest_wins_also_behind_round_999(tmp_path, candidates):
    store, inputs = candidates
    for kind in ("candidate", "evaluation"):
        inputs[f"{kind}_1000"] = inputs.pop(f"{kind}_003")
    _, artifact = chosen(tmp_path, (store, inputs), "score")
    assert artifact.metrics["round"] == 5


@pytest.mark.parametrize(("metric", "number"), [("score", 3), ("pass_at_2", 1), ("form", 1)])
def test_the_highest_wins_and_of_equals_the_earliest(tmp_path, candidates, metric, number):
    ctx, artifact = chosen(tmp_path, candidates, metric)
    best = candidates[1][f"candidate_{number:03d}"]
    # Equal digests: what has read the policy itself is found again.
    assert artifact.digest == best.digest and not artifact.has("state/")
    assert artifact.metrics["round"] == number and set(artifact.metrics["candidates"]) == {"001", "003", "005"}
    ctx.memory[f"decoder:{best.digest}"] = ("config", "parameters")
    assert select.restore(ctx, artifact) == ("config", "parameters")


def test_a_metric_that_an_evaluation_lacks_is_named_with_those_that_it_has(tmp_path, candidates):
    with pytest.raises(ValueError, match="has no number for maj_at_2; it has form, judges, maj_at_2, pass_at_2, score"):
        chosen(tmp_path, candidates, "maj_at_2")
