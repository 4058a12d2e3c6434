"""Nights of a tiny recipe: data that grows, a policy that gets better or worse by it, and the registry between them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.stages.store import registry
from rlhf.stages.store.artifacts import Store

OPTIMIZER = {"learning_rate": 0.01, "schedule": "constant", "warmup_steps": 0}
RECIPE: dict[str, Any] = {
    "name": "night",
    "base": {"source": "random:tiny"},
    "data": {"source": "records.jsonl", "system_prompt": None},
    "sft": {"epochs": 4, "examples_per_step": 8, "optimizer": OPTIMIZER},
    "rl": None,
    "evaluate": {"samples": 2, "max_tokens": 4, "shard_prompts": 32},
    "gate": {},
}
GOOD, BAD = "7", "5"
"""What a record teaches to answer; the right answer is always 7."""


def records(count: int, answer: str, start: int = 0) -> list[dict[str, Any]]:
    """Records to train on, each with a prompt of its own."""
    return [record(start + i, answer, "sft") for i in range(count)]


def record(number: int, answer: str, split: str) -> dict[str, Any]:
    prompt = f"{number * 7919 % 10_000}?"
    return {"id": f"r{number:05d}", "prompt": prompt, "completion": answer, "answer": GOOD, "split": split}


HELD_OUT = [record(9_000 + i, GOOD, "heldout") for i in range(24)]


class Nights:
    """A recipe, its data and its store in a folder."""

    def __init__(self, folder: Path, rlhf: Any, store: str | None = None, **recipe: Any):
        self.folder, self.rlhf = folder, rlhf
        self.url = store or str(folder / "store")
        self.store = Store(self.url)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "night.yaml").write_text(json.dumps(RECIPE | recipe | {"store": self.url}))
        self.has(records(32, GOOD))

    def has(self, rows: Sequence[dict[str, Any]]) -> None:
        """Writes the data: these records and the held-out ones."""
        (self.folder / "records.jsonl").write_text("\n".join(map(json.dumps, [*HELD_OUT, *rows])))

    def arguments(self, name: str, *more: str) -> list[str]:
        return ["run", str(self.folder / "night.yaml"), "--no-prefect", "--name", name, *more]

    def run(self, name: str, *more: str, code: int = 0) -> dict[str, Any]:
        """Runs the recipe as a command; its record."""
        self.rlhf(*self.arguments(name, *more), code=code, cwd=self.folder)
        return self.record(name)

    def record(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.store.read_json("runs", name, "run.json")
        return found

    def champion(self) -> str:
        """The run of the champion, with the number of its entry."""
        entry = registry.current(self.store, "champion")
        return "none" if entry is None else f"{entry.number} {entry.policy.run}"


def states(record: dict[str, Any], *wanted: str) -> set[str]:
    """Names of the nodes in these states."""
    return {name for name, entry in record["nodes"].items() if entry["state"] in wanted}
