"""Recipes without RL: what was trained last is judged and exported."""

import json

import pytest

from rlhf.stages.store.artifacts import Store

pytestmark = pytest.mark.slow

STEP = "examples_per_step: 16, learning_rate: 0.003"
SETS = [
    "rl=null",
    "reward=null",
    f"distill={{teacher: sft, on_policy: 0.5, max_tokens: 6, {STEP}}}",
    f"preference={{loss: dpo, {STEP}}}",
]


def test_distillation_and_preference_in_one_run(rlhf, store, record):
    words = [w for item in [*SETS, f"store={store}"] for w in ("--set", item)]
    shown = rlhf("run", "smoke", "--no-prefect", "--name", "ways", *words).stdout
    nodes = record(store, "ways")["nodes"]
    # The data is made again, without prompts, and what reads its other parts is not.
    hits = {n for n, e in nodes.items() if e["state"] == "hit"}
    assert hits == {"base", "sft", "evaluate.base", "evaluate.sft"}
    taught, judged = nodes["distill"]["metrics"], nodes["preference"]["metrics"]
    assert taught["heldout_divergence"] < taught["heldout_divergence_before"]
    assert judged["heldout_ranking"] > judged["heldout_ranking_before"]
    assert judged["heldout_accuracy"] > 0.5 and judged["heldout_margin"] > 0
    exported = Store(str(store)).get("export", nodes["export"]["key"])
    made = exported.manifest["inputs"]["policy"]
    assert made["key"] == nodes["preference"]["key"]
    for text in ("held-out divergence", "held-out accuracy", "distilled", "preference"):
        assert text in shown
    page = (store / "runs" / "ways" / "report.html").read_text()
    assert "Distillation" in page and "Preference" in page

    provenance = json.loads((store / "artifacts" / "export" / nodes["export"]["key"] / "provenance.json").read_text())
    assert {p["stage"] for p in provenance} == {"base", "prepare", "sft", "distill", "preference"}
