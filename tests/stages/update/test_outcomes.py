"""Every completion of a round has one fate with a reason; a round whose rewards teach nothing says why (R25)."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest

from rlhf.stages.contract.registry import stage
from rlhf.stages.sampling.groups import Scored, chosen_groups
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.stages.update.settings import Config
from rlhf.stages.update.stage import NO_BASELINE, IdleRounds, check_idle, fates_of, idle_metrics
from rlhf.stages.update.state import start_of
from rlhf.tuning.algorithms.registry import ALGORITHMS, presets
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.rounds import RoundResult
from rlhf.tuning.algorithms.selection import Selection
from rlhf.tuning.algorithms.settings import RoundSettings
from rlhf.tuning.rows import CompletionRow, FateRow, ScoreRow, names_of, read_table, write_table

TOTALS = [(0, 1), (1, 1), (1, None), (1, 0), (0, 1)]
"""Rewards of two completions of each place; the last of the fourth is cut off."""


def scored(prompts):
    names = [{"place": p, "sample": s, "prompt_id": f"p{p}"} for p in range(len(TOTALS)) for s in (0, 1)]
    rollouts = [
        CompletionRow(
            **name, prompt_ids=[1], token_ids=[2, 3], logprobs=[-1.0] * 2,
            stop="length" if (name["place"], name["sample"]) == (3, 1) else "eos",
        )
        for name in names
    ]  # fmt: skip
    totals = [total for pair in TOTALS for total in pair]
    scores = [
        ScoreRow(**name, total=total, failure=None if total is not None else "exact: boom")
        for name, total in zip(names, totals, strict=True)
    ]
    return Scored([[row] for row in rollouts], scores, prompts)


def result(taken, settings, greedy_N=None):
    """What a round on these would return of its completions."""
    data = dataclasses.replace(RoundData.from_rows(taken.rollouts, taken.scores), greedy_N=greedy_N)
    chosen = Selection.of(data, settings)
    trained_N, signal_N = chosen.trained(), chosen.signal_N
    advantages_N = np.where(np.arange(len(trained_N)) == 8, np.nan, np.arange(len(trained_N)))
    filtered_N = chosen.filtered_N
    return RoundResult(None, None, None, {}, trained_N, signal_N, advantages_N, filtered_N)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"truncated": "keep", "tied_groups": "drop"}, "trained trained tied tied tied failed trained trained"),
        ({"truncated": "mask", "tied_groups": "drop"}, "trained trained tied tied tied failed tied truncated"),
        ({"truncated": "keep", "kl_coef": 0.0}, "trained trained trained trained trained failed trained trained"),
    ],
)
def test_a_completion_has_one_fate_and_those_that_were_not_trained_a_reason(settings, expected, tmp_path):
    every, how = scored(prompts=5), RoundSettings.of("grpo", **settings)
    rows = fates_of(every, every, result(every, how), how.truncated)
    write_table(tmp_path / "a.parquet", rows, FateRow.schema())
    assert read_table([tmp_path / "a.parquet"], FateRow) == rows
    assert names_of(rows) == names_of(every.rollouts)
    assert [row.fate for row in rows] == [*expected.split(), "trained", "trained"]
    assert all(row.reason for row in rows if row.fate != "trained") and rows[5].reason == "exact: boom"
    # One number a completion, of those in the loss alone; the tokens of the last but one differ.
    assert (rows[1].advantage, rows[5].advantage, rows[8].advantage) == (1.0, None, None)


def test_groups_of_little_variety_are_called_filtered():
    every, how = scored(prompts=5), RoundSettings.of("grpo", kl_coef=0.1, keep_most_varied=0.4)
    rows = fates_of(every, every, result(every, how), "keep")
    # Places 0, 3 and 4 vary alike: the first two of them stay.
    assert [row.fate for row in rows] == ["trained"] * 2 + ["filtered"] * 3 + ["failed"] + ["trained"] * 2 + [
        "filtered"
    ] * 2
    assert all("keep_most_varied" in row.reason for row in rows if row.fate == "filtered")


def test_a_failed_episode_has_failed_whatever_its_reward():
    every = scored(prompts=5)
    trajectories = [
        [dataclasses.replace(r, stop="failed") if (r.place, r.sample) == (0, 1) else r] for r in every.rollouts
    ]
    every, how = dataclasses.replace(every, trajectories=trajectories), RoundSettings.of("grpo", tied_groups="drop")
    rows = fates_of(every, every, result(every, how), "keep")
    assert (rows[0].fate, rows[1].fate, rows[1].reason) == ("tied", "failed", "its episode failed")
    taken, _ = chosen_groups(every, "train")
    assert {row.place for row in taken.rollouts} == {3, 4}


def test_groups_that_a_round_with_refills_does_not_take_are_spare_or_failed():
    every = scored(prompts=2)
    taken, about = chosen_groups(every, "stop")
    rows = fates_of(every, taken, result(taken, RoundSettings.of("grpo", kl_coef=0.0)), "keep")
    assert Counter(row.fate for row in rows) == {"trained": 4, "failed": 1, "spare": 5}
    assert about == {"prompts_sampled": 5, "prompts_without_signal": 2, "prompts_to_spare": 1}


def test_a_completion_without_a_baseline_is_not_called_tied():
    every, how = scored(prompts=5), RoundSettings.of("remax", kl_in_reward=0.0)
    greedy_N = np.repeat([0.0, np.nan, 1.0, 0.0, 0.0], 2)
    rows = fates_of(every, every, result(every, how, greedy_N), "keep", greedy_N)
    assert [row.fate for row in rows] == ["trained"] * 2 + ["unchosen"] * 2 + ["trained", "failed"] + ["trained"] * 4
    assert {row.reason for row in rows if row.place == 1} == {NO_BASELINE}
    assert rows[5].reason == "exact: boom"


YES, NO = np.ones(4, bool), np.zeros(4, bool)
SOME, LAST = np.arange(4) < 3, np.arange(4) == 3
DATA = RoundData([[1]] * 4, [[2]] * 4, [[0.0]] * 4, np.arange(4) // 2, np.ones(4, np.float32), YES, NO)
NOTHING = {"steps": 0, "groups": 2, "tied": 2, "informative": 0}


def parent(name="sft", **metrics):
    return Artifact(Store("memory://idle"), {"stage": name, "key": "k", "metrics": metrics})


@pytest.mark.parametrize(
    ("changed", "metrics", "truncated", "reason"),
    [
        ({}, NOTHING, "keep", r"score alike \(0 of 4 have no reward, 0 were cut off\)"),
        ({"valid_N": NO}, NOTHING, "keep", "none of the 4 completions has a reward"),
        ({"truncated_N": YES}, NOTHING, "mask", r"cut off at max_tokens \(4\), and truncated is mask"),
        ({"truncated_N": YES}, NOTHING, "mask-loss", r"cut off at max_tokens \(4\), and truncated is mask-loss"),
        ({"truncated_N": YES}, NOTHING, "keep", r"\(0 of 4 have no reward, 4 were cut off and kept\)"),
        ({"truncated_N": SOME}, NOTHING, "keep", r"0 of 4 have no reward, 3 were cut off and kept\)"),
        ({"truncated_N": SOME}, NOTHING, "mask", r"0 of 4 have no reward, 3 were cut off and masked\)"),
        # What has no reward and was cut off too is told once.
        ({"truncated_N": SOME, "valid_N": LAST}, NOTHING, "keep", r"\(3 of 4 have no reward, 0 were cut off\)"),
        # No group ties for an algorithm with a baseline of its own: its steps are for KL and entropy.
        ({}, NOTHING | {"steps": 2, "tied": 0}, "keep", "score alike .*; its steps had other terms alone"),
        ({}, {"steps": 2, "skipped": 2, "informative": 2}, "keep", "gradients of all 2 steps were not finite"),
    ],
)
def test_a_round_that_teaches_nothing_says_why(changed, metrics, truncated, reason):
    found = idle_metrics(dataclasses.replace(DATA, **changed), metrics, Config(truncated=truncated), parent())
    assert found["idle_rounds"] == 1
    with pytest.raises(IdleRounds, match=f"1 rounds in a row have taught nothing; in this one .*{reason}"):
        check_idle(found, 1)
    assert stage("update").figures(found) == f"taught nothing: {found['idle']}"


def test_without_any_reward_the_advice_is_of_rewards_and_not_of_samples():
    found = idle_metrics(dataclasses.replace(DATA, valid_N=NO), NOTHING, Config(), parent())
    with pytest.raises(
        IdleRounds, match="each reward returned None for it, or failed. A built-in reward has none fo"
    ) as e:
        check_idle(found, 1)
    assert "easier prompts" not in str(e.value)


def test_rounds_in_a_row_are_counted_and_one_that_trains_begins_anew():
    second = idle_metrics(DATA, NOTHING, Config(), parent("update", idle_rounds=1))
    assert second["idle_rounds"] == 2
    check_idle(second, 3)
    trained = idle_metrics(
        DATA, {"steps": 2, "skipped": 1, "informative": 1}, Config(), parent("update", idle_rounds=2)
    )
    assert trained == {}
    check_idle(trained, 1)
    assert idle_metrics(DATA, NOTHING, Config(), parent("update"))["idle_rounds"] == 1


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
