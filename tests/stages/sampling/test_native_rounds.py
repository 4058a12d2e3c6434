"""A round sampled by `rlhf serve`: the server reads the policy from a shared folder, and rows are the trainer's."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import httpx
import jax
import numpy as np
import pytest

from rlhf.stages import base as base_model
from rlhf.stages import rollout
from rlhf.stages.common.compilation import configure_jax
from rlhf.stages.sampling import servers
from rlhf.stages.sampling.settings import EngineSettings
from rlhf.tuning import multihost
from rlhf.tuning.device import Compute
from rlhf.tuning.models.huggingface import load_decoder, save_decoder
from rlhf.tuning.rows import CompletionRow, read_table
from rlhf.tuning.training.completions import token_logps
from tests.stages.sampling.native_server import app_over, server_over
from tests.stages.support import running
from tests.stages.training.support import Folder, data, ids, perform
from tests.support import free_port, with_devices

QUESTIONS = ["1+1=", "some words?", "2*3="]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Two random policies of one model, and three prompts."""
    configure_jax()
    folder, memory = tmp_path_factory.mktemp("round"), {}
    _, served = perform(base_model, base_model.Config(source="random:tiny"), folder / "served", memory)
    model, params = load_decoder(served.local("model/"))
    other = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, params)
    save_decoder(folder / "trained" / "model", model, other, {})
    trained = Folder(folder / "trained", "trained")
    table = [
        {"id": f"p{i}", "prompt_ids": ids(text, end=False), "prompt": text, "answer": str(i), "metadata": "{}"}
        for i, text in enumerate(QUESTIONS)
    ]
    return folder, memory, served, trained, data(folder / "data", prompts=table)


@pytest.fixture(scope="module")
def url(inputs):
    folder, _, served, *_ = inputs
    model = folder / "model"
    model.mkdir()
    for path in (*served.local("model/").iterdir(), *served.local("tokenizer/").iterdir()):
        (model / path.name).write_bytes(path.read_bytes())
    server = server_over(model, "served", context=512)
    with contextlib.closing(server.live), running(app_over(server, folder / "shared")) as url:
        yield url


def engine_at(url, folder, **changes):
    version = httpx.get(f"{url}/version").json()["version"]
    usual = {"kind": "native", "url": url, "version": version, "dtype": "float32", "folder": folder}
    return EngineSettings(**usual | changes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), [("trained", ""), ("served", "file://")])
def test_a_round_by_a_native_server_has_the_rows_of_the_trainer(inputs, url, name, scheme):
    folder, memory, served, trained, prompts = inputs
    policy = dataclasses.replace({"trained": trained, "served": served}[name], digest=name * 3)
    # Files of a URL are written there and copied.
    policy.store = SimpleNamespace(scratch=folder / "scratch")
    engine = engine_at(url, f"{scheme}{folder}/shared")
    config = rollout.Config(prompts=3, completions=2, max_tokens=6, engine=engine)
    given = {"policy": policy, "tokenizer": served, "data": prompts}
    metrics, made = perform(rollout, config, folder / f"rollout {name}", memory, **given)
    assert metrics["completions"] == 6
    rows = read_table(sorted(made.local("rollouts").glob("*.parquet")), CompletionRow)
    assert {row.policy for row in rows} == {policy.digest}
    assert httpx.get(f"{url}/weight_info").json()["weight_version"] == policy.digest
    model, params = load_decoder(policy.local("model/"))
    texts = {f"p{i}": ids(text, end=False) for i, text in enumerate(QUESTIONS)}
    pairs = [(texts[row.prompt_id], row.token_ids) for row in rows]
    for row, expected in zip(rows, token_logps(model, params, pairs, 1.0, Compute(), 512), strict=True):
        np.testing.assert_allclose(row.logprobs, expected, atol=1e-5)
    # The server's root has the newest policy alone, and none when the worker ends.
    assert len(list((folder / "shared").rglob("*.safetensors"))) == 1
    servers.end_all()
    assert not list((folder / "shared").rglob("*.safetensors"))


@pytest.mark.slow
def test_process_0_of_a_group_asks_servers_with_a_policy_that_both_processes_hold(inputs, url):
    folder, memory, served, trained, prompts = inputs
    policy = dataclasses.replace(trained, digest="grouped")
    policy.store = SimpleNamespace(scratch=folder / "scratch")
    config = rollout.Config(prompts=3, completions=2, max_tokens=6, engine=engine_at(url, str(folder / "shared")))
    given = {"policy": policy, "tokenizer": served, "data": prompts}
    metrics, made = perform(rollout, config, folder / "alone", memory, **given)
    address = f"127.0.0.1:{free_port()}"
    asked = {
        "inputs": {name: (str(one.path), one.digest) for name, one in given.items()},
        "scratch": str(folder / "scratch"),
        "config": config.model_dump(mode="json"),
        "out": str(folder / "group"),
    }
    command = [sys.executable, "-m", "tests.stages.sampling.of_group", json.dumps(asked)]
    environment = with_devices(1)
    processes = [
        subprocess.Popen(command, env=environment | multihost.variables(address, 2, i), stdout=subprocess.PIPE)
        for i in range(2)
    ]
    found = [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in processes]
    assert (found[0]["completions"], found[0]["tokens"], found[1]) == (6, metrics["tokens"], {})
    rows = [
        read_table(sorted(path.glob("rollouts/*.parquet")), CompletionRow)
        for path in (made.local(), folder / "group" / "0" / "out")
    ]
    assert [list(row.token_ids) for row in rows[1]] == [list(row.token_ids) for row in rows[0]]
    servers.end_all()
