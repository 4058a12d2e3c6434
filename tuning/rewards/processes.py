"""Reward functions in processes that can be killed, one sample a call, with limits of time and memory (R20)."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from tuning.rewards.functions import find
from tuning.rewards.samples import Outcome, Sample


def _one(name: str, arguments: Mapping[str, Any], sample: Sample, megabytes: int) -> float | None:
    """The reward of one sample, in a process of the pool."""
    # A fault of one sample must cost that sample alone, so the function never sees two at once.
    with _memory_limit(megabytes):
        (value,) = find(name)([sample.prompt], [sample.completion], **{**sample.columns, **arguments})
    return None if value is None else float(value)


@contextlib.contextmanager
def _memory_limit(megabytes: int) -> Iterator[None]:
    """Limits the process's data to its present size plus `megabytes`: a larger allocation raises MemoryError.

    Linux only.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    with open("/proc/self/status") as f:
        # /proc counts in units of 1024 bytes.
        held_bytes = next(int(line.split()[1]) for line in f if line.startswith("VmData")) * 1024
    # Data, not address space: libraries reserve far more addresses than they use. The soft limit alone, so that it can
    # be lifted again.
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held_bytes + megabytes * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def evaluate(
    name: str,
    arguments: Mapping[str, Any],
    samples: Sequence[Sample],
    *,
    seconds: float,
    megabytes: int = 2048,
    workers: int = 2,
    finished: Callable[[int, Outcome], None] = lambda number, outcome: None,
) -> list[Outcome]:
    """The reward of each sample by the function `name` (`tuning.rewards.functions`), in order.

    Args:
        arguments: keyword arguments of the function.
        seconds, megabytes: limits of one sample: wall-clock time, and memory on top of what its process already holds.
        workers: processes.
        finished: called with the number of each sample and its outcome, in order.
    Returns:
        Outcomes. A sample that exceeds a limit, raises, ends its process or gives no finite number has a failure and no
        value; the other samples are not affected.
    """
    if not samples:
        return []
    outcomes: list[Outcome] = []
    pool = _pool(workers)
    # The first call of a process also imports the function's packages, which must not count against a sample's time.
    for warm in [pool.schedule(_known, args=(name,)) for _ in range(workers)]:
        warm.result()
    futures = [pool.schedule(_one, args=(name, arguments, s, megabytes), timeout=seconds) for s in samples]
    for number, future in enumerate(futures):
        outcomes.append(_outcome(future, seconds, megabytes))
        finished(number, outcomes[-1])
    return outcomes


def _outcome(future: ProcessFuture, seconds: float, megabytes: int) -> Outcome:
    """Waits for the call; whatever went wrong in it becomes the failure."""
    try:
        value = future.result()
    except FutureTimeout:
        return Outcome(None, f"timeout after {seconds:g} s")
    except ProcessExpired as e:
        return Outcome(None, f"process ended with status {e.exitcode}")
    except MemoryError:
        return Outcome(None, f"MemoryError: more than {megabytes} MB")
    # A user's function may raise anything.
    except Exception as e:
        return Outcome(None, f"{type(e).__name__}: {e}")
    bad = value is not None and not math.isfinite(value)
    return Outcome(None, f"not finite: {value}") if bad else Outcome(value)


@functools.lru_cache(maxsize=4)
def _pool(workers: int) -> ProcessPool:
    """A pool that lives as long as this process; pebble replaces a killed member."""
    # Spawned, never forked: the parent holds JAX and its threads.
    pool = ProcessPool(max_workers=workers, context=multiprocessing.get_context("spawn"))
    atexit.register(pool.stop)
    return pool


def _known(name: str) -> bool:
    """Imports the function in a process of the pool."""
    return find(name) is not None
