"""A start brings its weights and all that it was trained on; what is new is the rest, and held-out rows stay."""

import dataclasses
import json

from rlhf.stages import fresh
from rlhf.stages.common.trained_prompts import FOLDER, names_of, prompts_among, trained_names, write_names
from rlhf.tuning.data.flat import FOLDER as FLAT
from rlhf.tuning.data.reading import map_examples
from rlhf.tuning.data.schema import SftRow
from rlhf.tuning.rows import CompletionRow, PromptRow, read_table, write_table
from tests.stages.gate.support import prompt
from tests.stages.support import context


def example(text, *turns, group="prompt:of its own"):
    return SftRow(
        id=text, prompt_ids=[1], completion_ids=[2], prompt=text, completion="c", source="s", record=1,
        content=f"content of {text}", group=group, turns=list(turns),
    )  # fmt: skip


def renewed(lab, data, trained):
    """What is new in the data for a policy with these names."""
    folder = lab.folder / "start"
    write_names(folder / FOLDER, trained)
    start = lab.store.commit(folder, {"stage": "start", "key": "s", "inputs": {}, "config": {}, "metrics": {}})
    ctx = context(fresh.Config(), lab.folder / "out", inputs={"data": data, "start": start})
    return fresh.run(ctx), ctx.out


def test_rows_that_were_trained_on_are_left_out_and_held_out_ones_stay_as_they_are(lab):
    tables = {
        "sft": [example("a"), example("b", 1), example("c", 1, 2), example("d", 3)],
        "prompts": [prompt("a", "a"), prompt("x", "x")],
        "heldout": [prompt("a", "a"), prompt("q", "q")],
    }
    data = lab.commit("prepare", {"statistics.json": "{}"}, tables=tables)
    trained = {names_of({"id": "", "prompt": "a"})[0], "turns 1", "turns 3"}
    metrics, out = renewed(lab, data, trained)
    # Of c one turn is new; the other system prompt of d makes no other question.
    assert metrics == {"rows": {"prompts": 1, "sft": 1}, "trained": {"prompts": 1, "sft": 3}}
    assert [row.id for row in read_table(sorted(out.glob("sft/*.parquet")), SftRow)] == ["c"]
    assert [row.id for row in read_table(sorted(out.glob("prompts/*.parquet")), PromptRow)] == ["x"]
    # What is trained on is in the arrays, which are written anew.
    assert [len(map_examples(path)) for path in out.glob(f"*/{FLAT}")] == [1]
    (held_out,) = out.glob("heldout/*.parquet")
    assert held_out.read_bytes() == next(data.local("heldout/").glob("*.parquet")).read_bytes()


def test_a_task_that_only_the_system_s_turn_tells_is_new_where_records_name_their_groups(lab):
    chess, again = example("chess", 7, group="chess"), example("chess by another rule", 7, group="chess")
    french = example("translate", 7, group="french")
    trained = set(names_of(dataclasses.asdict(chess)))
    metrics, out = renewed(lab, lab.commit("prepare", tables={"sft": [chess, again, french]}), trained)
    assert metrics == {"rows": {"sft": 1}, "trained": {"sft": 2}}
    assert [row.id for row in read_table(sorted(out.glob("sft/*.parquet")), SftRow)] == ["translate"]
    # A held-out problem of either kind is found by its turns, as before.
    assert prompts_among(trained) == 1 and "turns 7" in trained


def test_where_nothing_was_trained_on_the_data_is_byte_for_byte_the_same(lab):
    data = lab.data(3)
    _, out = renewed(lab, data, {"prompt of another"})
    for path in out.rglob("*.parquet"):
        assert path.read_bytes() == data.local(str(path.relative_to(out))).read_bytes()


def test_a_policy_was_trained_on_the_prompts_that_were_sampled_and_on_those_of_its_ancestors(lab):
    data = lab.data(3, trained=["a", "b", "c"])
    folder = lab.folder / "before"
    write_names(folder / FOLDER, {"prompt of a night before"})
    start = lab.store.commit(folder, {"stage": "start", "key": "s", "inputs": {}, "config": {}, "metrics": {}})
    folder = lab.folder / "rollouts"
    rows = [
        CompletionRow(place=i, prompt_id=n, prompt=n, prompt_ids=[1], token_ids=[2], logprobs=[0.0])
        for i, n in enumerate("ab")
    ]
    write_table(folder / "rollouts" / "part-00000.parquet", rows, CompletionRow.schema())
    refs = {
        name: {"stage": a.stage, "key": a.key, "digest": a.digest} for name, a in (("policy", start), ("data", data))
    }
    sampled = lab.store.commit(folder, {"stage": "rollout", "key": "r", "inputs": refs, "config": {}, "metrics": {}})
    policy = lab.commit("update", {"policy.json": json.dumps({})}, {"policy": start, "rollouts": sampled})
    # Not c, which no round drew, and nothing that was held out.
    assert trained_names(policy) == {"prompt of a night before"} | {
        name for text in "ab" for name in names_of({"id": text, "prompt": text})
    }
