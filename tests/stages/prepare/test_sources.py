"""Several sources go where each says; held-out and evaluation prompts stay out of training data in whatever form."""

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


FORMS = [lambda text: f"{text} \n", lambda text: f" {text.replace(' ', '  ')}", lambda text: text.replace("1", "１")]


def test_forms_of_one_prompt_are_held_out_or_trained_on_together(run, tmp_path):
    forms = {f"What is {i} plus 1?": FORMS[i % 3](f"What is {i} plus 1?") for i in range(60)}
    records = [{"prompt": prompt, "completion": "x"} for both in forms.items() for prompt in both]
    source = write(tmp_path / "data.jsonl", records)
    _, out = run(Config(source=source, splits=["sft", "heldout"], sft_fraction=1.0, heldout_fraction=0.3))
    held, trained = ({row["prompt"] for row in rows(out, name)} for name in ("heldout", "sft"))
    assert len(held) > 24 and len(trained) > 24 and len(held | trained) == 120
    assert all((prompt in held) == (form in held) for prompt, form in forms.items())


@pytest.mark.parametrize(("form", "turns"), zip(FORMS, (1, 3, 1), strict=True))
def test_a_held_out_prompt_in_another_form_is_refused_in_training_data(run, tmp_path, form, turns):
    said = [("user", "What is 7 plus 1?"), ("assistant", "8"), ("user", "And 1 plus 1?")][:turns]
    held, trained = ({"messages": [{"role": role, "content": f(text)} for role, text in said]} for f in (str, form))
    trained["messages"].append({"role": "assistant", "content": "x"})
    records = [held | {"split": "heldout", "group": "a"}, trained | {"split": "sft"}]
    with pytest.raises(PrepareError, match="is held out, and record number .* has the same prompt.*same `group`"):
        run(Config(source=write(tmp_path / "data.jsonl", records), splits=["sft", "heldout"]))


def test_evaluation_prompts_are_dropped_in_any_script(run, tmp_path):
    asked = [
        "小明有五个苹果吃了两个还剩几个",
        "りんごを三つたべました",
        "มีแอปเปิลห้าลูก",
        "Сколько будет пять плюс два",
        "∫ √π → ∞ ≠ ∑",
        "a train leaves at nine",
    ]
    spread = [text.replace("a", "Ａ").replace("С", "с") for text in asked]
    dirty = [
        {"id": f"dirty{i}", "prompt": f"请你认真回答 {text} 请写出过程", "completion": "x"}
        for i, text in enumerate(spread)
    ]
    clean = [
        {"id": f"clean{i}", "prompt": f"请你认真回答{i}加{i}是多少请写出过程", "completion": "x"} for i in range(9)
    ]
    evaluation = write(tmp_path / "evaluation.jsonl", [{"prompt": text} for text in asked])
    source = write(tmp_path / "data.jsonl", dirty + clean)
    settings = {"splits": ["sft"], "sft_fraction": 1.0, "decontaminate": {"sources": [evaluation]}}
    metrics, out = run(Config(source=source, **settings))
    assert metrics["dropped_records"] == {"contaminated": len(asked)}
    assert {row["id"] for row in rows(out, "sft")} == {record["id"] for record in clean}


def test_evaluation_prompts_that_are_held_out_stay(run, tmp_path):
    asked = [{"prompt": f"how many apples has a farmer with {i} trees of ten apples each"} for i in range(3)]
    evaluation = write(tmp_path / "evaluation.jsonl", asked)
    train = write(tmp_path / "train.jsonl", [{"prompt": f"say: {asked[0]['prompt']}"}, {"prompt": "something else"}])
    sources = [{"source": train, "for": ["prompts"]}, {"source": evaluation, "for": ["heldout"]}]
    settings = {"splits": ["prompts", "heldout"], "decontaminate": {"sources": [evaluation]}}
    metrics, _ = run(Config(sources=sources, heldout_fraction=0.0, **settings))
    assert metrics["dropped_records"] == {"contaminated": 1} and metrics["rows"] == {"prompts": 1, "heldout": 3}


def test_a_short_turn_of_an_evaluation_conversation_does_not_drop_training_records(run, tmp_path):
    turns = ["Hi", "how many apples has a farmer with nine trees of ten apples each", "Why?"]
    said = [{"role": role, "content": text} for text in turns for role in ("user", "assistant")]
    evaluation = write(tmp_path / "evaluation.jsonl", [{"messages": said}])
    prompts = {"greeting": "say hi to Bob", "same": f"please say {turns[1]} now"}
    records = [{"id": id, "prompt": prompt, "completion": "x"} for id, prompt in prompts.items()]
    source = write(tmp_path / "data.jsonl", records)
    settings = {"splits": ["sft"], "sft_fraction": 1.0, "decontaminate": {"sources": [evaluation]}}
    _, out = run(Config(source=source, **settings))
    assert [row["id"] for row in rows(out, "sft")] == ["greeting"]


def test_near_duplicates_are_found_in_any_script_and_formulas_are_not_taken_for_others(run, tmp_path):
    said = "小明昨天在市场上买了五个苹果和三个梨子，今天早上他吃了其中的两个苹果，请问现在他一共还剩下几个水果？"
    records = [{"prompt": said, "completion": "好"}, {"prompt": said.replace("市场", "超市"), "completion": "好"}]
    records += [{"prompt": f"3 {sign} 5", "completion": "x"} for sign in "+-*/<"]
    settings = {"splits": ["sft"], "sft_fraction": 1.0, "near_duplicates": 0.7}
    metrics, _ = run(Config(source=write(tmp_path / "data.jsonl", records), **settings))
    assert metrics["dropped_records"] == {"near_duplicate": 1} and metrics["rows"]["sft"] == 6
