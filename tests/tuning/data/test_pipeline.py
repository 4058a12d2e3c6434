import dataclasses
import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tuning.data import pipeline
from tuning.data.records import parse_record
from tuning.models.tokenizer import save_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('no thanks') }}{% endif %}"
    "<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}<s>"
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """One token a byte, and the control tokens <s> and </s>."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = TEMPLATE
    save_tokenizer(tokenizer, folder)
    return pipeline.Plan(
        tokenizer=str(folder),
        system_prompt=None,
        rename={},
        extra_fields="error",
        seed=0,
        heldout_fraction=0.25,
        sft_fraction=0.5,
        preference_all=True,
        prompts_all=False,
        splits=("sft", "preference", "prompts", "heldout"),
        max_prompt_tokens=100,
        max_completion_tokens=50,
        shards=2,
    )


def items(*raw, start=0):
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in raw]
    return [(start + i, "data.jsonl", start + i + 1, line) for i, line in enumerate(lines)]


def rows(plan, output, *chunks):
    return [row for shard in range(plan.shards) for row in pipeline.merge(chunks, output, shard).to_pylist()]


def decoded(plan, ids):
    return pipeline._tokenizer(plan.tokenizer).decode(ids)


def test_rows_of_every_split(plan, tmp_path):
    pair = {"prompt": "p", "completion": "good", "rejected": ["bad", "worse"], "answer": "a", "margin": 0.5}
    records = [{**pair, "id": split, "group": split, "split": split} for split in plan.splits]
    for record, letter in zip(records, "wxyz", strict=False):
        record["prompt"] = letter
    system = dataclasses.replace(plan, system_prompt="sys")
    pipeline.run_chunk(items(*records), system, tmp_path)
    [sft] = rows(plan, "sft", tmp_path)
    assert (sft["id"], sft["prompt"], sft["completion"]) == ("sft", "w", "good")
    assert decoded(plan, sft["prompt_ids"]) == "<s>system:sys</s><s>user:w</s><s>"
    assert decoded(plan, sft["completion_ids"]) == "good</s>"
    one, two = rows(plan, "preference", tmp_path)
    assert {one["id"], two["id"]} == {"preference/0", "preference/1"}
    assert {one["rejected"], two["rejected"]} == {"bad", "worse"} and one["margin"] == 0.5
    assert decoded(plan, one["chosen_ids"]) == "good</s>"
    assert decoded(plan, two["rejected_ids"]) == two["rejected"] + "</s>"
    [prompt], [heldout] = rows(plan, "prompts", tmp_path), rows(plan, "heldout", tmp_path)
    assert (prompt["prompt"], prompt["answer"], prompt["metadata"]) == ("y", "a", "{}")
    assert decoded(plan, heldout["prompt_ids"]) == "<s>system:sys</s><s>user:z</s><s>"
    assert len(rows(plan, "heldout_preference", tmp_path)) == 2


def test_bad_records_are_dead_letters_with_reasons(plan, tmp_path):
    bad = [b"{", {"prompt": "q", "anwser": "4"}, {"prompt": "refuse"}, {"prompt": "say </s>"}, {"prompt": "say </s>"}]
    pipeline.run_chunk(items({"prompt": "fine"}, *bad), plan, tmp_path)
    letters = [json.loads(line) for line in (tmp_path / "dead.jsonl").read_text().splitlines()]
    assert [(letter["number"], letter["copies"]) for letter in letters] == [(2, 1), (3, 1), (4, 1), (5, 2)]
    assert [letter["record"] for letter in letters][:2] == ["{", '{"prompt": "q", "anwser": "4"}']
    reasons = ["one JSON object", "did you mean `answer`", "no thanks", "control token '</s>'"]
    for letter, part in zip(letters, reasons, strict=True):
        assert part in letter["reason"] and f"record {letter['number']}" in letter["reason"]
    assert len(rows(plan, "ledger", tmp_path)) == 1


def test_lengths_in_tokens_at_the_limit(plan, tmp_path):
    exact = {"completion": "c" * 49, "rejected": "r", "split": "preference"}
    long = {"completion": "c" * 50, "rejected": "r", "split": "preference"}
    pipeline.run_chunk(items({"prompt": "a", **exact}, {"prompt": "b", **long}), plan, tmp_path)
    [row] = rows(plan, "preference", tmp_path)
    assert row["prompt"] == "a" and len(row["chosen_ids"]) == 50
    header = len(row["prompt_ids"]) - 1
    assert 0 < header < 100
    folder = tmp_path / "prompts"
    texts = [{"prompt": "p" * (100 - header + more), "split": "prompts"} for more in (0, 1)]
    pipeline.run_chunk(items(*texts), plan, folder)
    [row] = rows(plan, "prompts", folder)
    assert len(row["prompt_ids"]) == 100
    ledger = rows(plan, "ledger", tmp_path) + rows(plan, "ledger", folder)
    dropped = sorted(reason for line in ledger for reason in line["dropped"])
    assert dropped == ["preference:completion_too_long", "prompts:prompt_too_long"]


def test_equal_records_and_prompts_merge_within_and_across_chunks(plan, tmp_path):
    pair = {"prompt": "p", "completion": "x", "rejected": "y", "split": "preference"}
    prompts = [{"prompt": "p", "split": "prompts", "metadata": {"n": n}} for n in (1, 2)]
    first = items({**pair, "id": "one"}, prompts[0], {**pair, "id": "two"})
    second = items({**pair, "id": "three"}, prompts[1], start=3)
    whole, cut = tmp_path / "whole", (tmp_path / "cut1", tmp_path / "cut2")
    pipeline.run_chunk(first + second, plan, whole)
    for chunk, folder in zip((first, second), cut, strict=False):
        pipeline.run_chunk(chunk, plan, folder)
    for output in ("preference", "prompts"):
        [row] = rows(plan, output, whole)
        assert [row] == rows(plan, output, *cut)
    assert row["metadata"] == '{"n":1}'
    assert [row["id"] for row in rows(plan, "preference", *cut)] == ["one"]
    for folders in ((whole,), cut):
        copies = {line["id"]: line["copies"] for line in rows(plan, "ledger", *folders)}
        assert sorted(copies.values()) == [1, 1, 3] and copies["one"] == 3


def test_groups_go_whole_and_by_hash(plan):
    def splits(i, plan=plan, **fields):
        return pipeline.splits_of(parse_record({"prompt": str(i), **fields}, "s", 1), plan)

    pair = {"completion": "x", "rejected": "y"}
    planned = [splits(i, **pair) for i in range(2000)]
    kinds = {
        ("heldout", "heldout_preference"): 0.25,
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
        ("heldout", "heldout_preference"), ("sft", "preference", "prompts"), ("prompts",)
    }  # fmt: skip
    prompts_only = dataclasses.replace(plan, splits=("prompts",))
    assert {tuple(splits(i, prompts_only, **pair)) for i in range(50)} == {("prompts",)}
    assert splits(1, prompts_only, completion="x", split="sft") == []


def test_uniform_is_uniform():
    values = [pipeline.uniform(0, "heldout", str(i)) for i in range(4000)]
    assert sum(values) / 4000 == pytest.approx(0.5, abs=0.02) and min(values) >= 0 and max(values) < 1
    assert pipeline.uniform(0, "sft", "1") != pipeline.uniform(0, "heldout", "1")
