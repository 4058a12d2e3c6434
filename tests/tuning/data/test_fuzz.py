"""Any bytes go through: no crash, every line accounted for, and the same result however they are cut."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf.tuning.data import merge
from tests.tuning.data.run import letters, pieces, plan_of, rows, run

MANY = settings(
    max_examples=150, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return plan_of(
        tmp_path_factory.mktemp("tokenizer"),
        splits=("sft", "preference", "labelled", "prompts", "heldout"),
        heldout_fraction=0.2,
        max_prompt_tokens=300,
        max_completion_tokens=100,
        shards=2,
    )


texts = st.text(max_size=40) | st.sampled_from(
    ["", " ", "\x00", "\ud800", "😀" * 50, "<|im_end|>", "a\r\nb", "x" * 5000]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "alien"]), "content": texts}
    ),
    max_size=4,
)
names = st.sampled_from(
    [
        *("id", "prompt", "completion", "rejected", "chosen", "label", "answer", "margin", "tools", "split", "group"),
        *("metadata", "messages", "text", "instruction", "output", "conversations", "question", "reward_model"),
    ]
)
records = st.dictionaries(names, texts | messages | values, max_size=5)
good = st.fixed_dictionaries(
    {"prompt": st.text("abc é☃", min_size=1, max_size=9), "completion": st.text("xyz", min_size=1)}
)
lines = st.lists(
    (records | good | values).map(lambda v: json.dumps(v).encode())
    | st.binary(max_size=60)
    | st.just(b'{"prompt": "q'),
    max_size=12,
)


def outcome(plan, data, **how):
    """(records by fate, dead letters, rows of each output) of a file with these lines."""
    with tempfile.TemporaryDirectory() as folder:
        run(plan, Path(folder), *data, **how)
        found = merge.fates(pieces(plan, Path(folder)))
        counts = {"kept": found.kept, "duplicates": found.duplicates, "dropped": found.dropped.total()}
        output = {name: rows(plan, name, Path(folder)) for name in plan.splits}
        return counts, letters(Path(folder)), output


@pytest.mark.slow
@MANY
@given(lines)
def test_every_line_has_one_fate_and_cuts_change_nothing(plan, data):
    # Bytes may hold line ends of their own.
    expected = sum(bool(line.strip()) for line in b"\n".join(data).split(b"\n"))
    counts, dead, output = outcome(plan, data)
    assert sum(counts.values()) + len(dead) == expected
    assert all(letter["reason"] and letter["source"] == "data.jsonl" for letter in dead)
    assert outcome(plan, data, block_bytes=1) == (counts, dead, output)
    for row in output["sft"]:
        assert row["prompt_ids"] and row["completion_ids"] and len(row["completion_ids"]) <= 100


def content_of(output):
    """Rows without what says which of several records with one prompt came first."""
    left_out = {name: {"record"} for name in output} | {n: {"record", "id", "content"} for n in ("prompts", "heldout")}
    kept = {n: [{k: v for k, v in row.items() if k not in left_out[n]} for row in output[n]] for n in output}
    return {name: sorted(found, key=str) for name, found in kept.items()}


@pytest.mark.slow
@MANY
@given(st.lists(good, min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_the_order_of_the_records_changes_no_row(plan, data, random):
    counts, _, output = outcome(plan, [json.dumps(r).encode() for r in data])
    shuffled = random.sample(data, len(data))
    again, _, other = outcome(plan, [json.dumps(r).encode() for r in shuffled])
    assert (again, content_of(other)) == (counts, content_of(output))
    assert counts["kept"] <= len({json.dumps(r, sort_keys=True) for r in data})


@pytest.mark.slow
def test_a_record_of_many_megabytes_and_one_nested_too_deep(plan, tmp_path):
    huge = {"prompt": "p", "completion": "c" * 9_000_000, "split": "sft"}
    deep = b'{"prompt": ' + b"[" * 200_000
    counts, dead, output = outcome(plan, [json.dumps({"prompt": "p"}).encode(), json.dumps(huge).encode(), deep])
    assert counts == {"kept": 1, "duplicates": 0, "dropped": 1} and [d["record"] for d in dead] == [3]
