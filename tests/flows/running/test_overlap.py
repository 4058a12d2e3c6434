"""Stages run beside each other, as inputs and workers allow; artifacts and records are those of one worker."""

import functools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from rlhf.flows.graph.build import build
from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.running import crew
from rlhf.flows.running.crew import check_workers
from rlhf.flows.running.runner import run_plain, run_stages
from rlhf.flows.running.session import Session
from rlhf.stages.common.xla_flags import SHARED_GPU
from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import Store
from rlhf.stages.worker.client import StageFailed
from tests.flows.lines import Lines
from tests.flows.running.support import ALL, EXACT, Told, recipe
from tests.support import RLHF, hears_ctrl_c, until, write_files


def made(record):
    """Key, digest and place of each node."""
    return [(name, e["key"], e["digest"]) for name, e in record["nodes"].items()]


@pytest.fixture
def told(tmp_path) -> Iterator[Callable[..., tuple[Told, threading.Thread, list[BaseException]]]]:
    threads = []

    def start(*sets: str) -> tuple[Told, threading.Thread, list[BaseException]]:
        session = Session(recipe(tmp_path, *sets), Lines(), "told", None)
        found, raised = Told(session), list[BaseException]()

        def run() -> None:
            try:
                run_stages(session, set(session.nodes), found.make)
            except BaseException as e:
                raised.append(e)

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        return found, threads[-1], raised

    yield start
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_the_next_round_is_sampled_while_this_one_is_scored_and_trained_on(told):
    found, *_ = told(*ALL, "rl.rounds=3", "rl.staleness=1", "reward=null", EXACT, "export=null")
    # The run checks the base's tokenizer before anything else begins.
    found.one_by_one("base", "prepare")
    # What needs the base alone is evaluated beside the training.
    found.until("sft", "evaluate.base")
    found.end("sft")
    found.until("evaluate.base")
    found.end("evaluate.base")
    found.until("round-000.rollout")
    found.end("round-000.rollout")
    found.until("round-000.score", "round-001.rollout")
    found.end("round-000.score")
    found.until("round-000.update", "round-001.rollout")
    found.end("round-001.rollout")
    found.until("round-000.update", "round-001.score", "evaluate.sft")
    found.end("round-000.update")
    # The worker that samples has one stage at a time.
    found.until("round-001.score", "evaluate.sft")
    found.end("evaluate.sft")
    found.until("round-001.score", "round-002.rollout")
    found.end("round-001.score")
    found.until("round-001.update", "round-002.rollout")
    for name in ("round-001.update", "round-002.rollout"):
        found.end(name)
    found.one_by_one("round-002.score", "round-002.update", "evaluate.rl")


def test_without_staleness_a_round_waits_for_the_policy_before_it(told):
    found, *_ = told(*ALL[:3], "rl.rounds=2", "reward=null", EXACT, "export=null", "evaluate=null")
    rounds = [f"round-00{i}.{part}" for i in range(2) for part in ("rollout", "score", "update")]
    found.one_by_one("base", "prepare", "sft", *rounds)


def test_after_an_error_nothing_is_begun_what_is_at_work_ends_and_the_first_error_is_raised(told):
    found, thread, raised = told(*ALL, "rl=null", "export=null")
    found.one_by_one("base", "prepare")
    found.until("sft", "evaluate.base")
    found.end("sft", StageFailed("sft: no"))
    found.until("evaluate.base")
    time.sleep(0.1)
    found.end("evaluate.base", StageFailed("evaluate.base: no"))
    thread.join(20)
    assert [str(e) for e in raised] == ["sft: no"]
    assert found.order == ["base", "prepare", "sft", "evaluate.base"]
    lines = found.session.reporter.lines
    assert lines == [
        "sft: no\n  no further stage begins; running stages may finish: evaluate.base",
        "evaluate.base: no",
    ]


