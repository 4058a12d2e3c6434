"""Reward functions in processes that can be killed, one sample a call, with limits of time and memory (R20)."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from pebble import ProcessExpired, ProcessPool

from tuning.rewards.functions import find

COLUMNS = ("prompt", "completion")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A reward, or why there is none."""

    value: float | None
    failure: str | None = None


def _one(name: str, arguments: dict[str, Any], sample: dict[str, Any], megabytes: int) -> float | None:
    columns = {k: [v] for k, v in sample.get("metadata", {}).items()}
    columns |= {k: [v] for k, v in sample.items() if k not in COLUMNS}
    with _memory_limit(megabytes):
        (value,) = find(name)([sample["prompt"]], [sample["completion"]], **columns | arguments)
    return None if value is None else float(value)


@contextlib.contextmanager
def _memory_limit(megabytes: int) -> Iterator[None]:
    """So much more data than the process holds now; what asks for more gets a MemoryError. Linux only."""
    if sys.platform != "linux":
        yield
        return
    import resource

    with open("/proc/self/status") as f:
        held = next(int(line.split()[1]) for line in f if line.startswith("VmData")) * 1024
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + megabytes * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def evaluate(
    name: str,
    arguments: dict[str, Any],
    samples: Sequence[dict[str, Any]],
    *,
    seconds: float,
    megabytes: int = 2048,
    workers: int = 2,
    finished: Callable[[int, Outcome], None] = lambda number, outcome: None,
) -> list[Outcome]:
    """The reward of each sample: {prompt, completion, completion_ids, answer, metadata}.

    A sample that takes longer than `seconds`, more memory than `megabytes`, raises, ends its process, or gives no
    finite number is an Outcome with a reason; the others are not touched by it. `finished` is told each outcome with
    the number of its sample, in order.
    """
    if not samples:
        return []
    outcomes: list[Outcome] = []
    pool = _pool(workers)
    # The first call of a process also pays for its imports; those do not count.
    for warm in [pool.schedule(_known, args=(name,)) for _ in range(workers)]:
        warm.result()
    futures = [pool.schedule(_one, args=(name, arguments, s, megabytes), timeout=seconds) for s in samples]
    for number, future in enumerate(futures):
        outcomes.append(_outcome(future, seconds, megabytes))
        finished(number, outcomes[-1])
    return outcomes


def _outcome(future: Any, seconds: float, megabytes: int) -> Outcome:
    try:
        value = future.result()
    except FutureTimeout:
        return Outcome(None, f"timeout after {seconds:g} s")
    except ProcessExpired as e:
        return Outcome(None, f"process ended with status {e.exitcode}")
    except MemoryError:
        return Outcome(None, f"MemoryError: more than {megabytes} MB")
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
