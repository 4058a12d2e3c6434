"""Reward functions in processes that can be killed, one sample a call (R20)."""

from __future__ import annotations

import dataclasses
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
    # Spawned, never forked: the parent holds JAX and its threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPool(max_workers=workers, context=context) as pool:
        # The first call of a process also pays for its start and imports; those do not count.
        for warm in [pool.schedule(find, args=(name,)) for _ in range(workers)]:
            warm.result()
        futures = [pool.schedule(_one, args=(name, arguments, s), timeout=seconds) for s in samples]
        for number, future in enumerate(futures, start=1):
            try:
                value = future.result()
                bad = value is not None and not math.isfinite(value)
                outcomes.append(Outcome(None, f"not finite: {value}") if bad else Outcome(value))
            except FutureTimeout:
                outcomes.append(Outcome(None, f"timeout after {seconds:g} s"))
            except ProcessExpired as e:
                outcomes.append(Outcome(None, f"process ended with status {e.exitcode}"))
            except Exception as e:
                outcomes.append(Outcome(None, f"{type(e).__name__}: {e}"))
            done(number)
    return outcomes
