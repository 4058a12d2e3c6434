"""Moments in the life of a stage, as they can be seen from outside, in its files."""

import random
from collections.abc import Callable
from pathlib import Path

ROUNDS = ("rollout", "score", "update")
TRAINED = ("sft", "preference", "reward")
STAGES = ("base", "prepare", *TRAINED, *ROUNDS, "evaluate", "export")
ROLLOUT_SHARDS, EVALUATE_SHARDS, SFT_STEPS = 8, 8, 9

Moment = tuple[str, Callable[[], bool]]


def moments(store: Path, stage: str, rng: random.Random) -> list[Moment]:
    """What one can wait for of a stage that is not made yet."""
    work = store / "work" / stage

    def some(folder: Path, pattern: str, count: int = 1) -> Callable[[], bool]:
        def seen() -> bool:
            try:
                return sum(1 for _ in folder.glob(pattern)) >= count
            except OSError:
                # Removed while it was listed.
                return False

        return seen

    there = len(list((store / "artifacts" / stage).glob("*")))
    found: list[Moment] = [
        ("has its lease", some(store / "leases", f"{stage}-*.json")),
        ("at work", some(work, "*/out*")),
        ("commits", some(store / "artifacts" / stage, "*", there + 1)),
        ("is committed", some(store / "artifacts" / stage, "*/manifest.json", there + 1)),
    ]
    if stage in ("rollout", "evaluate"):
        count = rng.randint(1, ROLLOUT_SHARDS - 1)
        found += [(f"has {count} shards", some(work, "*/rollouts-*/*.parquet", count))] * 4
    if stage in TRAINED:
        step = rng.randint(1, SFT_STEPS - 1 if stage == "sft" else 2)
        found += [(f"has checkpoint {step}", some(work, f"*/checkpoints/{step}"))] * 3
        found += [(f"writes checkpoint {step}", some(work, f"*/checkpoints/{step}*"))] * 2
    if stage == "score":
        found += [("has scores", some(work, "*/*.jsonl"))] * 5
    if stage == "prepare":
        found += [("has pieces", some(work, "*/pieces/*"))] * 3
    return found


def choose(store: Path, stage: str, rng: random.Random) -> Moment:
    """One of its moments."""
    return rng.choice(moments(store, stage, rng))
