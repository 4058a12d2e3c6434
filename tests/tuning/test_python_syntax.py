"""Threads may parse Python at once: keys of stages, tools and rewards are computed in threads."""

import ast
import inspect
from concurrent.futures import ThreadPoolExecutor

from rlhf.tuning.python_syntax import parse


def test_threads_that_parse_at_once_get_the_trees_of_one():
    sources = [inspect.getsource(module) for module in (ast, inspect)] * 8
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(parse, sources))
    assert [ast.dump(tree) for tree in found[:2]] == [ast.dump(ast.parse(source)) for source in sources[:2]]
