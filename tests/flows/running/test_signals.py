"""A signal at any moment ends a run of several workers, is what it ends with, and leaves no stage at work."""

import gc
import random
import shutil
import signal
import threading
from collections import Counter
from typing import Any

import pytest

from rlhf.flows.running.runner import run_stages
from rlhf.flows.running.session import Session
from tests.flows.lines import Lines
from tests.flows.running.support import ALL, NOTHING, recipe


@pytest.mark.slow
def test_a_signal_at_any_moment_ends_a_run_and_loses_no_running_stage(tmp_path, smoke_store):
    shutil.copytree(smoke_store, tmp_path / "store")
    ends, armed = Counter[str](), False
    # Threads of tests before this one.
    others = set(threading.enumerate())

    def strike(*_: Any) -> None:
        if armed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, strike)
    try:
        for number in range(40):
            session = Session(recipe(tmp_path, *ALL), Lines(), f"cached-{number}")
            signal.setitimer(signal.ITIMER_REAL, 0.02 + 0.004 * number)
            try:
                armed = True
                run_stages(session, None, session.run_node)
                armed = False
                ends["whole"] += 1
            except KeyboardInterrupt:
                armed = False
                ends["interrupted"] += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            session.finish("interrupted")
            left = [thread.name for thread in threading.enumerate() if thread not in others]
            assert len(left) < 20, left
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ends["interrupted"]


@pytest.mark.slow
def test_a_signal_is_what_a_run_ends_with_and_no_stage_is_left(tmp_path):
    """At thousands of moments, also between lines of the library's locks and threads, which are Python code."""
    session, rng = Session(recipe(tmp_path, *ALL), Lines(), "struck"), random.Random(0)
    names = {"base", "prepare", "sft", "reward", "evaluate.base"}
    armed = struck = False
    live = set[str]()

    def strike(*_: Any) -> None:
        nonlocal armed, struck
        if armed:
            armed, struck = False, True
            raise KeyboardInterrupt

    def make(name: str) -> None:
        live.add(name)
        session.made[name] = NOTHING  # type: ignore[assignment]
        live.discard(name)

    before, ends = signal.signal(signal.SIGALRM, strike), Counter[str]()
    # Python ignores what is raised in a finalizer: those of other tests' garbage do not run here.
    gc.collect()
    gc.disable()
    try:
        for _ in range(800):
            session.made.clear()
            session._stopped.clear()
            struck = False
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-5, 1.5e-3))
            try:
                armed = True
                run_stages(session, names, make)
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
    assert ends["interrupted"] > 50 and ends["lost"] == 0
