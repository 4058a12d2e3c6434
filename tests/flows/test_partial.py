"""A run whose completions go on from round to round: every command works on it, and the laws of its audit hold it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.auditing import carried, prompts
from stages.auditing.laws import audit, look
from stages.auditing.run import AuditedRun
from stages.common.tables import read_table
from stages.common.trained import prompts_among, trained_names
from stages.store.artifacts import Store
from tests.faults.support import Run, shards
from tests.stages.auditing.support import broken, edited, restated
from tuning.rows import CompletionRow

SETS = {
    "sft": "null",
    "reward": "null",
    "evaluate": "null",
    "export": "null",
    "rl.rounds": 2,
    "rl.rollout": "{prompts: 2, completions: 4, max_tokens: 6, shard_prompts: 1}",
    "rl.partial": "{round_tokens: 3}",
    "rl.score.rewards.model": "{function: matches, arguments: {pattern: '.*[a-mA-M0-4].*'}}",
    "rl.update": "{prompts_per_step: 2, max_idle_rounds: 9, optimizer: {learning_rate: 0.001}}",
}
WORDS = [word for name, value in SETS.items() for word in ("--set", f"{name}={value}")]
OF_ROUNDS = {law.name: law for law in (*carried.LAWS, *prompts.LAWS)}
Audited = tuple[Store, dict[str, Any]]


@pytest.fixture(scope="module")
def made(rlhf, tmp_path_factory) -> Path:
    """The store after the run `carried`."""
    store = tmp_path_factory.mktemp("partial") / "store"
    rlhf("run", "smoke", "--no-prefect", "--name", "carried", "--store", store, *WORDS)
    return store


@pytest.fixture(scope="module")
def copied(made: Path, tmp_path_factory) -> Path:
    """A copy of the store for tests that change rollouts of the run."""
    return Path(shutil.copytree(made, tmp_path_factory.mktemp("copied") / "store"))


@pytest.fixture
def run(made: Path, copied: Path, record: Callable[..., dict[str, Any]]) -> Iterator[Audited]:
    """The copy, whose rollouts are those of the run again behind the test, and the record of the run."""
    yield Store(str(copied)), record(made, "carried")
    shutil.rmtree(copied / "artifacts" / "partial")
    shutil.copytree(made / "artifacts" / "partial", copied / "artifacts" / "partial")


def test_a_run_keeps_every_law_and_its_numbers_are_told(made, record, rlhf_here):
    of_run = record(made, "carried")
    verdicts = {v.law.name: v for v in audit(Store(str(made)), of_run)}
    assert {name: v.finding.broken for name, v in verdicts.items() if v.finding.broken} == {}
    # Each of two rounds begins eight completions. In the first one group runs to its end, and the other is carried.
    assert {law.name: verdicts[law.name].finding.left_out for law in carried.LAWS} == {
        law.name: [] for law in carried.LAWS
    }
    assert verdicts["carried"].finding.checked > verdicts["fates"].finding.checked == 16
    metrics = [of_run["nodes"][f"round-00{i}.rollout"]["metrics"] for i in range(2)]
    assert [m["carried"] for m in metrics] == [4, 0]
    assert [m["completions"] for m in metrics] == [4, 12] and metrics[1]["lag_max"] == 1
    assert of_run["nodes"]["round-001.update"]["metrics"]["mismatch_kl"] > 0
    shown = rlhf_here("show", "carried", "--store", made).stdout
    assert re.search(r"\blag 0\.\d\d\b", shown)
    assert ["run_to_end" in m for m in metrics] == [True, False]
    assert shown.count("1 groups  none whole: 1 run to its end") == 1
    assert "Lag" in (made / "runs" / "carried" / "report.html").read_text()


def test_it_is_planned_verified_and_collected_as_others_are(made, rlhf_here, tmp_path):
    store = shutil.copytree(made, tmp_path / "store")
    assert " 0 miss, 0 wait" in rlhf_here("plan", "smoke", "--store", store, *WORDS).stdout
    rlhf_here("verify", "--store", store)
    # Another bound on tokens reaches the first round, and what was made before it stays.
    other = [*WORDS, "--set", "rl.partial.round_tokens=4"]
    planned = rlhf_here("plan", "smoke", "--store", store, *other).stdout
    assert "round_tokens: 3 -> 4" in planned
    there = sorted(str(path.relative_to(store)) for path in (store / "artifacts" / "partial").rglob("*.parquet"))
    rlhf_here("gc", "--keep", "1", "--yes", "--store", store)
    assert (
        sorted(str(path.relative_to(store)) for path in (store / "artifacts" / "partial").rglob("*.parquet")) == there
    )
    # A file for each group of each table: one is whole in the first round, and one is carried.
    assert len(there) == 1 + 1 + 2 + 3 + 1 + 3 + 2


def test_a_policy_was_trained_on_the_prompts_of_whole_groups(made, record):
    """What is drawn and not yet trained on is not seen."""
    artifacts = AuditedRun(Store(str(made)), record(made, "carried")).artifacts
    for last, count in ((0, 1), (1, 4)):
        assert prompts_among(trained_names(artifacts[f"round-00{last}.update"])) == count


def of_carried(rows, edit):
    """Applies an edit to the rows of a completion that two rounds sampled."""
    first = next(row for row in rows if row["number"] == 1)
    edit([row for row in rows if (row["place"], row["sample"]) == (first["place"], first["sample"])])


def other_policy(rows):
    of_carried(rows, lambda mine: mine[0].update(policy=mine[1]["policy"]))


def other_version(rows):
    of_carried(rows, lambda mine: mine[0].update(version=mine[1]["version"]))


def other_count(rows):
    of_carried(rows, lambda mine: mine[0].update(tokens=mine[0]["tokens"] + 1))


def moved_count(rows):
    """The sum stays: the first token of the second policy is told of the first."""
    of_carried(rows, lambda mine: (mine[0].update(tokens=4), mine[1].update(tokens=mine[1]["tokens"] - 1)))


def later_beginning(rows):
    of_carried(rows, lambda mine: [row.update(began=mine[1]["round"]) for row in mine])


def same_beginning(rows):
    places = sorted({row["place"] for row in rows})
    for row in rows:
        if row["place"] == places[1]:
            row["began_at"] = next(other["began_at"] for other in rows if other["place"] == places[0])


def of_last(rows):
    """A row of the group that is carried, or was: its place is behind the new ones."""
    return max(rows, key=lambda row: (row["place"], row["sample"]))


def other_seed(rows):
    of_last(rows)["seed"] += 1


def lost(rows):
    rows.remove(of_last(rows))


def other_tokens(rows):
    of_last(rows)["token_ids"][0] += 1


def other_logprob(rows):
    of_last(rows)["logprobs"][0] -= 0.25


@pytest.mark.parametrize(
    ("node", "part", "edit", "law"),
    [
        ("round-001.rollout", "segments/", other_policy, "segments"),
        ("round-001.rollout", "segments/", other_version, "segments"),
        ("round-001.rollout", "segments/", other_version, "lag"),
        ("round-001.rollout", "segments/", other_count, "segments"),
        ("round-001.rollout", "segments/", moved_count, "lag"),
        ("round-001.rollout", "segments/", later_beginning, "segments"),
        ("round-001.rollout", "segments/", same_beginning, "carried"),
        ("round-001.rollout", "rollouts/", other_seed, "segments"),
        ("round-001.rollout", "rollouts/", lost, "carried"),
        ("round-000.rollout", "carried/", lost, "carried"),
        ("round-001.rollout", "rollouts/", other_tokens, "carried"),
        ("round-001.rollout", "rollouts/", other_logprob, "carried"),
        ("round-000.rollout", "carried/", lost, "places"),
        ("round-001.rollout", "segments/", moved_count, "amounts"),
    ],
)
def test_what_a_table_says_otherwise_breaks_a_law(run, node, part, edit, law):
    edited(run, node, part, edit)
    (case, *_) = look([OF_ROUNDS[law]], AuditedRun(*run))[law].broken
    assert "round-000" in case or "round-001" in case


def test_an_input_of_another_round_is_found(run):
    restated(run, "round-001.rollout", lambda manifest: manifest["inputs"]["carried"].update(digest="f" * 64))
    (case,) = broken(run)["rounds"]
    assert case.startswith("round-001.rollout has ffffffffffff as carried")


def of_laws(run: Audited) -> dict[str, list[str]]:
    """The broken cases of the laws of this file."""
    return {name: found.broken for name, found in look(carried.LAWS, AuditedRun(*run)).items() if found.broken}


def test_what_is_allowed_is_what_the_recipe_says_and_not_what_stages_were_told(run):
    _, record = run
    rl = record["recipe"]["rl"]
    for node in ("round-000.rollout", "round-001.rollout"):
        restated(run, node, lambda manifest: manifest["config"].update(max_lag=0, lag=7, round_tokens=1))
    assert of_laws(run) == {}
    rl["partial"]["max_lag"] = 0
    assert "its first tokens are 1 updates old, allowed are 0" in of_laws(run)["lag"][0]
    rl["partial"] = {"round_tokens": 2, "max_lag": 1}
    (case, *_) = of_laws(run)["amounts"]
    assert "round-000.rollout, place 1, sample" in case and "tokens of round 0" in case
    # Rounds before a fork have the settings of their own run.
    before = {"until": 1, "rl": rl | {"partial": {"round_tokens": 3, "max_lag": None}}}
    record["recipe"] = record["recipe"] | {"fork": {"earlier": [before]}, "rl": rl | {"partial": None}}
    assert of_laws(run) == {}


def test_a_version_is_a_number_of_updates_and_not_what_a_stage_was_told(run):
    """As if the graph had told all rounds that their policies are an update older than they are."""
    _, record = run
    for i in range(2):
        name = f"round-00{i}.rollout"
        edited(run, name, "segments/", lambda rows: [row.update(version=max(0, row["version"] - 1)) for row in rows])
        lags = {name: value + i for name, value in AuditedRun(*run).artifacts[name].metrics.items() if "lag" in name}
        restated(run, name, lambda manifest, i=i: manifest["config"].update(lag=i, max_lag=9))
        restated(run, name, lambda manifest, lags=lags: manifest["metrics"].update(lags))
    record["recipe"]["rl"]["staleness"] = 1
    (case,) = [case for case in of_laws(run)["segments"] if "expected one policy" in case]
    assert case.startswith("round-001.rollout sampled from policy") and "update 0 starts from" in case
    # The policies of a rescored run are others than those that sampled.
    record["recipe"]["rl"]["rollouts_from"] = "another"
    assert "expected one policy" not in str(of_laws(run))


def test_a_law_keeps_what_one_round_has_left(run):
    audited = AuditedRun(*run)
    law = carried.none_is_lost(audited)
    next(law)
    for round_ in audited.rounds:
        law.send(round_)
        kept = law.gi_frame.f_locals.values()
        assert sum(len(one) for one in kept if isinstance(one, dict | set)) == len(round_.sampled[0].carried)
    assert len(round_.sampled[0].rows) == 12


def test_a_round_behind_one_that_is_gone_is_left_out(run):
    store, record = run
    for name in [name for name in record["nodes"] if name.startswith("round-000")]:
        del record["nodes"][name]
    found = look(carried.LAWS, AuditedRun(store, record))
    assert [name for name, of_law in found.items() if of_law.broken] == []
    assert found["carried"].left_out == ["round-001: the round before it, which left 4, is not in this run"]
    assert found["carried"].checked == 8


def test_the_last_round_leaves_nothing(run):
    store, record = run
    record["recipe"]["rl"]["rounds"] = 1
    for name in [name for name in record["nodes"] if name.startswith("round-001")]:
        del record["nodes"][name]
    assert "round-000 is the last round, and leaves 4 completions" in broken((store, record))["carried"][0]
    # A run that has not ended yet has not lost them.
    record["recipe"]["rl"]["rounds"] = 2
    assert "carried" not in broken((store, record))


@pytest.mark.slow
def test_with_a_policy_that_does_not_move_completions_are_those_of_whole_rounds(rlhf, made, record, tmp_path):
    store = shutil.copytree(made, tmp_path / "store")
    # Less than the weights can show.
    still = [*WORDS, "--set", "rl.update.optimizer.learning_rate=1.0e-30", "--store", store, "--no-prefect"]
    still += ["--until", "round-001.rollout"]
    rlhf("run", "smoke", *still, "--name", "still")
    rlhf("run", "smoke", *still, "--set", "rl.partial=null", "--name", "whole")

    def completions(name: str) -> list[tuple[Any, ...]]:
        nodes = record(store, name)["nodes"]
        found = []
        for i in range(2):
            entry = nodes[f"round-00{i}.rollout"]
            artifact = Store(str(store)).get(entry["stage"], entry["key"])
            assert artifact is not None
            found += read_table(artifact, "rollouts/", CompletionRow)
        return sorted((row.seed, row.sample, row.prompt_id, tuple(row.token_ids), row.stop) for row in found)

    assert completions("still") == completions("whole") and len(completions("whole")) == 16


@pytest.mark.slow
def test_rollouts_are_scored_again_and_a_fork_goes_on_with_what_is_carried(rlhf, made, record, tmp_path):
    store = shutil.copytree(made, tmp_path / "store")
    pattern = "rl.score.rewards.digits.arguments={pattern: '.*[a-z].*'}"
    options = ["--set", pattern, "--no-prefect", "--name", "again", "--store", store]
    rlhf("rescore", "carried", "--reward", "digits=matches", *options)
    first, again = record(store, "carried")["nodes"], record(store, "again")["nodes"]
    for i in range(2):
        assert again[f"round-00{i}.rollout"]["digest"] == first[f"round-00{i}.rollout"]["digest"]
        assert again[f"round-00{i}.score"]["state"] == again[f"round-00{i}.update"]["state"] == "made"
    assert "BROKEN" not in rlhf("audit", "again", "--store", store).stdout
    fewer = rlhf("rescore", "carried", "--set", "rl.rounds=1", "--set", pattern, "--store", store, code=2).stderr
    assert "round-000.rollout of run carried has left completions to its next round, which would be lost" in fewer

    # Behind the fork nothing is carried any more, and the run is a round longer: what was left is not lost.
    options = ["--set", "rl.partial=null", "--set", "rl.rounds=3", "--no-prefect", "--store", store]
    rlhf("fork", "carried", "--at", "round=1", *options, "--name", "forked")
    forked = record(store, "forked")["nodes"]
    assert forked["round-000.rollout"]["digest"] == first["round-000.rollout"]["digest"]
    assert [forked[f"round-00{i}.rollout"]["stage"] for i in (1, 2)] == ["partial", "rollout"]
    assert [forked[f"round-00{i}.rollout"]["metrics"]["completions"] for i in range(3)] == [4, 12, 8]
    assert "BROKEN" not in rlhf("audit", "forked", "--store", store).stdout


@pytest.mark.slow
def test_a_round_that_was_killed_with_carried_completions_goes_on_to_the_same_bits(made, record, tmp_path):
    store = tmp_path / "store"
    for stage in ("base", "prepare"):
        shutil.copytree(made / "artifacts" / stage, store / "artifacts" / stage)
    first = Run(store, "first", sets=SETS)
    worker = first.worker()
    first.until(lambda: first.state("round-001.rollout") == "running" and shards(store, "partial", "rollouts") > 0)
    first.kill_worker(worker)
    first.ends(1)
    assert first.state("round-000.update") in ("made", "hit")
    second = Run(store, "second", sets=SETS)
    second.ends(0)
    expected = {name: entry["digest"] for name, entry in record(made, "carried")["nodes"].items()}
    assert {name: entry["digest"] for name, entry in second.record()["nodes"].items()} == expected
