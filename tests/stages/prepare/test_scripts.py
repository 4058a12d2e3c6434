"""Held-out and evaluation prompts stay out of training data in whatever form and script they come there."""

import pytest

from rlhf.stages.prepare.stage import Config, PrepareError
from tests.stages.prepare.support import rows, write

pytestmark = pytest.mark.slow

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
