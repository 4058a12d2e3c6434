"""Each law holds in a run that nothing has touched, and is broken where an artifact says something else."""

import errno
import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlhf.stages.auditing import trajectories
from rlhf.stages.auditing.audit import LAWS, audit
from rlhf.stages.auditing.laws import Law
from rlhf.stages.auditing.prompts import HELD_OUT
from rlhf.stages.auditing.run import AuditedRun, Round
from rlhf.stages.common.trained_prompts import FOLDER, names_of, rows_of, write_names
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.tuning import rows
from rlhf.tuning.rows import CompletionRow
from tests.stages.auditing.support import broken, change, drop_last, edited, finding_of, plus, restated


@pytest.fixture
def run(store: Path, record: Callable[..., dict[str, Any]]) -> tuple[Store, dict[str, Any]]:
    """A copy of the smoke run's store, and the run's record."""
    return Store(str(store)), record(store, "first")


def test_a_run_that_nothing_has_touched_keeps_every_law(run):
    verdicts = {v.law.name: v for v in audit(*run)}
    assert {name for name, v in verdicts.items() if v.broken} == set()
    # Each law has looked at something, but for those of ReMax, a choice, a fork and episodes, of
    # which there is nothing in the run.
    played = {law.name for law in trajectories.LAWS}
    assert {name for name, v in verdicts.items() if not v.checked} == {"greedy", "choice", "fork", *played}
    assert verdicts.keys() == {law.name for law in LAWS}
    assert verdicts["fates"].checked == verdicts["scores"].checked == 96


def test_a_law_counts_what_its_unit_names(run):
    """Evaluations by one judge each; three rounds of one table; held-out prompts that are in several splits."""
    found = {v.law.name: f"{v.checked} {v.law.unit}" for v in audit(*run)}
    artifacts = AuditedRun(*run).artifacts
    splits = {f["path"].split("/")[0] for f in artifacts["prepare"].manifest["files"]}
    tables = [pq.read_table(artifacts["prepare"].local(f"{split}/")) for split in splits & set(HELD_OUT)]
    heldout = {prompt for table in tables for prompt in table["prompt"].to_pylist()}
    assert len(heldout) < sum(map(len, tables))
    evaluations = sum(artifact.stage == "evaluate" for artifact in artifacts.values())
    assert found["leakage"] == f"{len(heldout)} held-out prompts"
    assert found["evaluations"] == f"{evaluations} scores"
    assert found["places"] == "24 places"
    assert found["on-policy"] == "3 tables"


def test_an_outage_breaks_no_law(tmp_path):
    """The gate would refuse the policy for it, and its decision is kept."""

    nothing = Store(str(tmp_path)), {"name": "", "nodes": {}, "recipe": {}}

    def law(error):
        def check(part, finding):
            raise error

        return [Law("one", "", "runs", check, "run")]

    for error in (KeyError("place"), OSError("Corrupt snappy compressed data")):
        assert "expected form" in audit(*nothing, law(error))[0].broken[0]
    for error in (ConnectionError("no endpoint"), OSError(errno.EIO, "disk"), MemoryError()):
        with pytest.raises(type(error)):
            audit(*nothing, law(error))


@pytest.mark.parametrize("error", [OSError("Forbidden: https://host/o"), ValueError("Bad Request: https://host/o")])
def test_a_refusal_of_an_object_store_breaks_no_law(monkeypatch, error):
    """gcsfs has no other errors for those."""

    def read(run, finding):
        run.store.read_json("artifacts", "sft", "k", "manifest.json")

    def refuse(*args):
        raise error

    store = Store("memory://refused")
    store.write_json({}, "artifacts", "sft", "k", "manifest.json")
    monkeypatch.setattr(type(store.fs), "_strip_protocol", refuse)
    with pytest.raises(type(error), match="https://host/o"):
        audit(store, {"name": "", "nodes": {}, "recipe": {}}, [Law("one", "", "runs", read, "run")])


