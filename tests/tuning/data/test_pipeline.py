"""Records become rows by one plan: each is kept, merged, cut or set aside with a reason, and all are counted."""

import dataclasses
import json
import re

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf.tuning.data import blocks, merge, pipeline, steps
from rlhf.tuning.data.receipts import read_receipts
from rlhf.tuning.data.records import parse_record
from rlhf.tuning.models.tokenizer import save_tokenizer
from rlhf.tuning.rewards.functions import exact_match, tagged
from tests.tuning.data.run import letters, parts_of, pieces, plan_of, rows, run

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('no thanks') }}{% endif %}"
    "<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """One token a byte, and the control tokens <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = TEMPLATE
    return plan_of(
        tmp_path_factory.mktemp("tokenizer"), tokenizer, splits=("sft", "preference", "prompts", "heldout"),
        heldout_fraction=0.25, sft_fraction=0.5, prompts_all=False, max_prompt_tokens=100, max_completion_tokens=50,
        shards=2,
    )  # fmt: skip


def decoded(plan, ids):
    return blocks.tokenizer_of(plan.tokenizer).decode(ids)


def test_rows_of_every_split(plan, tmp_path):
    pair = {"prompt": "p", "completion": "good", "rejected": ["bad", "worse"], "answer": "a", "margin": 0.5}
    records = [{**pair, "id": split, "group": split, "split": split} for split in plan.splits]
    for record, letter in zip(records, "wxyz", strict=False):
        record["prompt"] = letter
    system = dataclasses.replace(plan, system_prompt="sys")
    run(system, tmp_path, *records)
    [sft] = rows(plan, "sft", tmp_path)
    assert (sft["id"], sft["prompt"], sft["completion"]) == ("sft", "w", "good")
    assert decoded(plan, sft["prompt_ids"]) == "<s>system:sys</s><s>user:w</s><s>assistant:"
    assert decoded(plan, sft["completion_ids"]) == "good</s>"
    one, two = rows(plan, "preference", tmp_path)
    assert {one["id"], two["id"]} == {"preference/0", "preference/1"}
    assert {one["rejected"], two["rejected"]} == {"bad", "worse"} and one["margin"] == 0.5
    assert decoded(plan, one["chosen_ids"]) == "good</s>"
    assert decoded(plan, two["rejected_ids"]) == two["rejected"] + "</s>"
    [prompt], [heldout] = rows(plan, "prompts", tmp_path), rows(plan, "heldout", tmp_path)
    assert (prompt["prompt"], prompt["answer"], prompt["metadata"]) == ("y", "a", '{"prompt_system":"sys"}')
    assert decoded(plan, heldout["prompt_ids"]) == "<s>system:sys</s><s>user:z</s><s>assistant:"
    assert len(rows(plan, "heldout_preference", tmp_path)) == 2


def test_bad_records_are_dead_letters_with_reasons(plan, tmp_path):
    broken = '{"prompt": "q\xff'.encode("latin-1")
    bad = [b"{", {"prompt": "q", "anwser": "4"}, {"prompt": "refuse"}, {"prompt": "say </s>"}, {"prompt": "say </s>"}]
    run(plan, tmp_path, {"prompt": "fine"}, *bad, broken)
    found = letters(tmp_path)
    assert [letter["record"] for letter in found] == [2, 3, 4, 5, 6, 7]
    assert [letter["source"] for letter in found] == ["data.jsonl"] * 6
    assert [letter["step"] for letter in found] == ["validate"] * 2 + ["render"] + ["validate"] * 3
    texts = [letter["raw"] for letter in found]
    assert texts[:2] == ["{", '{"prompt": "q", "anwser": "4"}'] and texts[-1] == '{"prompt": "q\\xff'
    reasons = ["one JSON object", "did you mean `answer`", "no thanks", "control token '</s>'", "control", "utf-8"]
    for letter, part in zip(found, reasons, strict=True):
        assert part in letter["reason"]
    assert len(rows(plan, "ledger", tmp_path)) == 1


