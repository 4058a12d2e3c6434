"""Memory of a round of RL: scoring and updating a synthetic rollout table, above what the process holds before.

`python -m tests.bench.round_memory --completions 16384 --write` measures each stage in a process of its own and writes
`results/round_memory.json`. Completions have 110 to 500 tokens, the model one layer of 16 units: nearly all memory is
the round's. Before a measurement a small round of the same shapes compiles and loads everything.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "round_memory.json"
SHORTEST, LONGEST, PROMPT, GROUP, VOCABULARY = 110, 500, 64, 16, 128
MOST = 250
"""Tokens up to which a completion has a reward."""
WARM = 1024
"""Completions of the round before the measured one: two optimizer steps, with the programs of all others."""
LIMIT = 4.0
"""Most memory in units of the table's bytes."""


def model() -> Any:
    """A model whose weights and activations are small beside a round."""
    import dataclasses

    from rlhf.tuning.models.config import tiny

    smallest = {"num_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    return dataclasses.replace(tiny(VOCABULARY), **smallest, num_heads=1, num_kv_heads=1, head_dim=8)


def table(completions: int, policy: str, given: Any = None) -> Any:
    """A rollout table in Arrow, of groups of 16; made without an object a token. given: other lengths."""
    import numpy as np
    import pyarrow as pa

    from rlhf.tuning.rows import CompletionRow

    rng = np.random.default_rng(0)
    places = np.repeat(np.arange(completions // GROUP), GROUP)
    # Each group has the same lengths in another order: every step then has the shapes of the round before.
    spread = np.linspace(SHORTEST, LONGEST, GROUP).astype(np.int64)
    lengths = np.concatenate([rng.permutation(spread) for _ in range(completions // GROUP)])
    prompts = np.full(completions, PROMPT)
    lengths = lengths if given is None else given[:completions]
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


def make(folder: Path, completions: int, lengths: Any = None) -> dict[str, Any]:
    """Writes the policy and the rollout tables, with lengths or its own; the sizes of the measured one."""
    from rlhf.tuning.models import huggingface
    from rlhf.tuning.rows import write_arrow

    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    huggingface.save_decoder(folder / "base" / "model", model(), huggingface.random_params(model(), 0), ids)
    base, sizes = commit(folder / "base", "base", "base"), {}
    for name, count in (("warm", WARM), ("whole", completions)):
        rows = table(count, base.digest, lengths)
        write_arrow(folder / name / "rollouts" / "part-00000.parquet", rows)
        sizes = {
            "completions": count,
            "tokens": len(rows["token_ids"].combine_chunks().values),
            "table_mb": round(rows.nbytes / 2**20, 1),
            "file_mb": round((folder / name / "rollouts" / "part-00000.parquet").stat().st_size / 2**20, 1),
        }
        commit(folder / name, "rollout", name)
    return sizes


def configs(most: int = MOST) -> dict[str, Any]:
    """Stages and their settings."""
    from rlhf.stages.score import stage as score
    from rlhf.stages.update import stage as update

    reward = {"function": "length_at_most", "arguments": {"tokens": most}}
    optimizer = {"learning_rate": 1e-6}
    values = {"algorithm": "grpo", "kl_coef": 0.0, "prompts_per_step": 32, "optimizer": optimizer}
    settings = {"score": {"rewards": {"short": reward}}, "update": values}
    return {
        name: (module, module.Config.model_validate_json(json.dumps(settings[name])))
        for name, module in (("score", score), ("update", update))
    }


def perform(
    folder: Path, stage: str, name: str, memory: dict[str, Any], end: str = "", most: int = MOST
) -> dict[str, Any]:
    """Runs a stage on a table; its metrics. end: of the artifact's name, for one that is made again."""
    from rlhf.stages.store.artifacts import Store
    from tests.stages.support import context

    store = Store(str(folder / "store"))
    base = store.get("base", "base")
    inputs = {"policy": base, "tokenizer": base, "rollouts": store.get("rollout", name)}
    if stage == "update":
        inputs["scores"] = store.get("score", f"{name}-score")
    module, config = configs(most)[stage]
    made = f"{name}-{stage}{end}"
    out = folder / made
    ctx = context(config, out, folder / f"{made}-work", inputs=inputs, memory=memory, log=lambda line: None)
    metrics = module.run(ctx)
    ctx.close()
    memory.clear()
    commit(out, stage, made)
    return metrics


def resident(name: str) -> float:
    """`VmRSS` or its peak `VmHWM` of this process in MB (Linux)."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(name)) / 1024


def measure(folder: Path, stage: str) -> dict[str, Any]:
    """Peak of a stage above what the process holds after a small round."""
    from rlhf.stages.common.compilation import configure_jax

    configure_jax()
    memory: dict[str, Any] = {}
    perform(folder, stage, "warm", memory)
    gc.collect()
    before = resident("VmRSS")
    # The peak is counted from here on.
    Path("/proc/self/clear_refs").write_text("5")
    started, cpu = time.monotonic(), time.process_time()
    metrics = perform(folder, stage, "whole", memory)
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    found = {"before_mb": round(before), "above_mb": round(resident("VmHWM") - before), "cpu_s": round(cpu, 1)}
    told = {"score": ("completions", "reward"), "update": ("steps", "loss")}[stage]
    return found | {"seconds": round(seconds, 1)} | {name: metrics[name] for name in told}


def child(*arguments: str) -> dict[str, Any]:
    """What a process of this module prints."""
    command = [sys.executable, "-m", "tests.bench.round_memory", *arguments]
    return json.loads(subprocess.check_output(command, text=True, env=dict(os.environ)).splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.round_memory", description=__doc__)
    parser.add_argument("--completions", type=int, default=2048, help="a multiple of 16")
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.name}")
    parser.add_argument("--stages", nargs="*", default=["score", "update"])
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "WHAT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        folder, what = Path(args.child[0]), args.child[1]
        print(json.dumps(make(folder, args.completions) if what == "make" else measure(folder, what)), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = child("--child", folder, "make", "--completions", str(args.completions))
        for stage in args.stages:
            found[stage] = child("--child", folder, stage)
            found[stage]["times_table"] = round(found[stage]["above_mb"] / found["table_mb"], 2)
            print(json.dumps({stage: found[stage]}), flush=True)
    print(json.dumps(found), flush=True)
    if args.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(any(found[stage]["times_table"] > LIMIT for stage in args.stages))


if __name__ == "__main__":
    main()
