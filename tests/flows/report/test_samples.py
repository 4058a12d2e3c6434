"""Samples side by side count a problem as the evaluation does: what its judge does not apply to is left out."""

from __future__ import annotations

from rlhf.flows.report.run_view import RunView
from rlhf.flows.report.samples import samples
from rlhf.stages.store.artifacts import Store
from rlhf.tuning.rows import CompletionRow, VerdictRow, write_table


def evaluated(store, folder, label, scores_PS):
    """An evaluation with these verdicts of its judge: a number, None where it does not apply, or why it failed."""
    names = [
        {"place": p, "prompt_id": f"p{p}", "sample": s} for p, row in enumerate(scores_PS) for s in range(len(row))
    ]
    rows = [
        CompletionRow(
            **name, prompt="?", text=f"{label} {name['sample']}", prompt_ids=[1], token_ids=[2], logprobs=[0.0]
        )
        for name in names
    ]
    verdicts = [
        VerdictRow(
            **name, group="g", judge="j", answer=None,
            score=None if isinstance(score, str) else score, failure=score if isinstance(score, str) else None,
        )
        for name, score in zip(names, [score for row in scores_PS for score in row], strict=True)
    ]  # fmt: skip
    write_table(folder / label / "rollouts" / "a.parquet", rows, CompletionRow.schema())
    write_table(folder / label / "verdicts" / "a.parquet", verdicts, VerdictRow.schema())
    about = {"stage": "evaluate", "key": label, "config": {"judge": "j"}, "inputs": {}, "metrics": {}}
    return store.commit(folder / label, about)


def test_a_completion_that_the_judge_does_not_apply_to_is_no_loss(tmp_path):
    store = Store(str(tmp_path / "store"))
    columns = {
        "sft": [[1.0, 1.0], [1.0, 1.0], [None, 0.0], [None, None], [1.0, None]],
        "rl": [[1.0, None], [1.0, "boom"], [1.0, 1.0], [1.0, 1.0], [None, 1.0]],
    }
    made = {f"evaluate.{label}": evaluated(store, tmp_path, label, scores) for label, scores in columns.items()}
    nodes = {name: {"stage": a.stage, "key": a.key, "state": "made", "digest": a.digest} for name, a in made.items()}
    found = samples(RunView(store, {"nodes": nodes}), ["sft", "rl"])
    # The second is lost by a failure, the third gained; the fourth is judged under one policy alone.
    assert (found["gained"], found["lost"], found["same"]) == (1, 1, 2)
    policies = [card["policies"] for card in found["cards"]]
    cards = {(of[0]["text"], *((p["score"], p["mean"], p["count"]) for p in of)) for of in policies}
    assert cards == {
        ("sft 1", (0.0, 0.0, 1), (1.0, 1.0, 2)),
        ("sft 1", (1.0, 1.0, 2), (0.0, 0.5, 2)),
        ("sft 0", (1.0, 1.0, 2), (1.0, 1.0, 1)),
        ("sft 1", (None, 1.0, 1), (1.0, 1.0, 1)),
    }
