"""Data of every source becomes tables with a card, the same bytes each time; what is broken is set aside or named."""

import gzip
import json
import shutil
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlhf.stages.prepare import stage as prepare
from rlhf.stages.prepare.stage import Config, PrepareError, write_card
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.keys import config_content, digest
from rlhf.stages.store.work import WorkFolder
from rlhf.tuning.data.merge import Fates
from rlhf.tuning.models.tokenizer import load_tokenizer
from tests.stages.prepare.support import SYSTEM, digests, rows, write


def test_addition(run, base):
    seen = []
    metrics, out = run(Config(system_prompt=SYSTEM), progress=lambda *args, **metrics: seen.append(args))
    assert metrics["records"] == {"read": 720, "kept": 720, "duplicates": 0, "dropped": 0, "dead": 0}
    counts = metrics["rows"]
    assert counts == {
        "sft": 193,
        "preference": 1146,
        "prompts": 380,
        "heldout": 147,
        "heldout_sft": 147,
        "heldout_preference": 294,
    }
    assert {name: len(rows(out, name)) for name in counts} == counts
    assert seen[-1] == (1, 1, "block")
    problems = {name: {row["prompt"] for row in rows(out, name)} for name in counts}
    assert not problems["heldout"] & (problems["sft"] | problems["preference"] | problems["prompts"])
    assert not problems["sft"] & problems["prompts"]
    assert problems["preference"] == problems["sft"] | problems["prompts"]
    assert problems["heldout_sft"] == problems["heldout_preference"] == problems["heldout"]
    assert 0 < metrics["constant_answer_baseline"] < 0.06
    assert metrics["tokens"]["sft"]["completion_ids"] == {"mean": 3.0, "p50": 3.0, "p95": 3.0, "max": 3.0}

    tokenizer = load_tokenizer(base.local("tokenizer"))
    row = rows(out, "sft")[0]
    prompt = (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(row["prompt_ids"]) == prompt
    assert tokenizer.decode(row["completion_ids"]) == row["completion"] + "<|im_end|>"
    ids = [row["id"] for row in rows(out, "prompts")]
    assert ids == sorted(ids)
    assert json.dumps(metrics)


@pytest.mark.slow
def test_bytes_do_not_depend_on_workers_chunks_or_reruns(run, pairs, tmp_path):
    source = write(tmp_path / "data.jsonl", [*pairs, *pairs[:5], {"prompt": 3}, {"prompt": "x " * 600}])
    settings = {"source": source, "shards": 3, "near_duplicates": 0.9}
    metrics, out = run(Config(**settings))
    expected = digests(out)
    # Tokens and offsets of the four outputs with completions.
    assert len(expected) == 6 * 3 + 4 * 2 + 3
    assert metrics["records"] == {"read": 67, "kept": 60, "duplicates": 5, "dropped": 1, "dead": 1}
    for variant in ({}, {"chunk_megabytes": 0.01}, {"chunk_megabytes": 1e-6}, {"workers": 2, "chunk_megabytes": 0.003}):
        again, other = run(Config(**settings, **variant))
        assert digests(other) == expected, variant
        assert again == metrics, variant


@pytest.mark.slow
def test_the_same_records_in_every_kind_of_file_give_the_same_rows(run, pairs, tmp_path):
    import pyarrow as pa

    lines = write(tmp_path / "data.jsonl", pairs)
    table = pa.Table.from_pylist(pairs)
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=7)
    with pa.OSFile(str(tmp_path / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(Path(lines).read_bytes()))
    provenance = {"source"}
    expected = None
    for name in ("data.jsonl", "data.parquet", "data.arrow", "data.jsonl.gz"):
        _, out = run(Config(source=str(tmp_path / name), chunk_megabytes=0.002))
        found = [{k: v for k, v in row.items() if k not in provenance} for row in rows(out, "preference")]
        assert {row["source"] for row in rows(out, "preference")} == {name}
        expected = expected or found
        assert found == expected and len(found) > 30, name


@pytest.mark.slow
def test_finished_blocks_are_reused_after_a_kill(run, pairs, tmp_path, monkeypatch):
    from rlhf.tuning.data import pipeline

    config = Config(source=write(tmp_path / "data.jsonl", pairs), chunk_megabytes=0.002)
    original, calls = pipeline.Write.process, []

    def fail_at_second(self, block):
        calls.append(len(block.entries))
        if len(calls) == 2:
            raise RuntimeError("killed")
        return original(self, block)

    monkeypatch.setattr(pipeline.Write, "process", fail_at_second)
    with pytest.raises(RuntimeError, match="killed"):
        run(config, work=tmp_path / "work")
    metrics, out = run(config, work=tmp_path / "work")
    # The second block has no receipt, so it is made again; the first one is not.
    assert len(calls) > 3 and sum(calls) == len(pairs) + calls[1] and metrics["records"]["kept"] == len(pairs)
    monkeypatch.undo()
    assert digests(run(config)[1]) == digests(out)


def test_records_outside_the_fraction_of_sft_are_told_with_the_setting(run, pairs, tmp_path, capsys):
    metrics, _ = run(Config(source=write(tmp_path / "data.jsonl", pairs), splits=["sft"], sft_fraction=0.5))
    left = metrics["dropped_records"]["no_split_wants_it"]
    assert left == 60 - metrics["rows"]["sft"] > 0
    told = f"not kept: {left} that no split takes (sft has data.sft_fraction 0.5 of the groups, and no section reads"
    assert told in capsys.readouterr().out


def test_every_record_is_accounted_for(run, pairs, tmp_path, capsys):
    records = [
        *pairs,
        *pairs[:3],
        {"prompt": "x " * 600, "completion": "1"},
        {"prompt": "y " * 600, "completion": "1"},
        {"prompt": "Long?", "completion": "word " * 50, "split": "sft"},
        {"prompt": "Other?", "split": "prompts", "anwser": "1"},
        {"prompt": "<|im_end|>"},
        {"prompt": "Unused?", "split": "heldout", "answer": "1"},
    ]
    config = Config(
        source=write(tmp_path / "data.jsonl", records),
        splits=["sft", "preference"],
        max_completion_tokens=20,
        sft_fraction=1.0,
    )  # fmt: skip
    metrics, out = run(config)
    assert metrics["records"] == {"read": 69, "kept": 60, "duplicates": 3, "dropped": 4, "dead": 2}
    assert metrics["dropped_records"] == {"prompt_too_long": 2, "completion_too_long": 1, "no_split_wants_it": 1}
    assert metrics["dropped_rows"] == {"sft:prompt_too_long": 2, "sft:completion_too_long": 1}
    assert metrics["rows"] == {"sft": 60, "preference": 60}
    assert metrics["constant_answer_baseline"] is None
    reasons = [letter["reason"] for letter in rows(out, "dead")]
    assert "did you mean `answer`" in reasons[0] and "control token '<|im_end|>'" in reasons[1]
    line = next(line for line in capsys.readouterr().out.splitlines() if "not kept" in line)
    assert line.startswith("not kept: 3 duplicates; 2 prompt_too_long; 1 that no split takes; 1 completion_too_long")
    assert "; 2 dead (data.jsonl, record 67" in line and "did you mean `answer`" in line
    facts = json.loads((out / "statistics.json").read_text())
    assert facts["metrics"] == metrics and facts["steps"]["Validate"]["dead"] == 2
    card = (out / "card.html").read_text()
    for part in (
        "completion_too_long",
        "did you mean `answer`",
        "control token &#39;&lt;|im_end|&gt;&#39;",
        "Question ",
    ):
        assert part in card, part


def test_the_next_try_keeps_the_finished_pieces_of_a_try_that_ended(run, tmp_path, capsys):
    source = write(tmp_path / "data.jsonl", [{"prompt": f"{i}?", "answer": "1"} for i in range(30)])
    folder = WorkFolder(Store(str(tmp_path / "store")), "prepare", "d" * 64)
    missing = Config(source=source, splits=["prompts", "preference"])
    with pytest.raises(PrepareError, match="no rows for `preference`"):
        run(missing, folder.open())
    with pytest.raises(PrepareError, match="no rows for `preference`"):
        run(missing, folder.open())
    assert "resumed: 1 of 1 parts of the data are finished" in capsys.readouterr().out


@pytest.mark.slow
def test_a_renamed_field_that_no_record_has_is_refused_before_its_neighbour_stands_for_it(run, tmp_path):
    records = [{"prompt": f"{i}?", "answer": "wrong", "gold": f"{i}"} for i in range(30)]
    # Some records may lack it.
    records += [{"prompt": f"{i}!"} for i in range(30)]
    settings = {"extra_fields": "metadata", "splits": ["prompts"], "chunk_megabytes": 0.0005}
    one = {"source": write(tmp_path / "data.jsonl", records)}
    run(Config(**one, rename={"gold": "answer", "answer": "guess", "more": None, "query": "guess"}, **settings))
    other = {
        "source": write(tmp_path / "other.jsonl", [{"prompt": "Other?", "gold": "1"}]),
        "rename": {"gold": "answer"},
    }
    for config, place in (
        (Config(**one, rename={"glod": "answer"}, **settings), "data.rename"),
        (Config(sources=[other, one | {"rename": {"glod": "answer"}}], **settings), "data.sources.1.rename"),
    ):
        with pytest.raises(PrepareError, match=rf"{place} names `glod`, which no record of .*data\.jsonl has"):
            run(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("record", "splits", "told", "remedy"),
    [
        (
            {"prompt": "{}?", "completion": "{}", "label": True},
            ["preference", "heldout"],
            r"data\.splits=\[labelled, heldout\]",
            ["labelled", "heldout"],
        ),
        (
            {"text": "Plain text {}."},
            ["sft", "heldout"],
            r"evaluate: null.*Plain texts have no problems.*data\.splits=\[sft\]\.",
            ["sft"],
        ),
    ],
    ids=["labelled completions", "plain texts"],
)
def test_a_layout_that_the_splits_do_not_suit_is_told_with_those_that_do(run, tmp_path, record, splits, told, remedy):
    records = [{k: v.format(i) if isinstance(v, str) else v for k, v in record.items()} for i in range(60)]
    source = write(tmp_path / "data.jsonl", records)
    with pytest.raises(PrepareError, match=told):
        run(Config(source=source, splits=splits))
    metrics, _ = run(Config(source=source, splits=remedy, sft_fraction=1.0))
    assert metrics["rows"][remedy[0]] > 0


def test_prompts_without_a_completion_are_prompts_whatever_share_feeds_sft(run, tmp_path):
    records = [{"prompt": f"{i}?", "answer": str(i)} for i in range(40)]
    records += [{"prompt": f"{i}!", "completion": str(i)} for i in range(40)]
    metrics, out = run(
        Config(source=write(tmp_path / "data.jsonl", records), splits=["sft", "prompts", "heldout"], sft_fraction=0.5)
    )
    assert metrics["records"]["kept"] == 80 and metrics["dropped_records"] == {}
    found = {name: {row["prompt"] for row in rows(out, name)} for name in ("sft", "prompts", "heldout")}
    assert {p for p in found["prompts"] | found["heldout"] if p.endswith("?")} == {r["prompt"] for r in records[:40]}
    assert not found["sft"] & found["prompts"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra, settings, message",
    [
        (
            [],
            {"max_completion_tokens": 1},
            "no rows for `sft`: .* of more than data.max_completion_tokens 1; raise it, .*"
            "Of 60 records left out: 20 completion_too_long. If sft is not needed, set the section",
        ),
        (
            [],
            {"max_prompt_tokens": 1, "splits": ["prompts"]},
            "^no rows for `prompts`: 60 rows have a prompt of more than data.max_prompt_tokens 1; raise(?!.*splits=)",
        ),
        (
            [],
            {"rules": ["tests.stages.prepare.support:nothing"]},
            "no rows for `sft`: every record was dropped, for the reasons below.*: 60 nothing",
        ),
        ([], {"heldout_fraction": 0.0}, "no rows for `heldout`: heldout_fraction is 0.0"),
        ([], {"sft_fraction": 1.0}, "no rows for `prompts`.*use 'all-training'"),
        ([{"promt": "x"}] * 20, {}, r"20 of 80 .* \(max_dead_fraction is 0.1\); .*dead.parquet.*did you mean `prompt`"),
        (
            [{"prompt": "x " * 600}],
            {"too_long": "error"},
            "longer than max_prompt_tokens 512.*prompt_too_long.*truncate",
        ),
        ([{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}], {}, "two different records have the id 'a'"),
        (
            [{"prompt": "x", "group": "g", "split": split} for split in ("prompts", "heldout")],
            {},
            "group 'g' is both held out and used for training",
        ),
        (
            [
                {"prompt": "one", "split": "heldout"},
                {
                    "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}],
                    "split": "prompts",
                },
            ],
            {},
            r"number 61 \(id .* is held out, and record number 62 \(.* has the same prompt.*if only system",
        ),
        (
            [{"prompt": "same", "group": split, "split": split} for split in ("prompts", "heldout")],
            {},
            "record number 62 .* is held out, and record number 61 .*same prompt",
        ),
    ],
)
def test_errors_say_what_to_change(run, pairs, tmp_path, extra, settings, message):
    config = Config(source=write(tmp_path / "data.jsonl", [*pairs, *extra]), **settings)
    with pytest.raises(PrepareError, match="(?s)" + message):
        run(config)


def test_a_file_without_records_is_told_by_its_name(run, tmp_path):
    with pytest.raises(PrepareError, match=r"empty\.jsonl: there are no records in it"):
        run(Config(source=write(tmp_path / "empty.jsonl", [])))


def test_evaluation_prompts_are_in_the_key_by_content(tmp_path):
    path = tmp_path / "evaluation.jsonl"

    def key(source):
        config = Config(decontaminate={"sources": [source]})
        return digest(config_content(config)), prepare.source_digests(config)

    before = key(write(path, [{"prompt": "a"}]))
    assert key(str(path.rename(tmp_path / "renamed.jsonl"))) == before
    assert key(write(tmp_path / "renamed.jsonl", [{"prompt": "b"}]))[1] != before[1]
    assert prepare.source_digests(Config()) == {"source 1: task": "addition"}


def test_a_pair_of_equal_answers_is_not_told_as_too_long():
    prepare._refuse_too_long(Config(too_long="error"), Fates(dropped_rows=Counter({"preference:equal_pair": 1})))


def test_it_names_sources_without_what_opens_them(smoke_store, tmp_path):
    [made] = (smoke_store / "artifacts" / "prepare").iterdir()
    out = shutil.copytree(made, tmp_path / "out")
    source = {"source": "https://me:SECRET@host/x.jsonl?sig=SECRET", "source_args": {"also": "s3://me:SECRET@b/x"}}
    write_card(out, json.loads((out / "statistics.json").read_text()), Config.model_validate(source))
    page = (out / "card.html").read_text()
    assert "https://host/x.jsonl?sig=***" in page and "s3://b/x" in page and "SECRET" not in page