def swap_scores(rows):
    """As a join by prompt and sample would leave them."""
    rows[0]["rewards"], rows[5]["rewards"] = rows[5]["rewards"], rows[0]["rewards"]
    for name, value in rows[0]["rewards"].items():
        rows[0]["rewards"][name] = value + 1 if value is not None else 1.0


def other_advantage(rows):
    next(row for row in rows if row["advantage"])["advantage"] += 0.5


def same_prompt_again(rows):
    for row in rows:
        row["prompt_id"] = rows[0]["prompt_id"]


def hole(rows):
    """As of an observation: the trainer has counted it."""
    for row in rows:
        row["logprobs"][0] = float("nan")


def another_vote(rows):
    """Of the first problem, whose completions are wrong: one answer less."""
    rows[0]["answer"] = None if rows[0]["answer"] is not None else "7"


other_place, other_policy = change(1, place=plus(1)), change(policy="0" * 64)
other_prompt, other_verdict = change(prompt_ids=lambda ids: ids[:-1]), change(score=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "node, part, edit, law",
    [
        ("round-001.score", "scores/", other_place, "scores"),
        ("round-001.score", "scores/", change(2, total=plus(0.25)), "totals"),
        ("round-001.score", "scores/", swap_scores, "totals"),
        ("round-001.score", "scores/", change(total=None, failure="exact: TimeoutError"), "kept"),
        ("round-001.update", "fates/", other_advantage, "advantages"),
        ("round-001.update", "fates/", drop_last, "fates"),
        ("round-001.rollout", "rollouts/", hole, "loss"),
        ("round-001.rollout", "rollouts/", other_policy, "on-policy"),
        ("round-001.rollout", "rollouts/", other_policy, "record"),
        ("round-001.rollout", "rollouts/", other_prompt, "prompts"),
        ("round-001.rollout", "rollouts/", same_prompt_again, "coverage"),
        ("round-001.rollout", "rollouts/", change(logprobs=lambda old: [0.5, *old[1:]]), "record"),
        ("round-001.rollout", "rollouts/", other_place, "places"),
        ("evaluate.sft", "verdicts/", other_verdict, "evaluations"),
        ("evaluate.sft", "verdicts/", other_verdict, "rates"),
        ("evaluate.sft", "verdicts/", another_vote, "rates"),
        ("evaluate.sft", "verdicts/", drop_last, "evaluations"),
        ("evaluate.sft", "rollouts/", other_prompt, "problems"),
    ],
)
def test_what_an_artifact_says_otherwise_breaks_a_law(run, node, part, edit, law):
    edited(run, node, part, edit)
    found = broken(run)
    assert law in found
    # The digest is no longer that of the files: a changed file is never taken for the one that was made.
    assert "content" in found
    # The first case says where.
    assert any(name in found[law][0] for name in (node, node.split(".")[0]))


@pytest.mark.slow
@pytest.mark.parametrize(("split", "column"), [("prompts", "prompt"), ("sft", "prompt_ids"), ("sft", "turns")])
def test_a_held_out_prompt_that_is_trained_on_is_leakage(run, split, column):
    data = AuditedRun(*run).artifacts["prepare"]
    (trained,) = data.local(f"{split}/").glob("*.parquet")
    first = pq.read_table(trained).to_pylist()[0]

    def leak(rows):
        rows[0][column] = first[column]

    edited(run, "prepare", "heldout/", leak)
    (case,) = broken(run)["leakage"]
    assert case.startswith("heldout") and "heldout" in HELD_OUT
    assert (first["prompt"] if column == "prompt" else column) in case


