"""Code, data and inputs that change while a run goes on: an artifact is made by what its key names (R26)."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest

from rlhf.flows.graph.build import Input, Node
from rlhf.flows.graph.keying import code_of, key_now, key_of, key_parts
from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.running.checks import check_columns
from rlhf.flows.running.crew import ONLY
from rlhf.flows.running.session import Session
from rlhf.stages.contract.registry import stage
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.stages.store.manifests import with_checksum
from rlhf.stages.worker.client import StageFailed
from rlhf.stages.worker.loaded_code import DataDiffers, check_after
from rlhf.stages.worker.process import failure_of
from rlhf.stages.worker.protocol import Request
from rlhf.tuning.rows import CompletionRow, write_table
from tests.flows.commands import typed
from tests.flows.lines import Lines
from tests.support import write_files

REWARD = """
def f(prompts, completions, **_):
    return [1.0 for _ in completions]
"""
# While it runs it becomes the module of above.
EDITOR = """
def f(prompts, completions, **_):
    open(__file__, "w").write(OTHER)
    return [0.5 for _ in completions]
OTHER = {other!r}
"""


def rollouts(store: Store, folder: Path, text: str = "4", *, replace: bool = False) -> Artifact:
    row = CompletionRow(
        prompt_id="p", place=0, sample=0, answer="4", prompt_ids=[1], token_ids=[2], logprobs=[0.0], text=text
    )
    write_table(folder / "rollouts" / "part-00000.parquet", [row], CompletionRow.schema())
    manifest = {"stage": "rollout", "key": "made", "config": {}, "inputs": {}, "metrics": {}, "seconds": 0}
    return store.commit(folder, manifest, replace=replace)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """A run of one stage: scores of one completion by the function `mine_edited:f`, whose folder is on the path."""
    folder = tmp_path_factory.mktemp("edits")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        write_files(folder, **{"mine_edited.py": REWARD})
        lines = Lines()
        run = Session(load_recipe("smoke", sets=[f"store={folder / 'store'}"]), lines)
        rewards = {"mine": {"function": "mine_edited:f"}}
        config = stage("score").config.model_validate_json(json.dumps({"rewards": rewards, "workers": 1}))
        run.nodes = {"score": Node("score", "score", config, {"rollouts": Input("sampled")}, 0)}
        run.made["sampled"] = rollouts(run.store, folder / "out")
        yield run, lines, folder
        run.crew._workers[ONLY].close()


@pytest.mark.slow
def test_a_reward_that_is_edited_is_what_the_next_score_is_made_by(session):
    run, lines, folder = session
    _, first = run.run_node("score")
    assert first.metrics["reward_mine"] == 1.0
    write_files(folder, **{"mine_edited.py": REWARD.replace("1.0", "0.25")})
    _, second = run.run_node("score")
    assert second.metrics["reward_mine"] == 0.25
    assert second.key != first.key
    assert "mine_edited was edited after it was loaded; a fresh worker makes it" in lines.lines[-1]
    assert run.worker_starts == 2

    # Remarks change no key and no result.
    write_files(folder, **{"mine_edited.py": "# a remark\n" + REWARD.replace("1.0", "0.25")})
    assert run.run_node("score") == ("hit", run.made["score"])
    assert run.worker_starts == 2


@pytest.mark.slow
def test_a_score_whose_reward_is_edited_meanwhile_is_made_again(session):
    run, lines, folder = session
    before = run.worker_starts
    known = run.store.all_keys()
    write_files(folder, **{"mine_edited.py": EDITOR.format(other=REWARD.replace("1.0", "2.0"))})
    _, made = run.run_node("score")
    assert made.metrics["reward_mine"] == 2.0
    assert "mine_edited was edited while score ran; a fresh worker makes it" in lines.lines[-1]
    assert run.worker_starts <= before + 2
    # What the function of before returned was kept under no key.
    assert set(run.store.all_keys()) - set(known) == {("score", made.key)}
    assert key_of(key_parts(run.nodes["score"], run.made)) == made.key
    # Were the edit undone, the next try would take it over.
    assert list((run.store.scratch / "work" / "score").iterdir()) == []


def test_a_file_that_is_saved_half_written_fails_the_stage_with_its_line(session):
    run, _, folder = session
    write_files(folder, **{"mine_edited.py": "def f(prompts, completions, **_):\n    return [1.0 for\n"})
    with pytest.raises(StageFailed, match=r"score: rl\.score\.rewards\.mine\.function: .*mine_edited\.py, line 2: "):
        run.run_node("score")
    recipe = load_recipe("smoke", sets=["rl.score.rewards.mine.function=mine_edited:f"])
    with pytest.raises(RecipeError, match=r"mine_edited\.py, line 2: "):
        check_columns(recipe, {"columns": {"prompts": ["task"]}}, ["score"])
    write_files(folder, **{"mine_edited.py": REWARD})


def test_the_files_of_a_request_are_those_of_its_key(session, monkeypatch):
    run, _, _ = session
    looks = []

    def once(node):
        looks.append(node)
        return code_of(node)

    monkeypatch.setattr("rlhf.flows.graph.keying.code_of", once)
    _, parts, files = key_now(run.nodes["score"], run.made)
    assert len(looks) == 1 and files == code_of(run.nodes["score"]).files
    assert parts == key_parts(run.nodes["score"], run.made)


@pytest.mark.slow
def test_an_input_that_was_replaced_meanwhile_is_the_one_of_the_key_or_refused(session, tmp_path):
    run, _, _ = session
    # Another key: an artifact of the old rollouts would be a hit.
    node = run.nodes["score"]
    run.nodes["score"] = dataclasses.replace(node, config=node.config.model_copy(update={"truncated": "zero"}))
    old = run.made["sampled"]
    new = rollouts(run.store, tmp_path / "out", "5", replace=True)
    assert run.store.get("rollout", "made").digest == new.digest != old.digest
    _, made = run.run_node("score")
    assert made.manifest["inputs"]["rollouts"]["digest"] == old.digest
    assert key_of(key_parts(run.nodes["score"], run.made)) == made.key

    run.nodes["score"] = node
    run.made["sampled"] = Artifact(run.store, with_checksum(old.manifest | {"digest": "0" * 64}))
    with pytest.raises(StageFailed, match=r"input rollouts \(rollout/made\) with digest 000000000000 is gone from .*"):
        run.run_node("score")
    run.made["sampled"] = new


def test_a_record_of_a_run_holds_no_secret(tmp_path):
    engine = "{kind: vllm, version: '1', command: [vllm, serve], environment: {HF_TOKEN: SECRET}}"
    sets = [f"store={tmp_path}", "data.source=s3://me:SECRET@bucket/x.jsonl", f"rl.rollout.engine={engine}"]
    run = Session(load_recipe("smoke", sets=sets), Lines())
    text = Path(run.store.join("runs", run.name, "run.json")).read_text()
    assert "HF_TOKEN" in text
    assert "SECRET" not in text
    assert run.recipe.rl.rollout.engine.environment == {"HF_TOKEN": "SECRET"}
    done = typed("rerun", "--store", tmp_path, "--stage", "score", env={"HF_TOKEN": None}, code=2)
    assert "environment: the value of HF_TOKEN is not recorded: export HF_TOKEN" in done.output


def test_a_file_of_data_that_changes_while_it_is_read_is_named_and_the_same_command_goes_on(tmp_path):
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    for path in files:
        Path(path).write_text('{"question": "2 + 2?", "answer": "4"}\n')
    for config, name in (
        ({"sources": [{"source": files[0]}, {"source": files[1]}]}, "source 2: file 1"),
        ({"sources": [], "source": str(tmp_path)}, "source 1: file 2"),
        ({"sources": [], "source": files[0], "decontaminate": {"sources": [files[1]]}}, "decontaminate 1: file 1"),
    ):
        parts = {"sources": {name: "before"}}
        request = Request("prepare", "k", parts, config, {}, 0, "", "run")
        with pytest.raises(DataDiffers, match=f"{files[1]} changed while prepare ran.*when nothing writes to it") as e:
            check_after(request, {name: "now"})
        assert failure_of(e.value, str(tmp_path)).outage


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"device": "gpu:Abacus"}, "score was to be computed on gpu:Abacus, this worker has cpu:"),
        slow({"versions": {"numpy": "0.1"}}, "package numpy was 0.1 when the run began, this worker has"),
        slow({"sources": {"file 1": "0"}}, "file 1 changed while score ran"),
    ],
    ids=["device", "package", "data"],
)
def test_what_a_key_says_and_the_worker_does_not_have_is_refused(session, changed, message):
    run, _, _ = session
    node = run.nodes["score"]
    parts = key_parts(node, run.made)
    for name, values in changed.items():
        parts[name] = values if isinstance(values, str) else parts[name] | values
    before = run.store.all_keys()
    with pytest.raises(StageFailed, match=message):
        run._make(node, run._request(node, run.made, "k" * 64, parts, {}, None))
    assert run.store.all_keys() == before