def test_a_conversation_that_is_a_prompt_is_kept_for_episodes(plan, tmp_path):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]
    records = [{"prompt": turns, "metadata": {"n": 1}}, {"prompt": turns[1:], "metadata": {"n": 2}}]
    records.append(records[1] | {"metadata": {"n": 3}, "chat_template_kwargs": {"enable_thinking": False}})
    run(plan, tmp_path, *[record | {"split": "prompts"} for record in records])
    kept = [json.loads(row["metadata"]) for row in rows(plan, "prompts", tmp_path)]
    assert sorted(kept, key=lambda one: one["n"]) == [
        {"n": 1, "prompt_messages": turns},
        {"n": 2},
        {"n": 3, "chat_template_kwargs": {"enable_thinking": False}},
    ]


def test_lengths_in_tokens_at_the_limit(plan, tmp_path):
    exact = {"completion": "c" * 49, "rejected": "r", "split": "preference"}
    long = {"completion": "c" * 50, "rejected": "r", "split": "preference"}
    run(plan, tmp_path, {"prompt": "a", **exact}, {"prompt": "b", **long})
    [row] = rows(plan, "preference", tmp_path)
    assert row["prompt"] == "a" and len(row["chosen_ids"]) == 50
    header = len(row["prompt_ids"]) - 1
    assert 0 < header < 100
    folder = tmp_path / "prompts"
    run(plan, folder, *[{"prompt": "p" * (100 - header + more), "split": "prompts"} for more in (0, 1)])
    [row] = rows(plan, "prompts", folder)
    assert len(row["prompt_ids"]) == 100
    ledger = rows(plan, "ledger", tmp_path) + rows(plan, "ledger", folder)
    dropped = sorted(reason for line in ledger for reason in line["dropped"])
    assert dropped == ["preference:completion_too_long", "prompts:prompt_too_long"]


def test_rows_that_are_too_long_can_be_cut(plan, tmp_path):
    cutting = dataclasses.replace(plan, too_long="truncate")
    run(cutting, tmp_path, {"prompt": "p" * 99 + "q", "completion": "c" * 60, "split": "sft"})
    [row] = rows(plan, "sft", tmp_path)
    assert len(row["prompt_ids"]) == 100 and decoded(plan, row["prompt_ids"]).endswith("q</s><s>assistant:")
    # A completion that was cut does not end with EOS.
    assert decoded(plan, row["completion_ids"]) == "c" * 50 and row["completion"] == "c" * 60


def decides(record):
    return {"a": np.True_, "b": np.False_, "c": "dull"}.get(record["prompt"])


def test_a_rule_may_answer_with_numpys_booleans(plan, tmp_path):
    ruled = dataclasses.replace(plan, rules=(f"{__name__}:decides",))
    run(ruled, tmp_path, *[{"prompt": prompt, "completion": "x", "split": "sft"} for prompt in "abcd"])
    assert {row["prompt"] for row in rows(ruled, "sft", tmp_path)} == {"a", "d"}


def answers_oddly(record):
    odd = {"a": re.search("a", record["prompt"]), "b": "", "c": 3, "d": np.ones(2, bool), "e": 0.0, "g": 1, "h": 0}
    return odd.get(record["prompt"])


def test_a_rule_that_answers_neither_yes_nor_no_nor_a_reason_is_at_fault(plan, tmp_path):
    """A match is true and no match is None, which keeps: such a rule would drop what it is to keep."""
    ruled = dataclasses.replace(plan, rules=(f"{__name__}:answers_oddly",))
    run(ruled, tmp_path, *[{"prompt": prompt, "completion": "x", "split": "sft"} for prompt in "abcdefgh"])
    assert {row["prompt"] for row in rows(ruled, "sft", tmp_path)} == {"f"}
    reasons = [letter["reason"] for letter in letters(tmp_path)]
    assert len(reasons) == 7 and "returned '': expected True, False, None or a reason" in reasons[1]


def test_pairs_of_equal_tokens_are_dropped(plan, tmp_path):
    cutting = dataclasses.replace(plan, too_long="truncate")
    same, pair = "c" * 50, {"prompt": "p", "split": "preference"}
    answers = [(same + "x", same + "y"), (same, same + "y"), ("x" + same, "y" + same)]
    run(cutting, tmp_path, *[pair | {"chosen": chosen, "rejected": rejected} for chosen, rejected in answers])
    [row] = rows(cutting, "preference", tmp_path)
    assert row["chosen"] == "x" + same
    dropped = [line["dropped"] for line in rows(cutting, "ledger", tmp_path)]
    assert dropped.count(["preference:equal_pair"]) == 2


