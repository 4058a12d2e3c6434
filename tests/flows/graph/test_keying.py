"""Everything outside of the recipe that changes what is computed changes the key: each is changed here."""

from collections import defaultdict
from types import SimpleNamespace

import pytest

from rlhf.flows.graph.build import build
from rlhf.flows.graph.keying import key_of, key_parts
from rlhf.flows.recipe.reading import load_recipe
from rlhf.stages.worker.host_compat import OF_DEVICES, VARIABLES

SET = (*VARIABLES, *(name for name in OF_DEVICES if name.isupper()))


@pytest.fixture
def key(monkeypatch):
    """The key of a node of smoke in an environment without these variables."""
    for name in SET:
        monkeypatch.delenv(name, raising=False)
    nodes = {node.name: node for node in build(load_recipe("smoke"))}
    made = defaultdict(lambda: SimpleNamespace(part_digest=str))
    return lambda name="base": key_of(key_parts(nodes[name], made))


@pytest.mark.parametrize("name", SET)
def test_a_variable_of_jax_or_xla_changes_the_keys_of_what_computes_alone(key, monkeypatch, name):
    before, data = key(), key("prepare")
    monkeypatch.setenv(name, "--xla_some_flag=1")
    assert key() != before and key("prepare") == data


def test_flags_of_xla_that_change_no_result_are_in_no_key(key, monkeypatch, tmp_path):
    before = key()
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_dump_to=/tmp/x")
    assert key() == before
    file = tmp_path / "flags"
    monkeypatch.setenv("XLA_FLAGS", str(file))
    file.write_text("--xla_dump_to=/tmp/x")
    assert key() == before
    file.write_text("--xla_allow_excess_precision=false")
    assert key() != before
