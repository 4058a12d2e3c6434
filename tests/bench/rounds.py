"""A round of RL for `tests.bench.growth`: a synthetic rollout table, scored and updated by the real stages.

The model has one layer of 16 units: nearly all memory is the round's.
"""

import json
from pathlib import Path
from typing import Any

PROMPT, GROUP, VOCABULARY = 64, 16, 128
SHORTEST, LONGEST, MOST = 8, 96, 50
"""Tokens of a completion, and of one that has a reward."""


def model() -> Any:
    """A model whose weights and activations are small beside a round."""
    import dataclasses

    from rlhf.tuning.models.config import tiny

    smallest = {"num_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    return dataclasses.replace(tiny(VOCABULARY), **smallest, num_heads=1, num_kv_heads=1, head_dim=8)


def table(completions: int, policy: str) -> Any:
    """A rollout table in Arrow, of groups of 16; made without an object a token."""
    import numpy as np
    import pyarrow as pa

    from rlhf.tuning.rows import CompletionRow

    rng = np.random.default_rng(0)
    places = np.repeat(np.arange(completions // GROUP), GROUP)
    lengths = rng.integers(SHORTEST, LONGEST + 1, completions)
    prompts = np.full(completions, PROMPT)
    letters = "".join(chr(97 + i % 26) for i in range(4 * LONGEST))

    def lists(sizes: Any, values: Any, kind: pa.DataType) -> pa.Array:
        offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]), pa.int32())
        return pa.ListArray.from_arrays(offsets, pa.array(values), type=pa.list_(kind))

    # One prompt a group: token k of place p is a function of both.
    starts = np.repeat(np.cumsum(prompts) - prompts, prompts)
    of_prompts = (np.repeat(places, prompts) * 7 + np.arange(prompts.sum()) - starts) % VOCABULARY
    logps = rng.normal(-np.log(VOCABULARY), 0.01, lengths.sum()).astype(np.float32)
    columns: dict[str, Any] = {
        "place": places,
        "sample": np.tile(np.arange(GROUP, dtype=np.int32), completions // GROUP),
        "part": np.zeros(completions, np.int32),
        "prompt_id": [f"p{place}" for place in places],
        "prompt": [letters[: 4 * size] for size in prompts],
        "answer": ["7"] * completions,
        "metadata": ["{}"] * completions,
        "prompt_ids": lists(prompts, of_prompts.astype(np.int32), pa.int32()),
        "token_ids": lists(lengths, rng.integers(0, VOCABULARY, lengths.sum(), np.int32), pa.int32()),
        "logprobs": lists(lengths, logps, pa.float32()),
        "text": [letters[: 4 * size] for size in lengths],
        "stop": ["eos"] * completions,
        "policy": [policy] * completions,
        "seed": np.zeros(completions, np.int64),
        "temperature": np.ones(completions, np.float32),
    }
    return pa.table(columns, schema=CompletionRow.schema())


def commit(folder: Path, stage: str, name: str) -> Any:
    """A folder as an artifact of the store beside it."""
    from rlhf.stages.store.artifacts import Store

    manifest = {"stage": stage, "key": name, "config": {}, "inputs": {}, "seed": 0, "metrics": {}, "device": "cpu"}
    return Store(str(folder.parent / "store")).commit(folder, manifest | {"versions": {}})


def make(folder: Path, completions: int) -> Any:
    """Writes the policy and the rollout table, which it returns."""
    from rlhf.tuning.models import huggingface
    from rlhf.tuning.rows import write_arrow

    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    huggingface.save_decoder(folder / "base" / "model", model(), huggingface.random_params(model(), 0), ids)
    rows = table(completions, commit(folder / "base", "base", "base").digest)
    write_arrow(folder / "whole" / "rollouts" / "part-00000.parquet", rows)
    commit(folder / "whole", "rollout", "whole")
    return rows


def configs() -> dict[str, Any]:
    """Stages and their settings."""
    from rlhf.stages.score import stage as score
    from rlhf.stages.update import stage as update

    reward = {"function": "length_at_most", "arguments": {"tokens": MOST}}
    optimizer = {"learning_rate": 1e-6}
    values = {"algorithm": "grpo", "kl_coef": 0.0, "prompts_per_step": 32, "optimizer": optimizer}
    settings = {"score": {"rewards": {"short": reward}}, "update": values}
    return {
        name: (module, module.Config.model_validate_json(json.dumps(settings[name])))
        for name, module in (("score", score), ("update", update))
    }


def perform(folder: Path, stage: str, memory: dict[str, Any], end: str = "") -> None:
    """Runs a stage on the table. end: of the artifact's name, for one that is made again."""
    from rlhf.stages.store.artifacts import Store
    from tests.stages.support import context

    store = Store(str(folder / "store"))
    base = store.get("base", "base")
    inputs = {"policy": base, "tokenizer": base, "rollouts": store.get("rollout", "whole")}
    if stage == "update":
        inputs["scores"] = store.get("score", "whole-score")
    module, config = configs()[stage]
    made = f"whole-{stage}{end}"
    out = folder / made
    ctx = context(config, out, folder / f"{made}-work", inputs=inputs, memory=memory, log=lambda line: None)
    module.run(ctx)
    ctx.close()
    memory.clear()
    commit(out, stage, made)