def test_equal_records_and_prompts_merge_within_and_across_blocks(plan, tmp_path):
    pair = {"prompt": "p", "completion": "x", "rejected": "y", "split": "preference"}
    prompts = [{"prompt": "p", "split": "prompts", "completion": str(n), "metadata": {"n": 1}} for n in (1, 2)]
    records = [{**pair, "id": "one"}, prompts[0], {**pair, "id": "two"}, {**pair, "id": "three"}, prompts[1]]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert len(run(plan, whole, *records)) == 1
    assert len(run(plan, cut, *records, block_bytes=1)) == 5
    for output in ("preference", "prompts"):
        [row] = rows(plan, output, whole)
        assert [row] == rows(plan, output, cut)
    assert row["metadata"] == '{"n":1}' and row["record"] == 2
    assert [row["id"] for row in rows(plan, "preference", cut)] == ["one"]


def test_a_row_says_where_it_came_from(plan, tmp_path):
    record = {"prompt": "p", "id": "x", "split": "prompts"}
    run(plan, tmp_path, b"", {"prompt": "o", "split": "heldout"}, b"  ", record)
    [row] = rows(plan, "prompts", tmp_path)
    assert (row["source"], row["record"]) == ("data.jsonl", 4)
    assert row["content"] == parse_record(record, "s", 1).content


def test_documents_train_every_token_but_the_first(plan, tmp_path):
    run(plan, tmp_path, {"text": "abc"})
    [row] = rows(plan, "sft", tmp_path)
    assert decoded(plan, row["prompt_ids"]) == "a" and decoded(plan, row["completion_ids"]) == "bc</s>"
    assert row["completion_mask"] is None and row["prompt"] == ""


def test_weights_take_a_share_or_repeat(plan, tmp_path):
    records = [{"prompt": f"p{i}", "completion": "x", "split": "sft"} for i in range(200)]
    counts = {}
    for weight in (0.0, 0.3, 1.0, 2.5):
        weighed = dataclasses.replace(plan, sources=(blocks.SourcePlan(weight=weight),))
        run(weighed, tmp_path / str(weight), *records)
        found = rows(plan, "sft", tmp_path / str(weight))
        counts[weight] = len(found)
        assert len({row["id"] for row in found}) == len(found)
    assert counts[0.0] == 0 and 40 < counts[0.3] < 80 and counts[1.0] == 200 and 460 < counts[2.5] < 540


def test_ids_are_those_of_the_tokenizer_called_for_each_text(plan, tmp_path):
    from tests.tuning.chat.templates import chat_prompt_ids

    texts = ["plain", "ünïcödé ☃ \U0001f600", "  spaces  ", "line\nbreak\ttab", "a" * 30]
    run(plan, tmp_path, *[{"prompt": text, "completion": text[::-1], "split": "sft"} for text in texts])
    tokenizer = blocks.tokenizer_of(plan.tokenizer)
    found = rows(plan, "sft", tmp_path)
    assert len(found) == len(texts)
    for row in found:
        assert row["prompt_ids"] == chat_prompt_ids(tokenizer, [{"role": "user", "content": row["prompt"]}])
        completion = tokenizer.encode(row["completion"], add_special_tokens=False)
        assert row["completion_ids"] == [*completion, tokenizer.eos_token_id]


def test_counters_of_beam_agree_with_receipts(plan, tmp_path):
    folder = str(tmp_path / "pieces")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"no": 1}\n')
    parts = parts_of(tmp_path / "data.jsonl", tmp_path)
    counters = pipeline.run(parts, plan, folder)
    [receipt] = read_receipts(folder).values()
    assert counters["Write/records"] == receipt["records"] == 3
    for step, counts in receipt["counts"].items():
        assert {name: counters[f"{step}/{name}"] for name in counts} == counts
    assert receipt["counts"]["Validate"] == {"in": 3, "dead": 1, "layout prompt": 2}


@pytest.mark.slow
@pytest.mark.parametrize("lost", [None, 0, 3, -1])
def test_a_part_is_finished_by_all_of_its_blocks(plan, tmp_path, lost):
    records = [{"prompt": f"{i} p", "completion": "c" * 40, "split": "sft"} for i in range(200)]
    run(plan, tmp_path, *records, block_bytes=1_000)
    if lost is not None:
        sorted((tmp_path / "pieces").glob("*.json"))[lost].unlink()
    parts = parts_of(tmp_path / "data.jsonl", tmp_path)
    receipts = read_receipts(str(tmp_path / "pieces"))
    todo, names = pipeline.finished(parts, receipts)
    assert (todo, names) == (([], list(receipts)) if lost is None else (parts, []))


