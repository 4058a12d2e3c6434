"""Rounds of every algorithm arrive where the oracle arrives."""

from typing import Any

import pytest

from rlhf.stages.update import stage as update
from rlhf.tuning.algorithms.registry import ALGORITHMS, presets
from tests.oracle.agreement import assert_same
from tests.oracle.plain import model, refills, rl, tables
from tests.oracle.product import Product
from tests.oracle.rounds import COMMON, assert_fates, check_round, update_once
from tests.oracle.tables import Drawn, round_of

pytestmark = pytest.mark.slow

# Those of turns are in test_turns.py.
NAMES = [name for name, entry in ALGORITHMS.items() if not entry.turns]


@pytest.mark.parametrize("algorithm", NAMES)
def test_every_algorithm(algorithm: str, product: Product) -> None:
    more = {"constant": 5.0} if presets(algorithm).get("aggregation") == "constant" else {}
    # Two passes: in the second one pi is no longer pi_old.
    check_round(algorithm, product, {"algorithm": algorithm, "epochs": 2} | more, awkward())


def awkward() -> list[Drawn]:
    """A round with everything that befalls completions; two of its places have one prompt."""
    return [
        *(Drawn(0, 0, i, 2 + i, t) for i, t in enumerate((0.0, 1.0, 0.3))),
        *(Drawn(1, 1, i, 5 - i, t) for i, t in enumerate((1.0, None, 0.2))),
        *(Drawn(0, 2, i, 3, t, unseen=i == 1) for i, t in enumerate((0.5, 0.0))),
        *(Drawn(2, 3, i, 4 + i, 1.0) for i in range(2)),
        *(Drawn(3, 4, i, 3 + 2 * i, t, truncated=i == 2) for i, t in enumerate((0.1, 0.9, 0.4))),
        Drawn(4, 5, 0, 3, 0.7),
    ]


OPTIONS: dict[str, dict[str, Any]] = {
    "kl in both": {"kl_coef": 0.1, "kl_in_reward": 0.2, "kl_kind": "k3-k2", "entropy_coef": 0.02, "kl_clamp": 2.0},
    "masked": {"truncated": "mask", "aggregation": "sequence-mean-token-mean", "normalisation": "batch-std"},
    "masked in the loss": {"truncated": "mask-loss", "kl_coef": 0.1},
    "ties stay": {"tied_groups": "count", "kl_coef": 0.3, "aggregation": "sequence-mean-token-sum"},
    "high entropy": {"top_entropy": 0.3, "epochs": 2},
    "ties count": {"kl_coef": 0.0, "prompts_per_step": 1, "epochs": 2},
    "ties leave": {"tied_groups": "drop", "kl_coef": 0.3, "aggregation": "constant", "constant": 6.0},
    "sequence weights": {"correction": "sequence", "importance_max": 1.5},
    "masked weights": {"correction": "mask", "importance_min": 0.8, "importance_max": 1.3, "normalisation": "none"},
    "by the sampler": {"old_logps": "sampler", "kl_coef": 0.2, "kl_kind": "k3-k2", "epochs": 2},
    "critic by the sampler": {"algorithm": "ppo", "old_logps": "sampler", "kl_in_reward": 0.0, "epochs": 2},
    "masked sequences": {"correction": "sequence-mask", "importance_min": 0.9, "importance_max": 1.1, "dual_clip": 1.5},
    "pair masked": {"algorithm": "online-dpo", "truncated": "mask"},
    "whitening masked": {"algorithm": "reinforce-pp", "truncated": "mask", "epochs": 2},
    "whitening of groups masked": {"algorithm": "reinforce-pp-baseline", "truncated": "mask"},
    "leave-one-out of ties": {"algorithm": "rloo", "kl_in_reward": 0.5},
    "critic": {
        "algorithm": "ppo",
        "truncated": "mask",
        "critic": {"pretrain_epochs": 2, "whiten_rewards": True, "gamma": 0.9, "value_clip": 0.05},
    },
    "critic goes on": {
        "algorithm": "ppo",
        "critic": {"bootstrap_truncated": True, "optimizer": {"learning_rate": 0.01, "clip_norm": None}},
        "epochs": 2,
    },
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case: str, product: Product) -> None:
    check_round(case, product, {"algorithm": "grpo"} | OPTIONS[case], awkward())