def test_a_held_out_problem_that_the_start_was_trained_on_is_leakage_which_a_gate_leaves_out(run, tmp_path):
    store, record = run
    data = AuditedRun(store, record).artifacts["prepare"]
    first = next(iter(rows_of(data, "heldout")))
    write_names(tmp_path / "start" / FOLDER, names_of(first))
    manifest = {"stage": "start", "key": "0" * 64, "config": {}, "inputs": {}, "metrics": {}, "seconds": 0}
    start = store.commit(tmp_path / "start", manifest)
    record["nodes"]["start"] = {"stage": "start", "key": start.key, "digest": start.digest, "state": "made"}
    (case,) = broken(run)["leakage"]
    # It is a held-out example of SFT too.
    assert case.endswith(f": {first['prompt']!r} was trained on before, by the policy of start")
    record["nodes"]["gate"] = {"stage": "gate", "key": "1" * 64, "digest": "2" * 64, "state": "made"}
    assert "leakage" not in broken(run)


@pytest.mark.parametrize(("group", "leaks"), [("prompt:0", False), ("g", True)])
def test_a_group_is_not_on_both_sides_where_its_records_name_it(run, group, leaks):
    """By default it is of the first question, after which conversations part."""
    for split in ("heldout", "sft"):
        edited(run, "prepare", f"{split}/", lambda rows: rows[0].update(group=group))
    assert ("leakage" in broken(run)) == leaks


def test_a_missing_artifact_is_named(run):
    store, record = run
    gone = AuditedRun(store, record).artifacts["round-002.score"]
    Path(store.root, "artifacts", gone.stage, gone.key, "manifest.json").unlink()
    (case,) = finding_of("artifacts", *run).broken
    assert case == f"round-002.score with digest {gone.digest[:12]} is missing or damaged; `rlhf run` recomputes it"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node", "role", "other"),
    [
        ("round-001.update", "rollouts", "round-000.rollout"),
        ("round-001.update", "policy", "sft"),
        ("round-001.score", "rollouts", "round-002.rollout"),
    ],
)
def test_a_cached_node_that_was_made_of_another_round_is_found(run, node, role, other):
    digest = AuditedRun(*run).artifacts[other].digest

    def edit(manifest):
        manifest["inputs"][role]["digest"] = digest

    restated(run, node, edit)
    (case,) = broken(run)["rounds"]
    assert case.startswith(node.split(".")[0]) and digest[:12] in case and f"as {role}" in case


def test_a_finished_round_that_skips_one_is_found(run):
    store, record = run
    del record["nodes"]["round-001.update"]
    (case,) = broken((store, record))["rounds"]
    assert case == "round-001.update is not in the record, that of round 2 is"


def test_metrics_that_the_verdicts_do_not_give_are_found(run):
    def edit(manifest):
        manifest["metrics"]["pass_at_2"] += 0.01

    restated(run, "evaluate.rl", edit)
    wrong, file = broken(run)["rates"]
    assert wrong.startswith("evaluate.rl: pass_at_2 is 0.0") and "scores.json has other numbers" in file


def test_each_table_is_read_once_and_one_round_is_in_memory_at_a_time(run):
    code, read, held = rows._check.__code__, Counter(), []

    def watch(frame, event, arg):
        if event == "call" and frame.f_code is code:
            read[str(frame.f_locals["path"]).split("/artifacts/")[1]] += 1
            held.append([r().number for r in alive if r() is not None and "rows" in vars(r().sampled[0])])

    alive: list[weakref.ref[Round]] = []

    def note(round_, finding):
        alive.append(weakref.ref(round_))
        assert round_.sampled[0].rows

    laws = [Law("note", "", "rounds", note, "rounds"), *(law for law in LAWS if law.over == "rounds")]
    sys.setprofile(watch)
    try:
        found = audit(*run, laws)
    finally:
        sys.setprofile(None)
    assert len(alive) == 3 and not any(finding.broken for finding in found)
    # Two shards of rollouts, refused prompts, scores and fates of three rounds.
    assert set(read.values()) == {1} and len(read) == 15
    assert max(map(len, held)) == 1


def made(store: Store, folder: Path, stage: str, key: str, tables: dict[str, Any], **manifest: Any) -> Artifact:
    """An artifact of a store with tables and texts by their names."""
    for name, content in tables.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            (folder / name).write_text(content)
        else:
            rows.write_table(folder / name, content, type(content[0]).schema())
    return store.commit(folder, {"stage": stage, "key": key, "config": {}, "inputs": {}, "metrics": {}} | manifest)


