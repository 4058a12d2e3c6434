"""The update's settings: presets of every algorithm hold, and settings that an algorithm ignores are refused."""

import dataclasses
import json

import pytest

from rlhf.stages.store.artifacts import Store
from rlhf.stages.update.settings import Config
from rlhf.stages.update.state import start_of
from rlhf.tuning.algorithms.registry import ALGORITHMS, presets
from rlhf.tuning.algorithms.settings import RoundSettings


def constant(algorithm):
    return {"constant": 3.0} if presets(algorithm).get("aggregation") == "constant" else {}


def settings(algorithm, **more):
    return Config.model_validate_json(json.dumps({"algorithm": algorithm} | constant(algorithm) | more))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_stage_and_the_core_fill_in_the_same_values(name):
    alone = RoundSettings.of(name, **constant(name))
    assert settings(name).objective == alone.objective
    fields = [f.name for f in dataclasses.fields(RoundSettings) if f.name not in ("optimizer", "critic", "compute")]
    assert all(getattr(settings(name), n) == getattr(alone, n) for n in fields)


def test_every_name_has_a_config_and_what_it_needs():
    for name, entry in ALGORITHMS.items():
        config = settings(name)
        assert (config.needs_critic, config.needs_greedy) == (entry.critic, entry.greedy)
        assert config.needs_reference == (entry.reference or config.kl_coef > 0 or config.kl_in_reward > 0)
        assert Config.model_validate_json(json.dumps(config.model_dump(mode="json"))) == config
    # The paper's (arXiv:2402.03300), also where the recipe leaves out the name.
    for grpo in (settings("grpo"), Config()):
        assert (grpo.aggregation, grpo.kl_coef, grpo.normalisation) == ("sequence-mean-token-mean", 0.04, "std")
        assert (grpo.clip_low, grpo.clip_high, grpo.kl_kind, grpo.epochs) == (0.2, 0.2, "k3", 1)
    assert not settings("grpo", kl_coef=0.0).needs_reference
    assert settings("dapo").clip_high == 0.28 and settings("dapo", clip_high=0.3).clip_high == 0.3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm": "grpoo"}, "no algorithm 'grpoo'; did you mean grpo?"),
        ({"algorithm": "gspo", "aggregation": "token-mean"}, "weighs a sequence once"),
        ({"algorithm": "rloo", "aggregation": "constant", "constant": 8.0}, "weighs a sequence once"),
        ({"kl_kind": "k1"}, "kl_kind k1 in the loss has a gradient of zero"),
        ({"algorithm": "cispo", "dual_clip": 3.0}, "dual_clip has no meaning with algorithm cispo"),
        ({"algorithm": "rloo", "normalisation": "batch-std"}, "normalisation has no meaning with algorithm rloo"),
        ({"algorithm": "grpo", "critic": {"lam": 0.9}}, "critic has no meaning with algorithm grpo"),
        ({"algorithm": "grpo", "beta": 0.2}, "beta has no meaning with algorithm grpo; it belongs to online-dpo"),
        ({"algorithm": "ppo", "tied_groups": "drop"}, "tied_groups has no meaning with algorithm ppo"),
        ({"algorithm": "online-dpo", "truncated": "mask-loss"}, "online-dpo has none of rewards alone; use mask"),
        ({"algorithm": "rloo", "truncated": "mask-loss"}, "set kl_in_reward to 0, or use mask"),
        ({"algorithm": "ppo", "truncated": "mask", "critic": {"bootstrap_truncated": True}}, "has no meaning where"),
        ({"algorithm": "grpo", "credit": "turn"}, "credit has no meaning with algorithm grpo"),
        ({"algorithm": "grpo", "step_gamma": 0.9}, "step_gamma has no meaning with algorithm grpo"),
        ({"algorithm": "gigpo", "normalisation": "batch-std"}, "gigpo compares turns of one state"),
        ({"algorithm": "ppo", "critic": {"high_level_lam": 0.9}}, "has a meaning with critic.bi_level_gae alone"),
        ({"algorithm": "dapo", "kl_target": 0.1}, "kl_target scales kl_coef and kl_in_reward, and both are 0"),
        ({"algorithm": "dapo", "algorithm_arguments": {"x": 1}}, "algorithm_arguments are for"),
        ({"correction": "mask", "importance_min": 1.0, "importance_max": 1.0}, "importance_min must be below"),
        ({"correction": "mask", "old_logps": "sampler"}, "sampler takes the sampler's for both: leave it out"),
        ({"importance_max": 1.5, "old_logps": "sampler"}, "importance_max is of weights between the trainer's"),
        ({"algorithm": "ppo", "old_logps": "sampler"}, "rounding of the sampler would be rewarded"),
        ({"algorithm": "gpg", "old_logps": "sampler"}, "old_logps has no meaning with algorithm gpg"),
        ({"algorithm": "a_module:own", "old_logps": "sampler"}, "a custom algorithm need not have one"),
        ({"algorithm": "online-dpo", "old_logps": "sampler"}, "old_logps has no meaning with algorithm online-dpo"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(values, message):
    with pytest.raises(ValueError) as e:
        Config.model_validate_json(json.dumps(values))
    assert message in str(e.value)


def test_the_start_of_many_rounds_is_read_once(tmp_path):
    store, policy, reads = Store(str(tmp_path / "store")), None, []
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "policy.json").write_text(str(number))
        ref = policy and {"policy": {"stage": policy.stage, "key": policy.key, "digest": policy.digest}}
        manifest = {"stage": "update" if number else "sft", "key": f"{number:064}", "metrics": {}, "inputs": ref or {}}
        policy = store.commit(folder, manifest | {"config": {"lora": None}})
    get = store.get
    store.get = lambda *key: reads.append(key) or get(*key)
    assert [start_of(Config(), policy).stage for _ in range(2)] == ["sft", "sft"] and len(reads) == 6