def test_what_ends_the_run_itself_ends_what_is_at_work(told, monkeypatch):
    found, thread, raised = told(*ALL, "rl=null", "export=null")
    found.one_by_one("base", "prepare")
    found.until("sft", "evaluate.base")
    # As Ctrl-C, which is raised in the thread that waits.
    found.end("sft", KeyboardInterrupt())
    thread.join(20)
    assert [type(e) for e in raised] == [KeyboardInterrupt]
    assert found.at_work == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("there", "workers"),
    [
        # What is left for the workers that train, sample and score is each round.
        (("base", "prepare", "sft", "reward", "evaluate", "export"), 3),
        ((), 4),
    ],
    ids=["rounds", "all"],
)
def test_a_run_with_several_workers_makes_what_one_makes_in_the_same_order_of_its_record(
    tmp_path, smoke_store, record, there, workers
):
    for stage in there:
        shutil.copytree(smoke_store / "artifacts" / stage, tmp_path / "store" / "artifacts" / stage)
    run_plain(recipe(tmp_path, *ALL), name="several")
    store = Store(str(tmp_path / "store"))
    one, several = record(smoke_store, "first"), record(store.url, "several")
    assert made(several) == made(one)
    assert (one["worker_starts"], several["worker_starts"]) == (1, workers)
    # The sampler reads the weights that each round stores, and trains no policy again.
    first = store.get("update", several["nodes"]["round-000.update"]["key"])
    assert first.has("state/model/") and not first.has("state/trainer/")
    sampler = (store.scratch / "runs" / "several" / "worker-sample.log").read_text()
    assert "---- round-001.rollout" in sampler and "replaying" not in sampler
    # The same recipe without workers goes on with all of it.
    run_plain(recipe(tmp_path), name="again")
    assert {e["state"] for e in record(store.url, "again")["nodes"].values()} == {"hit"}


@pytest.mark.slow
def test_a_stage_that_fails_leaves_what_the_others_have_made(tmp_path, monkeypatch, record):
    write_files(tmp_path, **{"slow_rewards.py": "def f(prompts, completions, **_):\n    raise SystemError('no')\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    sets = ["rl.score.rewards.exact.function=slow_rewards:f", EXACT, "reward=null", *ALL]
    with pytest.raises(StageFailed, match=r"round-000\.score: .*no"):
        run_plain(recipe(tmp_path, *sets), name="fails")
    found = record(tmp_path / "store", "fails")
    assert found["status"] == "failed" and found["nodes"]["round-000.score"]["state"] == "failed"
    states = {name: e["state"] for name, e in found["nodes"].items() if name != "round-000.score"}
    assert set(states.values()) == {"made"}, states


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_ends_all_workers_as_interrupted_and_the_same_command_goes_on_with_prefect(
    tmp_path, smoke_store, record
):
    store = tmp_path / "store"
    command = [RLHF, "run", "smoke", "--store", str(store), "--name", "cut"]
    command += [word for item in ALL for word in ("--set", item)]
    log = (tmp_path / "log").open("w")
    run = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, preexec_fn=hears_ctrl_c)
    until(lambda: {"sft", "evaluate.base"} <= at_work(store, "cut"), 120)
    family = psutil.Process(run.pid).children(recursive=True)
    os.kill(run.pid, signal.SIGINT)
    assert run.wait(60) == 130, (tmp_path / "log").read_text()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    found = record(store, "cut")
    assert found["status"] == "interrupted"
    assert {found["nodes"][name]["state"] for name in ("sft", "evaluate.base")} == {"interrupted"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not shown in Prefect" not in done.stdout + done.stderr
    assert made(record(store, "cut")) == made(record(smoke_store, "first"))


def at_work(store, name):
    found = runs.read(Store(str(store)), name) or {"nodes": {}}
    return {node for node, entry in found["nodes"].items() if entry["state"] == "running"}


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
    monkeypatch.setattr(crew, "device_kind", lambda: gpu)
    several = functools.partial(check_workers, nodes=(), crews=2)
    with pytest.raises(RecipeError, match=r"workers.train.devices: this machine has gpu.*two workers"):
        several(recipe(tmp_path))
    with pytest.raises(RecipeError, match=r"3 devices cannot be divided among 2 workers \(--workers\)"):
        several(recipe(tmp_path, "workers.train={devices: [0, 1, 2]}"))
    listed = recipe(tmp_path, "workers.train={devices: [0, 1, 2, 3], hosts: 2}")
    several(listed)
    assert [part.train.shares for part in listed.workers.divided(2)] == [[[0], [1]], [[2], [3]]]
    assert "the 2 processes of this worker share this machine's gpu" in refused(gpu, "workers.train={hosts: 2}")


def test_workers_next_to_servers_that_sleep_return_memory(monkeypatch, tmp_path):
    server = ["rl.rollout.engine={kind: vllm, version: '1', command: c, sleep: true}"]

    def variables(*sets):
        made = crew.Crew(recipe(tmp_path, *sets), "run")
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