TIED = {
    "critic": {"algorithm": "ppo", "optimizer": {"weight_decay": 0.1}},
    "critic and entropy": {"algorithm": "ppo", "entropy_coef": 0.05},
    "whitening": {"algorithm": "reinforce-pp", "kl_in_reward": 0.2},
    "whitening of groups": {"algorithm": "reinforce-pp-baseline", "kl_in_reward": 0.2, "kl_coef": 0.1},
    "spread of the round": {"algorithm": "grpo", "normalisation": "batch-std", "kl_in_reward": 0.2, "kl_coef": 0.0},
}


@pytest.mark.parametrize("case", TIED)
def test_a_round_that_ties_on_the_task(case: str, product: Product) -> None:
    drawn = [Drawn(p, p, i, 3 + p + i, 1.0) for p in range(2) for i in range(3)]
    check_round(case, product, TIED[case], drawn)


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}])
def test_two_rounds_with_what_they_pass_on(lora: Any, product: Product) -> None:
    """Moments of the optimizer and adapted coefficients go from round to round; the second one is stale."""
    config = COMMON | {"algorithm": "grpo", "kl_coef": 0.1, "kl_target": 0.001, "kl_horizon": 20.0, "lora": lora}
    config |= {"entropy_target": 9.0, "entropy_coef": 0.01, "optimizer": {"learning_rate": 0.01, "weight_decay": 0.1}}
    policy, last, learner, coefficients = product.base, None, None, None
    for number in range(2):
        made, now = update_once(product, config | {"round": number}, awkward(), number, policy)
        if learner is None:
            adapter = product.adapter(lora, product.base, "decoder") if lora else None
            module = model.load(product.base.local("model/"), adapter)
            learner, start = rl.Learner.of(module, now.settings["optimizer"]), module.dense
        now.policy, now.coefficients = learner, coefficients or now.coefficients
        now.run()
        coefficients, policy = now.next_coefficients(), made
        last = tables.read_json(made.local("policy.json"))
        assert last["kl_scale"] == pytest.approx(coefficients.kl, rel=1e-9)
        assert last["entropy_coef"] == pytest.approx(coefficients.entropy, rel=1e-9)
    found = model.weights_of(policy.local("state/model/")) if lora is None else None
    if found is None:
        found = model.load(product.base.local("model/"), policy.local("adapter/")).dense
    assert_same(f"two rounds {'lora' if lora else ''}", start, learner.model.dense, found)


@pytest.mark.parametrize(
    ("truncated", "trained"),
    [("keep", [0, 0, 0, 1, 1, 3, 3]), ("mask-loss", [0, 0, 1, 1, 3, 3]), ("mask", [1, 1, 3, 3, 5, 5])],
)
def test_refills_take_the_place_of_groups_without_signal(truncated: str, trained: list[int], product: Product) -> None:
    """The group of place 0 differs by a completion alone that was cut off."""
    first = [Drawn(p, p, i, 3 + i, float(p == 1 and i)) for p in range(3) for i in range(2)]
    first.insert(2, Drawn(0, 0, 2, 4, 1.0, truncated=True))
    second = [Drawn(p, p, i, 2 + i, float(p != 4 and i)) for p in (3, 4, 5, 6) for i in range(2)]
    inputs, rows = {}, []
    for name, drawn in (("", first), ("refill_1", second)):
        rollouts, scores = round_of(drawn, product.base.digest, 3)
        inputs[name or "rollouts"] = product.rollouts(rollouts)
        inputs[f"{name}_scores".lstrip("_")] = product.scores(scores)
        kept = [inputs[name or "rollouts"].local("rollouts/"), inputs[f"{name}_scores".lstrip("_")].local("scores/")]
        rows += tables.joined(*map(tables.read, kept))
    shared = {"policy": product.base, "tokenizer": product.base}
    made, metrics, settings = product.run(
        update, COMMON | {"algorithm": "dapo", "truncated": truncated}, inputs | shared
    )
    completions = [rl.Completion.of(row) for row in rows]
    counts = refills.choose(completions, len({d.place for d in first}), truncated)
    learner = rl.Learner.of(model.load(product.base.local("model/")), settings["optimizer"])
    start = learner.model.dense
    rl.Round(settings, completions, learner).run()
    assert [c.group for c in completions if c.fate == "trained"] == trained
    assert {name: metrics[name] for name in counts} == counts
    assert_fates(made, completions)
    assert_same(
        f"refills, truncated: {truncated}", start, learner.model.dense, model.weights_of(made.local("state/model/"))
    )
