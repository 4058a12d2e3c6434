"""One greedy completion of each prompt of a round, however often the round holds the prompt."""

from __future__ import annotations

from stages import greedy
from stages.contract.definition import Context
from stages.store.artifacts import Store
from tuning.rows import CompletionRow, write_table


def test_a_prompt_that_is_twice_in_a_round_is_sampled_once_at_its_first_place(tmp_path, monkeypatch):
    store = Store(str(tmp_path / "store"))
    rows = [
        CompletionRow(prompt_id=p, prompt_ids=[1], token_ids=[], logprobs=[], counter=i) for i, p in enumerate("ABA")
    ]
    write_table(tmp_path / "made" / "rollouts" / "part-00000.parquet", rows, CompletionRow.schema())
    rollouts = store.commit(tmp_path / "made", {"stage": "rollout", "key": "made", "metrics": {}})
    asked = []
    monkeypatch.setattr(greedy, "sample_rows", lambda ctx, prompts, draw: asked.extend(prompts) or [])
    context = Context(
        config=greedy.Config(), inputs={"rollouts": rollouts}, out=tmp_path / "out", work=tmp_path / "work", seed=0,
        progress=lambda *a, **k: None, log=print, memory={},
    )  # fmt: skip
    greedy.run(context)
    # In the order of the prompts' last rows, which decides the order of the table.
    assert [(counter, prompt.id) for counter, prompt in asked] == [(1, "B"), (0, "A")]
