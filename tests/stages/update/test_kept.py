"""Rounds are trained once, adapters too: later ones find the policy where the update left it, or replay it."""

import inspect
import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlhf.stages.common.models import load_policy, load_rounded
from rlhf.stages.store.manifests import with_checksum
from rlhf.stages.training.adapters import lora_config
from rlhf.stages.update import stage as update
from rlhf.stages.update.state import ReplayDiffers, State, fingerprint_of
from rlhf.tuning.device import Compute
from rlhf.tuning.models import huggingface
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.identity import fingerprint
from rlhf.tuning.models.lora import merge
from rlhf.tuning.training.batch import Group, Layout, micro_batches
from rlhf.tuning.training.forward import logps_and_entropy
from tests.stages.update.support import CONFIG, Rounds, policy_of, settings
from tests.support import with_devices
from tests.tuning.models.adapters import load_adapter

pytestmark = pytest.mark.slow


def advanced(rounds, count, **more):
    """Policies of rounds in a worker, with what sampling and scoring load between them."""
    memory, policy, made = {}, rounds.base, []
    for number in range(count):
        config = settings(number, None, **more)
        inputs = rounds.inputs(config, policy)
        load_policy(rounds.context(config, inputs, memory), policy)
        load_policy(rounds.context(config, inputs, memory), rounds.base)
        policy, metrics, _ = rounds.run(config, inputs, memory)
        made.append(metrics["steps"])
    return made


def test_six_rounds_are_trained_six_times_however_little_is_kept(tmp_path, monkeypatch):
    calls, advance = [], update._advance

    def counted(ctx, *rest, **named):
        calls.append(ctx.config.round)
        return advance(ctx, *rest, **named)

    monkeypatch.setattr(update, "_advance", counted)
    monkeypatch.setattr("rlhf.tuning.device.memory_bytes", lambda: 1)
    assert all(advanced(Rounds(tmp_path), 6)) and calls == list(range(6))


