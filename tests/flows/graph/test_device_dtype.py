"""The type that a section computes in is settled before it is in a key."""

import json
from collections import defaultdict
from types import SimpleNamespace

import pytest

from rlhf.flows.graph.build import build
from rlhf.flows.graph.keying import key_of, key_parts
from rlhf.flows.recipe.reading import load_recipe
from rlhf.stages.store.keys import SHOWN
from rlhf.stages.worker import devices

COMPUTED = {"sft", "reward", "round-000.rollout", "round-000.score", "round-000.update", "evaluate.base"}
FAST = [f"{s}.compute.dtype=fast" for s in ("sft", "reward", "rl.rollout", "rl.score", "rl.update", "evaluate")]


@pytest.fixture
def machine(monkeypatch):
    """Makes this machine another one: whether its processor multiplies bfloat16, and the kind of its devices."""

    def become(multiplies: bool, kind: str = "cpu:cpu") -> None:
        monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: multiplies)
        monkeypatch.setattr(devices, "device_kind", lambda: kind)

    return become


def types(*sets: str) -> dict[str, str]:
    nodes = build(load_recipe("smoke", sets=list(sets)))
    return {n.name: n.config.compute.dtype for n in nodes if n.name in COMPUTED}


@pytest.mark.parametrize(
    ("multiplies", "kind", "expected"),
    [(True, "cpu:cpu", "fast"), (False, "cpu:cpu", "auto"), (True, "gpu:NVIDIA H100 80GB HBM3", "auto")],
)
def test_fast_stays_where_the_processor_computes_and_multiplies_bfloat16(machine, multiplies, kind, expected):
    machine(multiplies, kind)
    assert types(*FAST) == dict.fromkeys(COMPUTED, expected)


def test_fast_is_auto_where_hosts_that_nobody_here_knows_compute_some_of_it(machine):
    machine(True)
    assert set(types(*FAST, "workers.train={}").values()) == {"fast"}
    assert set(types(*FAST, "workers.train={}", "workers.cluster=auto").values()) == {"auto"}


def test_results_of_two_processors_share_no_key_where_they_compute_otherwise(machine):
    def key(*sets: str) -> str:
        nodes = {n.name: n for n in build(load_recipe("smoke", sets=list(sets)))}
        made = defaultdict(lambda: SimpleNamespace(part_digest=str))
        return key_of(key_parts(nodes["sft"], made))

    machine(True)
    fast = key(*FAST)
    machine(False)
    assert key(*FAST) == key() != fast


def test_a_dumped_recipe_is_the_same_recipe():
    recipe = load_recipe("smoke", sets=["sft.compute.dtype=fast"])
    dumped = json.dumps(recipe.model_dump(mode="json", context=SHOWN))
    assert type(recipe).model_validate_json(dumped, context=SHOWN) == recipe
    assert recipe.sft is not None and recipe.sft.compute.dtype == "fast"
