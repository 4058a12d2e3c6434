"""Scores of rollouts: one table, the same whichever shards an earlier try has left."""

import pytest

from stages import score
from stages.contract.definition import Context
from stages.store.artifacts import Store
from tuning.rows import CompletionRow, ScoreRow, read_table, write_table

TEXTS = ["4", "5", "4 ", "boom", "4", "44"]


def shares(prompts, completions, **_):
    """A value that has no exact form in 32 bits; fails on one text."""
    if completions[0] == "boom":
        raise KeyError("boom")
    return [len(c) / 10 for c in completions]


@pytest.fixture
def rollouts(tmp_path):
    store = Store(str(tmp_path / "store"))
    folder = tmp_path / "made"
    rows = [
        CompletionRow(
            place=i // 3,
            sample=i % 3,
            prompt_id=f"p{i // 3}",
            answer="4",
            prompt_ids=[1],
            token_ids=[2] * len(text),
            logprobs=[0.0] * len(text),
            text=text,
            stop="length" if text == "44" else "eos",
        )
        for i, text in enumerate(TEXTS)
    ]
    write_table(folder / "rollouts" / "part-00000.parquet", rows, CompletionRow.schema())
    manifest = {"stage": "rollout", "key": "made", "config": {}, "inputs": {}, "seed": 0}
    return store.commit(folder, manifest | {"device": "cpu", "versions": {}, "metrics": {}})


def context(folder, rollouts, **settings):
    rewards = {
        "exact": score.Reward(weight=1.0),
        "shares": score.Reward(function=f"{__name__}:shares", weight=0.3),
    }
    config = score.Config(rewards=rewards, shard_completions=2, workers=1, **settings)
    out, work = folder / "out", folder / "work"
    out.mkdir(parents=True)
    work.mkdir(exist_ok=True)
    log = []
    ctx = Context(
        config=config, inputs={"rollouts": rollouts}, out=out, work=work, seed=0, log=log.append, memory={},
        progress=lambda *a, **k: None,
    )  # fmt: skip
    return ctx, log


def table(ctx):
    (path,) = (ctx.out / "scores").iterdir()
    return path, read_table([path], ScoreRow)


def test_a_failure_has_one_cause_and_leaves_the_sums(tmp_path, rollouts):
    ctx, _ = context(tmp_path / "a", rollouts, truncated="zero")
    metrics = score.run(ctx)
    _, rows = table(ctx)
    assert [(r.place, r.sample, r.prompt_id) for r in rows] == [(i // 3, i % 3, f"p{i // 3}") for i in range(6)]
    assert [r.rewards["exact"] for r in rows] == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert [r.failure for r in rows] == [None, None, None, "shares: KeyError: 'boom'", None, None]
    # The last one was cut off at max_tokens.
    assert [r.total for r in rows] == pytest.approx([1.03, 0.03, 1.06, None, 1.03, 0.0])
    assert metrics["failed"] == 1 / 6
    assert metrics["reward_exact"] == 0.5
    assert metrics["zero_variance"] == 0.0


def test_the_table_does_not_depend_on_which_shards_were_there(tmp_path, rollouts):
    ctx, _ = context(tmp_path / "a", rollouts)
    metrics = score.run(ctx)
    path, _ = table(ctx)
    first = path.read_bytes()

    # A second try, with the shards of the first but for one; without journals, so that shards alone are read.
    again, log = context(tmp_path / "b", rollouts)
    for shard in sorted(ctx.work.glob("scores-*"))[1:]:
        shard.rename(again.work / shard.name)
    assert score.run(again) == metrics
    assert table(again)[0].read_bytes() == first
    assert "resumed: 2 of 3 shards of scores were there" in log
