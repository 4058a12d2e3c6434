"""Reward functions in processes that can be killed, one sample a call (R20)."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import math
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from pebble import ProcessExpired, ProcessPool

from tuning.rewards.functions import find


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A reward, or why there is none."""

    value: float | None
    failure: str | None = None


def _one(name: str, arguments: dict[str, Any], sample: dict[str, Any]) -> float | None:
    columns = {k: [v] for k, v in sample.items() if k not in ("prompt", "completion")}
    (value,) = find(name)([sample["prompt"]], [sample["completion"]], **columns, **arguments)
    return None if value is None else float(value)


def evaluate(
    name: str,
    arguments: dict[str, Any],
    samples: Sequence[dict[str, Any]],
    *,
    seconds: float,
    workers: int = 2,
    done: Callable[[int], None] = lambda n: None,
) -> list[Outcome]:
    """The reward of each sample: {prompt, completion, completion_ids, answer, metadata}.

    A sample that takes longer than `seconds`, raises, ends its process, or gives no finite number
    is an Outcome with a reason; the others are not touched by it.
    """
    outcomes: list[Outcome] = []
    pool = _pool(workers)
    # The first call of a process also pays for its imports; those do not count.
    for warm in [pool.schedule(_known, args=(name,)) for _ in range(workers)]:
        warm.result()
    futures = [pool.schedule(_one, args=(name, arguments, s), timeout=seconds) for s in samples]
    for number, future in enumerate(futures, start=1):
        outcomes.append(_outcome(future, seconds))
        done(number)
    return outcomes


def _outcome(future: Any, seconds: float) -> Outcome:
    try:
        value = future.result()
    except FutureTimeout:
        return Outcome(None, f"timeout after {seconds:g} s")
    except ProcessExpired as e:
        return Outcome(None, f"process ended with status {e.exitcode}")
    except Exception as e:
        return Outcome(None, f"{type(e).__name__}: {e}")
    bad = value is not None and not math.isfinite(value)
    return Outcome(None, f"not finite: {value}") if bad else Outcome(value)


@functools.lru_cache(maxsize=4)
def _pool(workers: int) -> ProcessPool:
    """A pool that lives as long as this process; a killed member is replaced."""
    # Spawned, never forked: the parent holds JAX and its threads.
    pool = ProcessPool(max_workers=workers, context=multiprocessing.get_context("spawn"))
    atexit.register(pool.stop)
    return pool


def _known(name: str) -> bool:
    return find(name) is not None
