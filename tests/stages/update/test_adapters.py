"""Rounds of RL on one adapter: it goes on through them, from memory, from its stored state and by replay."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlhf.stages.common.models import load_rounded
from rlhf.stages.store.manifests import with_checksum
from rlhf.stages.training.adapters import lora_config
from rlhf.stages.update import stage as update
from rlhf.stages.update.state import State, fingerprint_of
from rlhf.tuning.device import Compute
from rlhf.tuning.models import huggingface
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.identity import fingerprint
from rlhf.tuning.models.lora import merge
from rlhf.tuning.training.batch import Group, Layout, micro_batches
from rlhf.tuning.training.forward import logps_and_entropy
from tests.stages.update.support import CONFIG, Rounds, policy_of, settings
from tests.tuning.models.adapters import load_adapter

pytestmark = pytest.mark.slow


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
