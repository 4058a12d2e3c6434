"""SFT, reward models, preference learning and distillation arrive where the oracle arrives."""

from __future__ import annotations

from typing import Any

import pytest

from stages import distill, preference, reward, sft
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
        long, short = tokens_of(2, i, 2 + i), tokens_of(3, i, 1 + (3 * i) % 5)
        if name == "preference":
            row |= {"chosen_ids": long, "rejected_ids": short, "chosen": "c", "rejected": "r", "margin": [None, 0.5][i % 2]}
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


@pytest.mark.parametrize("steps", [{}, {"tokens_per_step": 20, "epochs": 2}])
def test_sft(steps: dict[str, Any], product: Product, prepared: Any) -> None:
    made, metrics, settings = product.run(
        sft, COMMON | steps, {"base": product.base, "data": prepared, "tokenizer": product.base}
    )
    policy = model.load(product.base.local("model/"))
    start = policy.dense
    rows = tables.read(prepared.local("sft/"))
    assert fit.sft(settings, policy, rows, SEED) == metrics["steps"]
    assert_same(f"sft {steps}", start, policy.dense, model.weights_of(made.local("model/")))
