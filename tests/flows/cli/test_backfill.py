"""`rlhf backfill` evaluates finished policies by a recipe's present evaluation, and trains nothing."""

import json

import pytest

from rlhf.flows.recipe.reading import checked, load_recipe
from rlhf.flows.report.console import ConsoleReporter
from rlhf.flows.report.run_view import RunView
from rlhf.flows.running.runner import _check_tokenizers
from rlhf.flows.running.session import Session
from rlhf.stages.store.artifacts import ArtifactError, Store
from tests.flows.commands import typed


@pytest.mark.slow
def test_old_policies_are_evaluated_as_they_are_and_compared_in_pairs(store, rlhf, record):
    # Code that changed since: the keys of the run's stages are others, and nothing of them is computed.
    path = store / "runs" / "first" / "run.json"
    first = record(store, "first")
    typed("promote", "first", "--store", store)
    command = ["backfill", "smoke", "first", "first:sft", "champion", "--set", "evaluate.samples=1"]
    command += ["--set", "sft.epochs=9", "--no-prefect", "--store", store]
    rlhf(*command, "--name", "again")
    made = record(store, "again")
    assert [(name, e["state"]) for name, e in made["nodes"].items()] == [
        ("base", "hit"), ("prepare", "hit"), ("policy.first", "hit"), ("policy.first.sft", "hit"),
        ("policy.champion", "hit"), ("evaluate.base", "made"), ("evaluate.first", "made"),
        ("evaluate.first.sft", "made"), ("evaluate.champion", "hit"),
    ]  # fmt: skip
    # The champion is the policy of the run.
    assert checked(made["recipe"], path).backfill.keys() == {"first", "first.sft", "champion"}
    last = Store(str(store)).get(first["nodes"]["export"]["stage"], first["nodes"]["export"]["key"])
    assert made["nodes"]["policy.first"]["digest"] == last.manifest["inputs"]["policy"]["digest"]
    assert made["nodes"]["policy.first.sft"]["digest"] == first["nodes"]["sft"]["digest"]
    scores = {n: e["metrics"]["score"] for n, e in made["nodes"].items() if n.startswith("evaluate.")}
    assert scores["evaluate.first"] == scores["evaluate.champion"]
    view = RunView(Store(str(store)), made)
    assert view.differences(["first.sft", "first"])["first"]["first.sft"].mean == pytest.approx(
        scores["evaluate.first"] - scores["evaluate.first.sft"]
    )
    assert json.loads(path.read_text()) == first
    rlhf(*command, "--name", "repeated")
    assert {e["state"] for e in record(store, "repeated")["nodes"].values()} == {"hit"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["first:reward"], "first:reward: expected a finished policy of run first: base, sft, round-000.update"),
        (["first", "--set", "evaluate=null"], "evaluate is null: name a recipe with an evaluation"),
        (["first", "--set", "base.chat_date='2031-01-02'"], "another model's prompts (base.chat_date"),
        (["nobody"], "nobody"),
    ],
)
def test_policies_that_cannot_be_evaluated_are_refused(smoke_store, words, said):
    done = typed("backfill", "smoke", *words, "--no-prefect", "--store", smoke_store, code=2)
    assert said in done.stderr


def test_a_policy_of_another_template_is_refused_before_anything_is_evaluated(store, record):
    """The file of the template may have another content under the same name: bases are compared by their files."""
    first = record(store, "first")["nodes"]
    ends = {name: first[name][name_of] for name, name_of in (("sft", "digest"), ("base", "key"))}
    policy = {"run": "first", "stage": "sft", "key": first["sft"]["key"], "digest": ends["sft"]}
    other = first["prepare"]
    sets = [f"store={store}", "sft=null", "reward=null", "rl=null", "export=null"]
    for base, said in ((ends["base"], None), ("0" * 64, "another tokenizer, chat template or model")):
        whole = policy | {"base": base, "base_digest": first["base"]["digest"] if said is None else other["digest"]}
        recipe = load_recipe("smoke", sets=[*sets, f"backfill={json.dumps({'first': whole})}"])
        run = Session(recipe, ConsoleReporter(), f"of-{base[:4]}")
        run.run_node("base")
        if said is None:
            _check_tokenizers(run)
        else:
            with pytest.raises(ArtifactError, match=said):
                _check_tokenizers(run)
        run.finish("failed")