def entries(**nodes: Artifact) -> dict[str, Any]:
    """A record of a run with these nodes."""
    found = {n: {"stage": a.stage, "key": a.key, "digest": a.digest, "state": "made"} for n, a in nodes.items()}
    return {"name": "own", "recipe": {"rl": {}}, "nodes": found}


def source(artifact: Artifact) -> dict[str, str]:
    return {"stage": artifact.stage, "key": artifact.key, "digest": artifact.digest}


@pytest.mark.parametrize(
    ("place", "change", "case"),
    [
        (0, {}, ""),
        (1, {"temperature": 1.0}, "place 1: was sampled at temperature 1"),
        (1, {"prompt_ids": [8]}, "place 1: has another prompt than the round"),
        (1, {"sample": 1}, "place 1: has the number 1"),
        (1, {"policy": "q"}, "place 1: is of policy q, the round of p"),
        (1, {"place": 0, "prompt_id": "a", "prompt_ids": [1]}, "place 0: is a second one"),
        (1, {"place": 5}, "place 5: has another prompt than the round"),
    ],
)
def test_a_baseline_is_one_greedy_completion_of_its_prompt(tmp_path, place, change, case):
    def row(number, completion, **values):
        prompt = {"prompt_id": "ab"[number], "prompt_ids": [number + 1]}
        usual = {"place": number, "sample": completion, "token_ids": [2], "logprobs": [0.0], "policy": "p"}
        return CompletionRow(**(usual | prompt | values))

    store = Store(str(tmp_path / "store"))
    table = [row(number, completion) for number in (0, 1) for completion in (0, 1)]
    best = [row(n, 0, **{"temperature": 0.0} | (change if n == place else {})) for n in (0, 1)]
    name = "rollouts/part-00000.parquet"
    policy = {"policy": {"stage": "sft", "key": "k", "digest": "p"}}
    rollouts = made(store, tmp_path / "r", "rollout", "r", {name: table}, inputs=policy)
    of = policy | {"rollouts": source(rollouts)}
    greedy = made(store, tmp_path / "g", "greedy", "g", {name: best}, inputs=of)
    record = entries(**{"round-000.rollout": rollouts, "round-000.greedy": greedy})
    finding = finding_of("greedy", store, record)
    assert finding.checked == 2
    if case:
        assert finding.broken[0] == f"round-000.greedy, {case}"
    else:
        assert finding.broken == []
    assert finding_of("rounds", store, record).broken == []


@pytest.mark.parametrize(
    ("chosen", "content", "cases"),
    [
        (1, "p1", []),
        (3, "p3", ["select: round 3 was chosen by pass_at_2, of {1: 0.7, 3: 0.7, 5: 0.2} round 1 is the best"]),
        (1, "p5", ["select: not the content of round 1: policy.json"]),
    ],
)
def test_a_choice_is_the_best_candidate_file_by_file(tmp_path, chosen, content, cases):
    store, inputs = Store(str(tmp_path / "store")), {}
    for number, value in ((1, 0.7), (3, 0.7), (5, 0.2)):
        files = {"policy.json": f"p{number}", "state/x": "w"}
        inputs[f"candidate_{number:03d}"] = source(made(store, tmp_path / f"u{number}", "update", f"u{number}", files))
        scores = {"scores.json": json.dumps({"score": 1 - value, "pass_at_2": value})}
        inputs[f"evaluation_{number:03d}"] = source(
            made(store, tmp_path / f"e{number}", "evaluate", f"e{number}", scores)
        )
    settings = {"config": {"metric": "pass_at_2"}, "metrics": {"round": chosen}, "inputs": inputs}
    choice = made(store, tmp_path / "s", "select", "s", {"policy.json": content}, **settings)
    finding = finding_of("choice", store, entries(select=choice))
    assert (finding.checked, finding.law.unit) == (1, "choices") and finding.broken == cases
