"""Stages by themselves, on a model of under a million parameters and on rows that it learns at once."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.tuning import multihost
from rlhf.tuning.data.flat import write_arrays
from rlhf.tuning.data.pipeline import SCHEMAS
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.rows import read_table
from tests.stages.support import context


@dataclasses.dataclass
class Folder:
    """Stands in for an artifact."""

    path: Path
    digest: str
    stage: str = "base"
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)
    url = "somewhere"

    def local(self, part: str = "") -> Path:
        return self.path / part

    def has(self, part: str) -> bool:
        return (self.path / part).exists()

    def part_digest(self, parts: tuple[str, ...]) -> str:
        return self.digest


def perform(
    module: Any, config: Any, folder: Path, memory: dict[str, Any], seed: int = 3, **inputs: Folder
) -> tuple[Any, Folder]:
    """Runs a stage; returns its metrics and what it made."""
    given = {"inputs": inputs, "seed": seed, "memory": memory, "is_primary": multihost.is_primary()}
    ctx = context(config, folder / "out", folder / "work", **given)
    return module.run(ctx), Folder(ctx.out, str(folder), module.STAGE.name, {"config": config.model_dump()})


def rows(folder: Folder, part: str, kind: Any) -> list[Any]:
    """The rows of a table."""
    return read_table(sorted(folder.local(part).glob("*.parquet")), kind)


def lines_of(made: Folder) -> list[dict[str, Any]]:
    """The metrics that a stage has logged, by step."""
    return [json.loads(line) for line in (made.path / "logs" / "metrics.jsonl").read_text().splitlines()]


TOKENIZER = byte_tokenizer()
GOOD, BAD = "abcab", "zyxzyxzy"


def ids(text: str, end: bool = True) -> list[int]:
    """Tokens of a text, with the end of the turn."""
    return TOKENIZER.encode(text, add_special_tokens=False) + [TOKENIZER.eos_token_id] * end


def rows_of(name: str, count: int, start: int = 0) -> list[dict[str, Any]]:
    """Prompts of their own, whose good answers look alike, as do the bad ones."""
    found = []
    for i in range(start, start + count):
        row = {"id": f"{i:04d}", "prompt_ids": ids(f"{i * 37 % 1000}?", end=False), "prompt": str(i)}
        good, bad = GOOD[: 2 + i % 4], BAD[: 3 + i % 5]
        if "labelled" in name:
            kind = i % 3 > 0
            found.append(row | {"completion_ids": ids(good if kind else bad), "label": kind, "completion": "c"})
        elif "preference" in name:
            pair = {"chosen_ids": ids(good), "rejected_ids": ids(bad), "chosen": "c", "rejected": "r"}
            found.append(row | pair | {"margin": None})
        else:
            found.append(row | {"completion_ids": ids(good), "completion": "c", "completion_mask": None})
    return found


def data(folder: Path, **tables: list[dict[str, Any]]) -> Folder:
    """A table of each name, as the stage prepare writes it."""
    for name, rows in tables.items():
        (folder / name).mkdir(parents=True)
        table = pa.Table.from_pylist(rows, pa.schema(list(SCHEMAS[name].items())))
        pq.write_table(table, folder / name / "part-00000.parquet")
        write_arrays(folder / name)
    return Folder(folder, str(folder))


FAST = {"learning_rate": 3e-3, "schedule": "constant", "warmup_steps": 0}


def settings(module: Any, **values: Any) -> Any:
    """Settings of a stage that trains fast, eight examples a step where no tokens are given."""
    values = {"optimizer": FAST} | ({} if "tokens_per_step" in values else {"examples_per_step": 8}) | values
    return module.Config.model_validate_json(json.dumps(values))
