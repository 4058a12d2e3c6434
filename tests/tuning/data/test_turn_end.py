"""One token ends the assistant's turn in every row and stop list, whatever the tokenizer's EOS (R23)."""

import pytest
from tokenizers.processors import TemplateProcessing

from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.tokenizer import control_ids, eos_ids, turn_end
from tests.tuning.data.conversation import conversation_ids
from tests.tuning.data.run import letters, plan_of, rows, run

END = "<turn_end>"


def tokenizer(template=None):
    """ChatML whose turns end with a token that is not EOS, as in Gemma, or in Qwen's base models."""
    made = byte_tokenizer()
    made.add_tokens([END], special_tokens=True)
    made.chat_template = template or made.chat_template.replace("<|im_end|>", END)
    return made


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    splits = ("sft", "preference", "labelled", "prompts", "heldout")
    return plan_of(tmp_path_factory.mktemp("t"), tokenizer(), splits=splits, heldout_fraction=0.0, shards=1)


USER, BOT = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


def test_every_completion_ends_with_the_end_of_the_turn(plan, tmp_path):
    records = [
        {"prompt": "1", "completion": "x", "rejected": "y"},
        {"messages": [USER, BOT]},
        {"messages": [USER, BOT, USER, BOT]},
        {"prompt": "2", "completion": "x", "label": True},
    ]
    run(plan, tmp_path, *records)
    assert not letters(tmp_path)
    end = turn_end(tokenizer())
    found = [(n, column, row) for n in ("sft", "preference", "labelled") for row in rows(plan, n, tmp_path)
             for column in ("completion_ids", "chosen_ids", "rejected_ids") if column in row]  # fmt: skip
    assert {(n, column) for n, column, _ in found} == {
        ("sft", "completion_ids"), ("labelled", "completion_ids"), ("preference", "chosen_ids"),
        ("preference", "rejected_ids"),
    }  # fmt: skip
    assert [row[column][-1] for _, column, row in found] == [end] * len(found)
    assert all(byte_tokenizer().eos_token_id not in row[column] for _, column, row in found)


def test_documents_end_with_eos_and_begin_by_the_tokenizers_own_rule(plan, tmp_path):
    run(plan, tmp_path, {"text": "abc"})
    [row] = rows(plan, "sft", tmp_path)
    # The byte tokenizer has a BOS, but puts none before a text: it opens turns.
    assert tokenizer().decode(row["prompt_ids"] + row["completion_ids"]) == "abc<|im_end|>"


def test_a_document_begins_with_bos_where_the_tokenizer_adds_one(plan, tmp_path):
    made = tokenizer()
    bos = made.bos_token
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, made.bos_token_id)]
    )
    adding = plan_of(tmp_path / "tokenizer", made, splits=("sft",))
    run(adding, tmp_path, {"text": "abc"})
    [row] = rows(adding, "sft", tmp_path)
    assert made.decode(row["prompt_ids"] + row["completion_ids"]) == f"{bos}abc<|im_end|>"


MESSAGES = "{% for m in messages %}<|im_start|>{{ m.role[0] }}\n{{ m.content }}"
HEADER = "{% endfor %}{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (MESSAGES + END + "\n" + HEADER, END),
        # What follows the end is never generated.
        (MESSAGES + END + "<|im_end|>" + HEADER, END),
        (MESSAGES + " " + END + HEADER, END),
        # No end of a turn: the header of the next one is none.
        (MESSAGES + "\n" + HEADER, "<|im_end|>"),
        ("{{ messages[0].content }}", "<|im_end|>"),
        ("{{ raise_exception('no roles') }}", "<|im_end|>"),
        (MESSAGES.replace("{{ m.content }}", "{{ m.content | trim }}{{ eos_token }}") + HEADER, "<|im_end|>"),
    ],
)
def test_the_end_is_what_the_template_writes_first_behind_the_answer(template, end):
    made = tokenizer(template)
    assert made.decode([turn_end(made)]) == end
    assert set(eos_ids(made, {"eos_token_id": 9})) == {9, made.eos_token_id, turn_end(made)}
    if "for m" in template:
        written = end in template or "eos_token" in template
        ids, mask = conversation_ids(made, [USER, BOT] * (1 + written))
        assert (ids[-1], mask[-1]) == (turn_end(made), 1)
        trained = [i for i, m in zip(ids, mask, strict=True) if m]
        assert {i for i in trained if i in control_ids(made)} == {turn_end(made)}


def test_without_template_and_eos_there_is_no_end():
    made = byte_tokenizer()
    made.chat_template = None
    assert turn_end(made) == made.eos_token_id
    made.eos_token = None
    assert turn_end(made) is None and eos_ids(made, {}) == ()
