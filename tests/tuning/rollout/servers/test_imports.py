"""Clients of HTTP servers need no accelerator library."""

from tests.support import finish, python

CODE = """
import sys
import rlhf.tuning.rollout.servers.fleet, rlhf.tuning.rollout.servers.kinds
print(sorted({name.partition(".")[0] for name in sys.modules} & {"jax", "jaxlib", "flax"}))
"""


def test_importing_the_clients_loads_no_jax():
    assert finish(python(CODE)).strip() == "[]"
