"""Threads may parse Python at once: keys of stages, tools and rewards are computed in threads."""

import ast
import gc
import inspect
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf.tuning.python_syntax import parse


@pytest.fixture
def switching():
    """Threads take turns within a call of the parser, at each garbage collection."""
    before = gc.get_threshold()

    def hand_over(phase, info):
        time.sleep(0)

    gc.callbacks.append(hand_over)
    gc.set_threshold(50, 2, 2)
    yield
    gc.set_threshold(*before)
    gc.callbacks.remove(hand_over)


@pytest.mark.slow
def test_threads_that_parse_at_once_disturb_each_other_in_nothing(switching):
    sources = [inspect.getsource(module) for module in (ast, inspect)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(parse, sources * 4))
    assert [ast.dump(tree) for tree in found[:2]] == [ast.dump(ast.parse(source)) for source in sources]
