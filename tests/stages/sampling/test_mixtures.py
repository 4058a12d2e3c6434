"""A round of GRPO of a mixture of experts by its stages: the rollouts record experts, and the update replays them."""

import shutil

import jax
import pyarrow.parquet as pq
import pytest

from rlhf.stages import rollout
from rlhf.stages.common.compilation import configure_jax
from rlhf.stages.sampling.environment import Environment
from rlhf.stages.update import stage as update
from rlhf.tuning.models.huggingface import random_params, save_decoder
from rlhf.tuning.models.tokenizer import save_tokenizer
from rlhf.tuning.rows import CompletionRow, ScoreRow, write_table
from tests.stages.training.support import TOKENIZER, Folder, data, ids, perform, rows
from tests.tuning.models.mixtures import mixture

MODEL = mixture(len(TOKENIZER))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    configure_jax()
    folder = tmp_path_factory.mktemp("mixture")
    params = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, random_params(MODEL, 3))
    save_decoder(folder / "model", MODEL, params, {})
    save_tokenizer(TOKENIZER, folder / "tokenizer")
    base = Folder(folder, "base")
    table = [
        {"id": f"p{i}", "prompt_ids": ids(text, end=False), "prompt": text, "answer": "1", "metadata": "{}"}
        for i, text in enumerate(["1+1=", "some words?", "2*3=", "again, more words"])
    ]
    return folder, {"policy": base, "tokenizer": base, "data": data(folder / "data", prompts=table)}


def sampled(inputs, name, **changes):
    folder, given = inputs
    config = rollout.Config(prompts=4, completions=4, max_tokens=6, shard_prompts=2, **changes)
    return perform(rollout, config, folder / name, {}, **given)[1]


def updated(inputs, name, rollouts, **changes):
    folder, given = inputs
    every = rows(rollouts, "rollouts", CompletionRow)
    scores = [ScoreRow(place=r.place, sample=r.sample, prompt_id=r.prompt_id, total=float(r.sample % 2)) for r in every]
    made = folder / f"scores of {name}"
    (made / "scores").mkdir(parents=True)
    write_table(made / "scores" / "a.parquet", scores, ScoreRow.schema(["even"]))
    more = {"rollouts": rollouts, "scores": Folder(made, name), "reference": given["policy"]}
    config = update.Config(prompts_per_step=4, optimizer={"learning_rate": 1e-3}, **changes)
    metrics, policy = perform(update, config, folder / f"update {name}", {}, **given | more)
    return metrics, policy.local("policy.json").read_text()


@pytest.mark.slow
def test_a_round_replays_its_experts_and_comes_again_to_the_bit_after_a_kill(inputs):
    whole = sampled(inputs, "whole")
    table = pq.read_table(whole.local("rollouts"))
    tokens = [len(p) + len(t) - 1 for p, t in zip(table["prompt_ids"], table["token_ids"], strict=True)]
    numbers = [len(x.as_py()) for x in table["routing"]]
    assert numbers == [n * MODEL.num_layers * MODEL.experts_per_token for n in tokens]
    # A kill leaves one of two shards.
    folder = inputs[0]
    shutil.copytree(folder / "whole" / "work", folder / "killed" / "work")
    shutil.rmtree(folder / "killed" / "work" / "rollouts-00001")
    again = sampled(inputs, "killed")
    for path in whole.local("rollouts").iterdir():
        assert again.local("rollouts").joinpath(path.name).read_bytes() == path.read_bytes()
    metrics, policy = updated(inputs, "whole", whole)
    assert metrics["mismatch_kl"] < 1e-9 and metrics["router_disagreement"] < 0.02
    assert updated(inputs, "killed", again)[1] == policy
    free, other = updated(inputs, "free", whole, routing="free")
    assert free["mismatch_kl"] < 1e-6 and free["router_disagreement"] == 0
    assert other != policy or free["mismatch_kl"] == metrics["mismatch_kl"]


@pytest.mark.slow
def test_experts_of_another_engine_are_a_mismatch_without_a_replay(inputs):
    """A sampler whose routers round otherwise: here it samples in bfloat16, and the trainer computes in float32."""
    narrow = sampled(inputs, "narrow", compute={"dtype": "bfloat16"})
    kl = {
        how: updated(inputs, f"narrow {how}", narrow, routing=how, max_mismatch_kl=10.0)[0]["mismatch_kl"]
        for how in ("replay", "free")
    }
    assert 0 < kl["replay"] < kl["free"]


@pytest.mark.slow
def test_trajectories_record_experts_too(inputs):
    played = sampled(inputs, "played", environment=Environment(name="guess", turns=3, max_tokens=120, lockstep=True))
    for row in rows(played, "rollouts", CompletionRow):
        tokens = len(row.prompt_ids) + len(row.token_ids) - 1
        assert len(row.routing) == tokens * MODEL.num_layers * MODEL.experts_per_token
    metrics, _ = updated(inputs, "played", played)
    assert metrics["mismatch_kl"] < 1e-9