@pytest.mark.parametrize("content", [b"", b"\n \n\n"])
def test_a_file_without_records_is_finished(plan, tmp_path, content):
    (tmp_path / "data.jsonl").write_bytes(content)
    parts = parts_of(tmp_path / "data.jsonl", tmp_path)
    pipeline.run(parts, plan, str(tmp_path / "pieces"))
    assert pipeline.finished(parts, read_receipts(str(tmp_path / "pieces")))[0] == []


def test_a_bad_completion_is_no_near_duplicate_of_a_good_one(plan, tmp_path):
    plan = dataclasses.replace(plan, signatures=True)
    records = [{"prompt": "Which of these words?", "completion": "All of them.", "label": n % 2 == 0} for n in range(2)]
    run(
        plan,
        tmp_path,
        *records,
        *({**record, "id": f"again {record['label']}"} | {"metadata": {"n": 1}} for record in records),
    )
    assert merge.fates(pieces(plan, tmp_path), 0.8).kept == 2


def test_groups_go_whole_and_by_hash(plan):
    def splits(i, plan=plan, **fields):
        return steps.splits_of(parse_record({"prompt": str(i), **fields}, "s", 1), plan)

    pair = {"completion": "x", "rejected": "y"}
    planned = [splits(i, **pair) for i in range(2000)]
    kinds = {
        ("heldout", "heldout_sft", "heldout_preference"): 0.25,
        ("sft", "preference"): 0.375,
        ("preference", "prompts"): 0.375,
    }
    for kind, share in kinds.items():
        assert sum(tuple(outputs) == kind for outputs in planned) / 2000 == pytest.approx(share, abs=0.03)
    assert {tuple(outputs) for outputs in planned} == set(kinds)
    assert len({tuple(splits(i, group="g", **pair)) for i in range(50)}) == 1
    other = dataclasses.replace(plan, seed=1)
    assert sum(splits(i, other, **pair) != outputs for i, outputs in enumerate(planned)) > 500

    everything = dataclasses.replace(plan, prompts_all=True, preference_all=False)
    assert {tuple(splits(i, everything, **pair)) for i in range(200)} == {
        ("heldout", "heldout_sft", "heldout_preference"), ("sft", "preference", "prompts"), ("prompts",)
    }  # fmt: skip
    prompts_only = dataclasses.replace(plan, splits=("prompts",))
    assert {tuple(splits(i, prompts_only, **pair)) for i in range(50)} == {("prompts",)}
    assert splits(1, prompts_only, completion="x", split="sft") == []


def test_prompts_that_a_reward_or_the_policy_can_tell_apart_stay_apart(plan, tmp_path):
    tests = [{"metadata": {"tests": [f"assert f() == {n}"]}} for n in (1, 2)]
    tools = [{"tools": [{"type": "function", "function": {"name": name, "parameters": {}}}]} for name in ("add", "mul")]
    records = [{"prompt": "p", "split": "prompts", **more} for more in ({}, {"completion": "c"}, *tests, *tools)]
    # The system text describes the tools.
    run(dataclasses.replace(plan, max_prompt_tokens=2000), tmp_path, *records)
    assert sorted(row["record"] for row in rows(plan, "prompts", tmp_path)) == [1, 3, 4, 5, 6]


@pytest.mark.parametrize("kind", [{"rejected": "bad"}, {"label": True}])
def test_what_metadata_say_of_a_completion_makes_no_prompt_of_its_own(plan, tmp_path, kind):
    scores = [{"prompt": "p", "completion": f"c{n}", **kind, "metadata": {"chosen_score": n}} for n in (1, 2)]
    run(plan, tmp_path, *({**record, "group": "g", "split": "prompts"} for record in scores))
    assert [row["metadata"] for row in rows(plan, "prompts", tmp_path)] == ['{"chosen_score":1}']


SYSTEM, ASK = {"role": "system", "content": "sys"}, {"role": "user", "content": "q"}
OTHER = {"role": "system", "content": "Think first."}
ANSWER, MORE = {"role": "assistant", "content": "a"}, {"role": "user", "content": "sure?"}


