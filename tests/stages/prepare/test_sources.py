"""Several sources go where each says, or where alone its records can go; the counts say where that was."""

import json

import pytest
from pydantic import ValidationError

from rlhf.stages.prepare.stage import Config, PrepareError
from tests.stages.prepare.support import rows, write

pytestmark = pytest.mark.slow


def chat(i):
    return {"messages": [{"role": "user", "content": f"Chat {i}?"}, {"role": "assistant", "content": f"Yes, {i}."}]}


@pytest.fixture
def files(tmp_path):
    """Paths of 60 conversations, 48 pairs and 80 problems."""
    records = {
        "chats": [chat(i) for i in range(60)],
        "pairs": [{"prompt": f"Pair {i}?", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(48)],
        "math": [{"prompt": f"Problem {i}?", "answer": str(i)} for i in range(80)],
    }
    return {name: write(tmp_path / f"{name}.jsonl", found) for name, found in records.items()}


def starts(out, output):
    """How the prompts of an output begin: with the kind of the source."""
    return {row["prompt"].split()[0] for row in rows(out, output)}


def test_each_source_feeds_the_outputs_that_it_is_for_and_its_own_share_is_held_out(run, files, capsys):
    stated = {"chats": ["sft"], "pairs": ["preference"], "math": ["prompts"]}
    metrics, out = run(Config(sources=[{"source": files[name], "for": uses} for name, uses in stated.items()]))
    counts = [source["rows"] for source in metrics["sources"]]
    assert [set(c) for c in counts] == [
        {"sft", "heldout_sft"}, {"preference", "heldout_preference"}, {"prompts", "heldout"},
    ]  # fmt: skip
    assert [sum(c.values()) for c in counts] == [60, 48, 80]
    assert all(0.05 < c[max(c)] / sum(c.values()) < 0.95 for c in counts)
    kinds = {"sft": {"Chat"}, "preference": {"Pair"}, "prompts": {"Problem"}, "heldout": {"Problem"}}
    assert {output: starts(out, output) for output in kinds} == kinds
    assert metrics["unanswered"] == {"prompts": 0, "heldout": 0}
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if line.startswith(files["math"]))
    assert line.split()[1:] == [str(counts[2].get(output, 0)) for output in dict.fromkeys(o for c in counts for o in c)]
    assert f"<td>{files['pairs']}</td>" in (out / "card.html").read_text().split("Rows by source")[1]


@pytest.mark.parametrize(
    ("splits", "source", "fits"),
    [(["sft", "prompts"], "chats", "sft, prompts"), (["preference", "sft"], "pairs", "sft, preference")],
)
def test_one_of_several_sources_whose_records_fit_two_outputs_has_to_state_its_use(run, files, splits, source, fits):
    math = {"source": files["math"], "for": ["prompts"]}
    with pytest.raises(PrepareError, match=rf"data\.sources\.1 \(.*{source}\.jsonl\).* for {fits}.*`for: \[{fits}\]`"):
        run(Config(sources=[math, {"source": files[source]}], splits=splits))


def test_a_use_that_is_the_only_one_needs_no_word(run, files, tmp_path):
    more = write(tmp_path / "more.jsonl", [chat(i) | {"split": "heldout"} for i in range(60, 70)])
    sources = [{"source": files["chats"]}, {"source": more}]
    metrics, _ = run(Config(sources=sources, splits=["sft", "heldout"], sft_fraction=1.0))
    assert metrics["sources"][0]["rows"]["sft"] + metrics["sources"][0]["rows"]["heldout"] == 60
    assert metrics["sources"][1]["rows"] == {"heldout": 10, "heldout_sft": 10}


def test_a_source_for_problems_alone_is_held_out_whole_and_another_is_divided(run, files, tmp_path, capsys):
    tests = write(tmp_path / "test.jsonl", [{"prompt": f"Test {i}?", "answer": "1"} for i in range(20)])
    sources = [{"source": files["chats"], "for": ["sft", "prompts"]}, {"source": tests, "for": ["heldout"]}]
    settings = {"splits": ["sft", "prompts", "heldout"], "heldout_fraction": 0.0, "sft_fraction": 0.5}
    metrics, out = run(Config(sources=sources, **settings))
    first, second = (source["rows"] for source in metrics["sources"])
    assert second == {"heldout": 20} and set(first) == {"sft", "prompts"} and min(first.values()) > 15
    assert metrics["unanswered"] == {"prompts": first["prompts"], "heldout": 0}
    count = first["prompts"]
    assert f"prompts {count} ({count} without an answer), heldout 20\n" in capsys.readouterr().out
    assert starts(out, "heldout") == {"Test"}


def test_a_source_names_outputs_that_there_are():
    with pytest.raises(ValidationError, match="'sft', 'preference', 'labelled', 'prompts' or 'heldout'"):
        Config(sources=[{"source": "x.jsonl", "for": ["train"]}])
    kept = Config.model_validate_json(json.dumps({"sources": [{"source": "x.jsonl", "for": ["sft"]}]}))
    assert kept.model_dump()["sources"][0]["for"] == ["sft"]