def program(folder, devices, *words):
    environment = with_devices(devices)
    command = [sys.executable, "-m", "tests.stages.update.devices_program", str(folder), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folders = {devices: tmp_path_factory.mktemp(f"on-{devices}") for devices in (1, 8)}
    return {devices: (folder, program(folder, devices)) for devices, folder in folders.items()}


EIGHTH = 1 / 8 + 0.02


@pytest.mark.parametrize("stage", ["sft", "grpo", "ppo"])
def test_eight_devices_hold_an_eighth_each_when_weights_are_loaded_and_from_the_first_step_on(found, stage):
    _, eight = found[8]
    shares = eight[stage]["shares"]
    assert shares.keys() >= {"loaded", "trained", "at work"}
    assert all(share <= EIGHTH for share in shares.values()), shares


def test_a_stored_state_is_restored_to_its_shards(found):
    _, eight = found[8]
    for stage in ("grpo", "ppo"):
        assert eight[stage]["restored"] <= EIGHTH and eight[stage]["same"]


@pytest.mark.parametrize("devices", [4, 1])
def test_a_state_that_eight_devices_stored_is_gone_on_with_on_fewer(found, devices):
    folder, _ = found[8]
    for stage, there in program(folder, devices, "again").items():
        assert there["same"] and there["steps"] > 0, stage
        assert all(share <= 1 / devices + 0.02 for share in there["shares"].values()), there


def test_a_device_has_its_own_share_of_what_is_kept(found):
    _, eight = found[8]
    assert eight["kept"] == {"within an eighth": True, "within less": False}


@pytest.mark.parametrize("stage", ["sft", "grpo", "ppo"])
def test_losses_and_parameters_are_those_of_one_device(found, stage):
    (one, single), (eight, several) = found[1], found[8]
    assert several[stage]["losses"] == pytest.approx(single[stage]["losses"], abs=1e-6)
    mine, theirs = (np.load(folder / f"{stage}.npz") for folder in (one, eight))
    assert mine.files == theirs.files and len(mine.files) > 10
    for name in mine.files:
        np.testing.assert_allclose(theirs[name], mine[name], atol=1e-6, err_msg=name)


RATE = 0.02


def rate(value):
    return settings(0, None, optimizer={"learning_rate": value})


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A store with a round whose replay has other bits: the learning rate of its manifest is the next number."""
    rounds = Rounds(tmp_path_factory.mktemp("rounds"))
    inputs = rounds.inputs(rate(RATE), rounds.base)
    ctx = rounds.context(rate(RATE), inputs, {})
    update.run(ctx)
    ctx.close()
    said = rate(RATE * (1 + 1e-6)).model_dump(mode="json")
    return rounds, rounds.commit("update", ctx.out, said, inputs)


@pytest.mark.slow
def test_policies_that_are_not_stored_are_replayed_in_a_loop_from_the_oldest(tmp_path, monkeypatch):
    """However many there are: nested calls would end at Python's limit of recursion."""
    rounds = Rounds(tmp_path)
    policy, memory = rounds.base, {}
    for number in range(3):
        config = settings(number, None)
        policy, *_ = rounds.run(config, rounds.inputs(config, policy), memory)
    calls, advance = [], update._advance

    def counted(ctx, *rest, **named):
        calls.append((ctx.config.round, len(inspect.stack())))
        return advance(ctx, *rest, **named)

    monkeypatch.setattr(update, "_advance", counted)
    ctx = rounds.context(settings(3, None), {"policy": policy, "tokenizer": rounds.base}, {})
    update.restore(ctx, policy)
    assert [number for number, _ in calls] == [0, 1, 2] and len({depth for _, depth in calls}) == 1


@pytest.mark.slow
def test_other_bits_are_refused_with_the_ways_out(other):
    rounds, policy = other
    ctx = rounds.context(settings(1, None), {"policy": policy, "tokenizer": rounds.base}, {})
    with pytest.raises(ReplayDiffers, match=r"gave policy .*recorded is .*--force round-000\.update"):
        update.restore(ctx, policy)


@pytest.mark.parametrize(("algorithm", "kind"), [("grpo", "none"), ("ppo", "nf4")])
def test_an_adapter_goes_on_through_the_rounds(algorithm, kind, tmp_path):
    lora = {"rank": 4, "alpha": 8.0, "quantize": kind}
    rounds, memory = Rounds(tmp_path), {}
    first_config, second_config = (settings(i, lora, algorithm=algorithm) for i in range(2))
    first, _, _ = rounds.run(first_config, rounds.inputs(first_config, rounds.base), memory)
    inputs = rounds.inputs(second_config, first)
    second, metrics, params = rounds.run(second_config, inputs, memory)
    assert metrics["steps"] == 2 and first.has("adapter/") and first.has("state/") and not first.has("state/model")

    # What is merged is the adapter over the policy before the first round.
    base = huggingface.load_decoder(rounds.base.local("model/"))[1]
    adapters = [load_adapter(a.local("adapter/"), CONFIG)[1] for a in (first, second)]
    merged = merge(CONFIG, "decoder", base, adapters[1], lora_config(second_config.lora))
    assert fingerprint(merged) == fingerprint(params)
    assert fingerprint(adapters[0]) != fingerprint(adapters[1])
    about = json.loads((second.local("adapter/") / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == f"base-{rounds.base.digest[:12]}"

    # A worker that remembers nothing goes on from the stored state, and without that from the rollouts.
    for replayed in (False, True):
        if replayed:
            shutil.rmtree(first.local("state/"))
            manifest = first.local() / "manifest.json"
            found = json.loads(manifest.read_text())
            found["files"] = [f for f in found["files"] if not f["path"].startswith("state/")]
            manifest.write_text(json.dumps(with_checksum(found)))
            inputs = inputs | {"policy": rounds.store.get("update", first.key)}
        again, _, _ = rounds.run(second_config, inputs, {})
        assert policy_of(again) == policy_of(second)
        assert any("replaying" in line for line in rounds.log) == replayed
    _, restored = update.restore(rounds.context(second_config, {}, {}), second)
    assert fingerprint(restored) == fingerprint(params)


def test_another_adapter_starts_at_the_policy_of_the_last(tmp_path):
    rounds, memory = Rounds(tmp_path), {}
    config = settings(0, {"rank": 4})
    first, _, merged = rounds.run(config, rounds.inputs(config, rounds.base), memory)
    other = settings(1, {"rank": 2})
    second, _, params = rounds.run(other, rounds.inputs(other, first), memory)
    adapter = load_adapter(second.local("adapter/"), CONFIG)[1]
    wanted = merge(CONFIG, "decoder", merged, adapter, lora_config(other.lora))
    assert fingerprint(wanted) == fingerprint(params)


def test_the_fingerprint_of_a_policy_sees_its_adapter():
    params = nnx.State({"w": jnp.ones(3)})
    # Twice A and half B merge to the same weights and train on otherwise.
    adapters = [None, *(nnx.State({"a": jnp.full(2, x), "b": jnp.full(2, 1 / x)}) for x in (1.0, 2.0))]
    assert len({fingerprint_of(State(CONFIG, params, None, adapter=a)) for a in adapters}) == 3


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_first_round_starts_at_the_reference_and_at_what_was_sampled(kind, tmp_path):
    rounds, memory = Rounds(tmp_path), {}
    config = settings(0, {"rank": 4, "quantize": kind}, prompts_per_step=4)
    inputs = rounds.inputs(config, rounds.base)
    model, params = load_rounded(rounds.context(config, inputs, memory), rounds.base, kind)
    program = jax.jit(lambda batch: logps_and_entropy(decoder_graph(model), params, batch, 1.0, Compute())[0])

    def sampled(prompt, tokens):
        """What a sampler of the rounded kernels records."""
        (batch,) = micro_batches([Group(prompt, [tokens], [0])], layout=Layout(64, 1), completion_tokens=8)
        return np.asarray(program(batch.arrays()))[0, : len(tokens)].tolist()

    inputs |= rounds.tables(rounds.base, 9, sampled)
    metrics = update.run(rounds.context(config, inputs, memory))
    # One step: both are those of the policy before it.
    assert metrics["steps"] == 1
    assert abs(metrics["kl"]) < 1e-6 and abs(metrics["mismatch_kl"]) < 1e-6


def test_an_equal_policy_with_another_critic_is_another_artifact(tmp_path):
    rounds = Rounds(tmp_path)
    configs = [settings(0, None, algorithm="ppo", critic={"learning_rate": rate}) for rate in (0.001, 0.1)]
    inputs = rounds.inputs(configs[0], rounds.base)
    one, other = (rounds.run(config, inputs, {})[0] for config in configs)
    assert policy_of(one) == policy_of(other)
    # The next round would continue differently: neither its key nor a worker's memory may take one for the other.
    assert one.digest != other.digest