@pytest.mark.parametrize(
    "trained, heldout, leaking",
    [
        ([ASK], [SYSTEM, ASK], True),
        ([ASK, ANSWER, MORE], [SYSTEM, ASK], True),
        ([ASK, ANSWER, MORE], [ASK, ANSWER, MORE], True),
        ([ASK, ANSWER, MORE, ANSWER, ASK], [SYSTEM, ASK, ANSWER, MORE], True),
        ([ASK, ANSWER, MORE], [MORE], False),
        ([OTHER, ASK], [ASK], True),
        ([OTHER, ASK, ANSWER, MORE], [ASK], True),
        ([OTHER, ASK, ANSWER, MORE], [OTHER, MORE], False),
        # What is held out is the last question, not the first.
        ([OTHER, ASK], [ASK, ANSWER, MORE], False),
    ],
)
def test_held_out_prompts_are_found_before_what_is_trained(plan, tmp_path, trained, heldout, leaking):
    plan = dataclasses.replace(plan, system_prompt="sys", max_completion_tokens=100)
    records = [{"messages": [*trained, ANSWER], "split": "sft"}, {"prompt": heldout, "split": "heldout"}]
    run(plan, tmp_path, *records, {"text": "document"})
    found = pieces(plan, tmp_path)
    fates = merge.fates(found)
    assert fates.kept == 3 and ("has the same prompt" in (fates.fault or "")) == leaking


@pytest.mark.parametrize("side", ["prompts", "sft"])
def test_system_turns_tell_tasks_apart_where_both_records_name_their_group(plan, tmp_path, side):
    records = [
        {"prompt": [OTHER, ASK], "completion": "a", "split": side},
        {"prompt": [SYSTEM, ASK], "split": "heldout"},
    ]
    both = {"group": "g"}, {"group": "h"}
    for number, groups in enumerate([({}, {}), (both[0], {}), ({}, both[1]), both]):
        folder = tmp_path / str(number)
        run(plan, folder, *({**record, **group} for record, group in zip(records, groups, strict=True)))
        assert (merge.fates(pieces(plan, folder)).fault is not None) == (number < 3)


def test_rewards_find_the_accepted_answers_of_verls_records(plan, tmp_path):
    truths = [["4", "four"], "7", {"target": 4}, [["4"]]]
    records = [
        {"prompt": f"{i}?", "split": "prompts", "reward_model": {"ground_truth": t}} for i, t in enumerate(truths)
    ]
    run(dataclasses.replace(plan, verifiers=("exact_match",)), tmp_path, *records)
    given = {row["prompt"]: (row["answer"], json.loads(row["metadata"])) for row in rows(plan, "prompts", tmp_path)}

    def rewards(prompt, *texts):
        answer, metadata = given[prompt]
        many = {"answer": [answer] * len(texts), "metadata": [metadata] * len(texts)}
        return exact_match([prompt] * len(texts), texts, **many)

    assert rewards("0?", "4", "four", "5", '["4", "four"]') == [1, 1, 0, 0] and rewards("1?", "7") == [1]
    # Nothing that a policy writes equals an object.
    assert [letter["record"] for letter in letters(tmp_path)] == [3, 4]
    assert all(
        "exact_match expects a text or number as answer, or a list" in one["reason"] for one in letters(tmp_path)
    )


@pytest.mark.parametrize(("header", "right"), [("<think>\n", [1, 1, 0, 0]), ("", [0] * 4), ("<assistant>\n", [0] * 4)])
def test_a_reward_of_tags_knows_which_one_the_template_has_opened(plan, tmp_path, header, right):
    tokenizer = blocks.tokenizer_of(plan.tokenizer)
    folder = tmp_path / "tokenizer"
    save_tokenizer(tokenizer, folder)
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text() + header)
    run(dataclasses.replace(plan, tokenizer=str(folder)), tmp_path, {"prompt": "?", "split": "prompts"})
    [row] = rows(plan, "prompts", tmp_path)
    texts = ["I add.\n</think>\n<answer>4</answer>", "I add.</think><answer>5</answer>"]
    texts += ["<answer>4</answer>", "I add. <answer>4</answer>"]
    assert tagged(["?"] * 4, texts, metadata=[json.loads(row["metadata"])] * 4) == right
    assert ("opened_tag" in row["metadata"]) == any(right)
