"""What tests of scores share: rollouts of two prompts."""

import pytest

from rlhf.stages.store.artifacts import Store
from rlhf.tuning.rows import CompletionRow, write_table
from tests.stages.score.support import TEXTS


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
