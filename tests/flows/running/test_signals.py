"""A signal at any moment ends a run of several workers, is what it ends with, and leaves no stage at work."""

from __future__ import annotations

import functools
import gc
import random
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rlhf.flows.graph.build import Node
from rlhf.flows.running.overlap import run_overlapped
from rlhf.flows.running.session import Session
from tests.flows.lines import Lines
from tests.flows.running.support import ALL, NOTHING, Told, recipe


def test_a_signal_at_any_moment_ends_a_run_and_loses_nothing_that_is_at_work(tmp_path, smoke_store):
    """Between any two lines of the thread that waits: what is at work is ended, and the signal is what is raised."""
    store = shutil.copytree(smoke_store, tmp_path / "store")
    session = Session(recipe(tmp_path, *ALL), Lines(), "cached")
    ends, at_work = [], [False]
    # Of tests before this one.
    others = set(threading.enumerate())

    def struck(*_: Any) -> None:
        if at_work[0]:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, struck)
    try:
        for number in range(40):
            session = Session(recipe(tmp_path, *ALL), Lines(), f"cached-{number}")
            with ThreadPoolExecutor(4) as pool:

                def begin(node: Node, ended: Callable[[], None], pool=pool, session=session) -> Callable[[], None]:
                    future = pool.submit(session.run_node, node.name)
                    future.add_done_callback(lambda _: ended())
                    return lambda: future.result() and None  # type: ignore[func-returns-value]

                signal.setitimer(signal.ITIMER_REAL, 0.02 + 0.004 * number)
                try:
                    at_work[0] = True
                    run_overlapped(session, None, begin)
                    at_work[0] = False
                    ends.append("whole")
                except KeyboardInterrupt:
                    ends.append("interrupted")
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            session.finish("interrupted")
            left = [thread.name for thread in threading.enumerate() if thread not in others]
            assert len(left) < 20, left
    finally:
        signal.signal(signal.SIGALRM, before)
    assert store.is_dir() and "interrupted" in ends


def test_a_signal_that_strikes_is_what_a_run_ends_with_and_no_stage_is_left(tmp_path):
    """Also between lines of the library's own locks and threads, which are Python too: thousands of moments."""
    session, rng = Session(recipe(tmp_path, *ALL), Lines(), "struck"), random.Random(0)
    names = {"base", "prepare", "sft", "reward", "evaluate.base"}
    armed = struck = False
    live = set[str]()

    def strike(*_: Any) -> None:
        nonlocal armed, struck
        if armed:
            armed, struck = False, True
            raise KeyboardInterrupt

    def begin(node: Node, ended: Callable[[], None], pool: ThreadPoolExecutor) -> Callable[[], None]:
        live.add(node.name)

        def work() -> None:
            session.made[node.name] = NOTHING  # type: ignore[assignment]
            live.discard(node.name)

        future = pool.submit(work)
        future.add_done_callback(lambda _: ended())
        return lambda: future.result()

    before, ends = signal.signal(signal.SIGALRM, strike), Counter[str]()
    # Python ignores what is raised in a finalizer: those of other tests' garbage do not run here.
    gc.collect()
    gc.disable()
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(3000):
                session.made.clear()
                struck = False
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-5, 1.5e-3))
                try:
                    armed = True
                    run_overlapped(session, names, functools.partial(begin, pool=pool))
                    armed = False
                    ends["lost" if struck else "whole"] += 1
                except KeyboardInterrupt:
                    ends["interrupted"] += 1
                finally:
                    armed = False
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert not live
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)
    assert ends["interrupted"] > 100 and ends["lost"] == 0


def test_a_signal_while_a_stage_is_being_begun_waits_for_no_longer_than_that_stage(tmp_path):
    """What is being begun when the run ends is at work soon after: it is ended, and so is what is at work beside it."""
    session = Session(recipe(tmp_path, *ALL), Lines(), "told")
    found, struck, out_of_wait = Told(session), threading.Event(), threading.Event()
    session.made |= {"base": NOTHING, "prepare": NOTHING}  # type: ignore[dict-item]
    stop = session.stop

    def stopped() -> None:
        out_of_wait.set()
        stop()

    session.stop = stopped  # type: ignore[method-assign]

    def strike(*_: Any) -> None:
        struck.set()
        raise KeyboardInterrupt

    def begin(node: Node, ended: Callable[[], None]) -> Callable[[], None]:
        if len(found.order) == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)  # type: ignore[arg-type]
            assert struck.wait(20) and out_of_wait.wait(20)
        return found.begin(node, ended)

    before = signal.signal(signal.SIGALRM, strike)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_overlapped(session, None, begin)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(found.order) == 2 and found.at_work == {}
