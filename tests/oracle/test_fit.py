"""SFT, reward models, preference learning and distillation arrive where the oracle arrives."""

from typing import Any

import pytest

from rlhf.stages import distill, preference, reward, sft
from tests.oracle.agreement import assert_same
from tests.oracle.plain import fit, model, tables
from tests.oracle.product import DTYPE, SEED, Product
from tests.oracle.tables import tokens_of

ROWS = 7
COMMON: dict[str, Any] = {
    "examples_per_step": 3,
    "compute": {"dtype": DTYPE},
    "optimizer": {"learning_rate": 0.01, "schedule": "linear", "warmup_steps": 1},
}


def examples(name: str) -> list[dict[str, Any]]:
    """Rows of a table of prepared data, no two of one size."""
    found = []
    for i in range(ROWS):
        row: dict[str, Any] = {"id": f"{i:04d}", "prompt": "p", "prompt_ids": tokens_of(1, i, 2 + i % 3)}
        long, short = tokens_of(2, i, 2 + 2 * i), tokens_of(3, i, 1 + (3 * i) % 5)
        if name == "preference":
            row |= {
                "chosen_ids": long,
                "rejected_ids": short,
                "chosen": "c",
                "rejected": "r",
                "margin": [None, 0.5][i % 2],
            }
        else:
            mask = [int((j + i) % 3 > 0) for j in range(len(long))] if i % 2 else None
            row |= {"completion_ids": long, "completion": "c"}
            row |= {"label": i % 3 > 0} if name == "labelled" else {"completion_mask": mask}
        found.append(row)
    return found


@pytest.fixture(scope="module")
def prepared(product: Product) -> Any:
    """Prepared data; the held-out tables say that nothing of the others is held out."""
    names = ("sft", "preference", "labelled")
    return product.data(**{n: examples(n) for n in names}, **{f"heldout_{n}": examples(n)[:2] for n in names[1:]})


