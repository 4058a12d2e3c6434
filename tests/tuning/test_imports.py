"""What processes start with is small: no numeric library where none computes, and no thread where they fork."""

import pytest

from tests.support import finish, python

LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers", "tokenizers", "ray", "rlhf.stages")
CODE = """
import sys, threading
{code}
print(threading.active_count(), *sorted({names} & set(sys.modules)))
"""
TOKENIZER = """
from rlhf.tuning.models import tokenizer as t
assert "transformers" not in sys.modules
tokenizer = t.load_tokenizer(sys.argv[1])
t.render(tokenizer, [dict(role="user", content="hi")])
tokenizer.decode(tokenizer.encode("hi", add_special_tokens=False))
"""


def loaded(code, *arguments, of=LIBRARIES):
    return finish(python(CODE.format(code=code, names=set(of)), *arguments)).split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import rlhf.tuning.parallel.pool, rlhf.tuning.rewards.processes, rlhf.tuning.agents.processes",
        # Levels, computed elsewhere, load numpy.
        "from rlhf.tuning.agents.environments import BUILT_IN; assert all(BUILT_IN.values())",
        "from rlhf.tuning.chat.calls import parse; parse('', 'hermes', [])",
    ],
)
def test_processes_that_are_forked_load_no_numeric_library_and_start_no_thread(code):
    assert loaded(code) == ["1"]


def test_clients_of_servers_load_no_jax():
    code = "import rlhf.tuning.rollout.servers.fleet, rlhf.tuning.rollout.servers.kinds"
    assert loaded(code, of=("jax", "jaxlib", "flax"))[1:] == []


@pytest.mark.slow
def test_a_tokenizer_is_used_without_torch_and_jax(tmp_path):
    from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
    from rlhf.tuning.models.tokenizer import save_tokenizer

    save_tokenizer(byte_tokenizer(), tmp_path)
    assert loaded(TOKENIZER, tmp_path, of=("torch", "jax"))[1:] == []
