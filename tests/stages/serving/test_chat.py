"""Conversations with a policy: an answer becomes part of the next prompt, and the oldest leave for the newest."""

import io

import jax
import pytest

from rlhf.stages.serving import chat
from rlhf.stages.serving.chat import plain
from rlhf.stages.serving.policy import Opened
from rlhf.stages.serving.settings import ChatOptions
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.requests import Request, Sampling
from tests.tuning.chat.templates import chat_prompt_ids

TOKENIZER = byte_tokenizer()
SYSTEM = [{"role": "system", "content": "Be brief."}]
OPTIONS = ChatOptions(temperature=0.8, max_tokens=24)


def said(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.slow
def test_answers_are_the_engines_and_become_part_of_the_next_prompt(monkeypatch, capsys):
    config = tiny(len(TOKENIZER))
    params = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, random_params(config, 3))
    stops = (TOKENIZER.eos_token_id,)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n" + "z" * 600 + "\ntwo\n"))
    chat.talk(Opened(None, config, TOKENIZER, stops, None, params), OPTIONS, "Be brief.")

    engine, turns, answers = Engine(config), [], []
    engine.load(params)
    for number, question in ((0, "one"), (2, "two")):
        turns.append({"role": "user", "content": question})
        prompt = chat_prompt_ids(TOKENIZER, [*SYSTEM, *turns])
        request = Request(prompt, OPTIONS.max_tokens, Sampling(OPTIONS.temperature), stops, counter=number)
        ((_, [completion]),) = engine.run([request])
        special = {*TOKENIZER.all_special_ids, *stops}
        answers.append(TOKENIZER.decode([t for t in completion.tokens if t not in special]))
        turns.append({"role": "assistant", "content": answers[-1]})
    told = capsys.readouterr()
    assert all(answers)
    assert told.out == "".join(f"{plain(answer)}\n" for answer in answers)
    assert told.err.count("ask less at once") == 1


def test_the_oldest_exchanges_leave_for_the_newest():
    turns = said("a" * 50, "b" * 50, "c" * 50, "d" * 50, "and now?")
    expected = chat_prompt_ids(TOKENIZER, [*SYSTEM, *turns[2:]])
    prompt, left_out = chat._fitting(TOKENIZER, SYSTEM, turns, len(expected))
    assert (prompt, left_out) == (expected, 2)
    assert [t["content"][:3] for t in turns] == ["ccc", "ddd", "and"]


def test_a_question_that_is_too_long_alone_changes_nothing():
    turns = said("a", "b", "c" * 100)
    assert chat._fitting(TOKENIZER, SYSTEM, turns, 60) == (None, 0)
    assert len(turns) == 3


def test_escape_sequences_of_a_model_reach_no_terminal():
    assert plain("\x1b]0;title\x07 \x1b[2J\x9b1m\r\u202eabc\ttab\nline") == (
        "\ufffd]0;title\ufffd \ufffd[2J\ufffd1m\ufffd\ufffdabc\ttab\nline"
    )