def slow(*names: str) -> list[Any]:
    """Cases that share their programs' shape with another one, and so find less for their time."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


LORA = {"rank": 2, "alpha": 3.0, "use_rslora": True, "targets": ["q", "v", "down"]}
STEPS: dict[str, dict[str, Any]] = {
    "tokens": {"tokens_per_step": 20, "epochs": 2},
    "lora": {
        "lora": LORA,
        # Two micro-batches.
        "examples_per_step": ROWS,
        "compute": {"dtype": DTYPE, "tokens_per_micro_batch": 64},
        "epochs": 2,
    },
    "dft": {"loss": "dft"},
    "decay": {"optimizer": {"weight_decay": 0.1, "clip_norm": 0.2, "schedule": "cosine", "learning_rate": 0.01}},
    "wsd": {
        "optimizer": {"schedule": "wsd", "warmup_steps": 2, "end_fraction": 0.1, "learning_rate": 0.01},
        "epochs": 3,
    },
    # Without a bias correction its first steps are four times Adam's, and so is what rounding becomes (`TOLERANCE`): at
    # a quarter of the rate they are as long.
    "rmsprop": {"optimizer": {"name": "rmsprop", "learning_rate": 0.0025, "epsilon": 1e-6}, "epochs": 2},
    **{
        name: {"optimizer": {"name": name, "learning_rate": 0.01}, "epochs": 2}
        for name in ("adam", "nadamw", "amsgrad", "sgd", "lion")
    },
}


@pytest.mark.parametrize("case", ["lora", *slow(*(name for name in STEPS if name != "lora"))])
def test_sft(case: str, product: Product, prepared: Any) -> None:
    inputs = {"base": product.base, "data": prepared, "tokenizer": product.base}
    made, metrics, settings = product.run(sft, COMMON | STEPS[case], inputs)
    adapter = None if settings["lora"] is None else product.adapter(settings["lora"], product.base, "decoder")
    policy = model.load(product.base.local("model/"), adapter)
    start = policy.dense
    assert fit.sft(settings, policy, tables.read(prepared.local("sft/")), SEED) == metrics["steps"]
    assert_same(f"sft {case}", start, policy.dense, model.weights_of(product.weights(made)))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA])
def test_reward_model(lora: Any, product: Product, prepared: Any) -> None:
    config = COMMON | {"centering": 0.05, "margin_weight": 0.5, "lora": lora}
    made, _, settings = product.run(reward, config, {"base": product.base, "data": prepared, "tokenizer": product.base})
    adapter = None if lora is None else product.adapter(settings["lora"], product.base, "scalar")
    scorer = model.load(product.base.local("model/"), adapter, fresh_head=True)
    start = scorer.dense
    fit.reward(settings, scorer, tables.read(prepared.local("preference/")), SEED)
    found = model.weights_of(product.weights(made))
    assert_same(f"reward {'lora' if lora else ''}", start, scorer.dense, found)


LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {"sft_weight": 0.3, "ld_alpha": 0.5},
    "dpo-lora": {"loss": "dpo", "lora": LORA},
    "dpo-js": {"loss": "dpo", "divergence": "js", "label_smoothing": 0.2},
    "dpo-forward": {"loss": "dpo", "divergence": "forward-kl", "average": True},
    "exo-pair": {"label_smoothing": 0.01},
    "robust": {"label_smoothing": 0.1},
    **{n: {} for n in ("ipo", "hinge", "nca-pair", "sppo-hard", "apo-zero", "apo-down", "discopop")},
    **{n: {} for n in ("orpo", "simpo", "cpo")},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LOSSES)
def test_preference_on_pairs(case: str, product: Product, prepared: Any) -> None:
    config = COMMON | {"loss": case} | LOSSES[case]
    alone = config["loss"] in ("orpo", "simpo", "cpo")
    inputs = {"policy": product.base, "data": prepared, "tokenizer": product.base}
    # Another model than the policy: at ratios of 1 many losses look alike.
    made, _, settings = product.run(preference, config, inputs | ({} if alone else {"reference": product.other}))
    adapter = None if settings["lora"] is None else product.adapter(settings["lora"], product.base, "decoder")
    policy = model.load(product.base.local("model/"), adapter)
    reference = None if alone else model.load(product.other.local("model/"))
    start = policy.dense
    fit.preference(settings, policy, reference, tables.read(prepared.local("preference/")), SEED)
    assert_same(case, start, policy.dense, model.weights_of(product.weights(made)))


@pytest.mark.parametrize("source", slow("labelled", "data"))
@pytest.mark.parametrize("loss", ["kto", *slow("apo-zero-unpaired")])
def test_preference_on_labels(source: str, loss: str, product: Product, prepared: Any) -> None:
    config = COMMON | {"loss": loss, "beta": 1.0, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    inputs = {"policy": product.base, "reference": product.other, "tokenizer": product.base, source: prepared}
    made, _, settings = product.run(preference, config, inputs)
    policy, reference = (model.load(a.local("model/")) for a in (product.base, product.other))
    start = policy.dense
    rows = tables.read(prepared.local("labelled/"))
    if source == "data":
        rows = fit.apart(tables.read(prepared.local("preference/")))
    fit.labelled(settings, policy, reference, rows, SEED)
    assert_same(f"{loss} on {source}", start, policy.dense, model.weights_of(product.weights(made)))


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["jsd", "forward-kl", "reverse-kl"])
def test_distillation(divergence: str, product: Product, prepared: Any) -> None:
    config = COMMON | {"divergence": divergence, "on_policy": 0.0, "temperature": 1.5, "heldout_fraction": 0.0}
    config |= {"beta": 0.3} if divergence == "jsd" else {}
    inputs = {"policy": product.base, "teacher": product.other, "data": prepared, "tokenizer": product.base}
    made, _, settings = product.run(distill, config, inputs)
    policy, teacher = (model.load(a.local("model/")) for a in (product.base, product.other))
    start = policy.dense
    fit.distill(settings, policy, teacher, tables.read(prepared.local("sft/")), SEED)
    assert_same(f"distillation {divergence}", start, policy.dense, model.weights_of(product.weights(made)))


@pytest.mark.slow
def test_what_is_held_out_is_not_trained_on(product: Product) -> None:
    """By prompt and not by row: what the reward model is measured on shares no prompt with what it has learned."""
    rows = [row | {"id": f"{i}-{row['id']}", "group": row["id"]} for i in range(3) for row in examples("preference")]
    data = product.data(preference=rows)
    config = COMMON | {"heldout_fraction": 0.4}
    made, metrics, settings = product.run(
        reward, config, {"base": product.base, "data": data, "tokenizer": product.base}
    )
    held = {row["id"] for row in tables.read(made.local("heldout/"))}
    rows = tables.read(data.local("preference/"))
    rest = [row for row in rows if row["id"] not in held]
    prompts = {tuple(row["prompt_ids"]) for row in rows if row["id"] in held}
    assert len(held) == metrics["heldout_pairs"] > 0
    assert not prompts & {tuple(row["prompt_ids"]) for row in rest}
    scorer = model.load(product.base.local("model/"), fresh_head=True)
    start = scorer.dense
    fit.reward(settings, scorer, rest, SEED)
    assert_same("reward without what is held out", start, scorer.dense, model.weights_of(product.weights(made)))
