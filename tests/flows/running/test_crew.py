"""Workers of a recipe: what each is asked to hand over, and which there cannot be."""

import pytest

from rlhf.flows.graph.build import build
from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.running import crew
from rlhf.flows.running.crew import check_workers
from rlhf.stages.common.xla_flags import SHARED_GPU
from tests.flows.running.support import recipe


def test_workers_that_there_cannot_be_are_refused_by_name(monkeypatch, tmp_path):
    def refused(kind, *sets):
        monkeypatch.setattr(crew, "device_kind", lambda: kind)
        found = recipe(tmp_path, *sets)
        with pytest.raises(RecipeError) as e:
            check_workers(found, build(found))
        return str(e.value)

    gpu = "gpu:NVIDIA H100 80GB HBM3"
    assert "workers.train.devices: this machine computes on cpu:cpu" in refused(
        "cpu:cpu", "workers.train={devices: [0]}"
    )
    both = ["workers.train={devices: [0]}", "workers.sample={}"]
    assert "workers.sample.devices: this machine has gpu:NVIDIA" in refused(gpu, *both)
    none = ["workers.train={devices: [0]}", "workers.score={devices: []}"]
    assert "workers.score.devices is [], and round-000.score computes on a device" in refused(gpu, *none)
    assert "3 chips of a TPU are not a part of a host: give it 1, 2, 4 or 8" in refused(
        "tpu:TPU v5 lite", "workers.train={devices: [0, 1, 2]}"
    )
    assert "the 2 processes of this worker share this machine's gpu" in refused(gpu, "workers.train={hosts: 2}")


def test_workers_next_to_servers_that_sleep_return_memory(monkeypatch, tmp_path):
    server = ["rl.rollout.engine={kind: vllm, version: '1', command: c, sleep: true}"]

    def variables(*sets):
        made = crew.Crew(recipe(tmp_path, *sets), "run", tmp_path / "log")
        return [worker.variables for worker in made._workers.values()]

    assert variables() == variables("workers.train={}") == [{}]
    assert variables(*server) == variables(*server, "workers.train={}") == [SHARED_GPU]
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    assert variables(*server) == [{"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["workers.train={devices: [0, 1]}", "workers.sample={devices: [1]}"], "two roles use device 1"),
        (["workers.train={}", "workers.rollout={}"], "workers.rollout"),
        (["workers.train={gpus: 2}"], "train.gpus needs a Ray cluster"),
        (["workers.cluster=auto", "workers.train={devices: [0]}"], "train.devices are devices of this host"),
        (["workers.cluster=auto", "workers.train={cpus: 0}"], "train reserves nothing on the cluster"),
        (["workers.cluster=auto", 'workers.train={tpu: "v6e:4x4", hosts: 4}'], "tpu determines the number of hosts"),
        (["workers.cluster=ray://host:10001"], "workers.cluster"),
    ],
)
def test_a_section_that_cannot_be_is_refused_when_it_is_read(tmp_path, sets, said):
    with pytest.raises(RecipeError, match=said):
        recipe(tmp_path, *sets)
