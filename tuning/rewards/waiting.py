"""Calls of rewards that do nothing but wait for a server: many at a time, by threads of this process.

Such a reward is built in and has limits of its own (`WAITS`): there is no code of a user or of a completion in it that
would have to be killed (R20), and a process for each request under way would hold memory for nothing.
"""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Callable, Sequence

from tuning.rewards.calls import Call, answered
from tuning.rewards.failures import Streak
from tuning.rewards.samples import Outcome

WAITS = ("judge",)
"""The built-in rewards that are called so."""


def run(
    calls: Sequence[Call],
    most: int,
    told: Callable[[int, Sequence[Outcome]], None],
    leave: Callable[[], bool] = lambda: False,
) -> None:
    """Makes all calls, at most `most` of them at a time; `told` is called with the number of each and its outcomes, in
    this thread, as soon as they are known. After OUTAGES in a row the remaining calls are not made, nor once `leave`,
    which is asked before each, says so."""
    waiting = deque(range(len(calls)))
    busy: dict[concurrent.futures.Future[list[Outcome]], int] = {}
    streak = Streak()
    pool = concurrent.futures.ThreadPoolExecutor(most, "reward")
    try:
        while waiting or busy:
            while waiting and len(busy) < most:
                if leave():
                    waiting.clear()
                    break
                number = waiting.popleft()
                if (untried := streak.untried) is not None:
                    told(number, [untried] * len(calls[number].samples))
                else:
                    busy[pool.submit(answered, calls[number])] = number
            for future in concurrent.futures.wait(busy, return_when=concurrent.futures.FIRST_COMPLETED).done:
                found = future.result()
                streak.add(found)
                told(busy.pop(future), found)
    finally:
        # Where `told` has raised nobody waits for those under way, each of which ends by its own limit.
        pool.shutdown(wait=False, cancel_futures=True)
