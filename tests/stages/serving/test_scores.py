"""Prompts that are echoed have the trainer's log-probabilities, in the form that lm-evaluation-harness reads."""

import json
import os
import shutil
import subprocess

import httpx
import numpy as np
import pytest

from rlhf.tuning.device import Compute
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.training.completions import token_logps
from tests.stages.serving.support import CONFIG, STOPS, TOKENIZER, ids

LM_EVAL = shutil.which("lm_eval")
# More tokens than a chunk of the engine has, which is 32.
TEXT = "The quick brown fox jumps over 13 lazy dogs, naïvely."


def asked(url, **fields):
    answer = httpx.post(f"{url}/v1/completions", json={"model": "tiny", **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("prompt", [TEXT, ids(TEXT), [TEXT, "ab"], [ids("ab"), ids(TEXT)]])
def test_an_echo_has_the_trainers_log_probabilities(url, params, prompt):
    answer = asked(url, prompt=prompt, echo=True, max_tokens=0, logprobs=2)
    given = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    texts = [text if isinstance(text, str) else TOKENIZER.decode(text) for text in given]
    for choice, text in zip(answer["choices"], texts, strict=True):
        tokens, found = ids(text), choice["logprobs"]
        [expected] = token_logps(CONFIG, params, [(tokens[:1], tokens[1:])], 1.0, Compute(), 256)
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        np.testing.assert_allclose(found["token_logprobs"][1:], expected, atol=1e-5)
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert len(found["tokens"]) == len(found["text_offset"]) == len(tokens)
        assert all(len(best) == 2 for best in found["top_logprobs"][1:])
    count = sum(len(ids(text)) for text in texts)
    assert answer["usage"] == {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count}


def test_an_echo_goes_on_with_the_answer(url):
    plain = asked(url, prompt=TEXT, max_tokens=5, logprobs=1, temperature=0)["choices"][0]
    echo = asked(url, prompt=TEXT, max_tokens=5, logprobs=1, temperature=0, echo=True)["choices"][0]
    assert echo["text"] == TEXT + plain["text"]
    count = len(ids(TEXT))
    assert echo["logprobs"]["token_logprobs"][count:] == plain["logprobs"]["token_logprobs"]
    assert echo["logprobs"]["tokens"][count:] == plain["logprobs"]["tokens"]
    at = echo["logprobs"]["text_offset"]
    assert [TEXT[i : i + 5] for i in at[:20:5]] == ["The q", "uick ", "brown", " fox "]


def test_a_harness_finds_sums_and_greedy_continuations(url):
    """As lm-evaluation-harness 0.4 reads the answers of `local-completions`: behind the context, without the last
    token, which was sampled; a continuation is greedy where each token is the most probable one."""
    context, greedy = ids("ab"), asked(url, prompt="ab", max_tokens=4, temperature=0, return_token_ids=True)
    sampled = [token for token in greedy["choices"][0]["token_ids"] if token not in STOPS]
    for continuation, is_greedy in ((sampled, True), ([*sampled[:-1], 7], False)):
        payload = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
        [choice] = asked(url, echo=True, prompt=[[*context, *continuation]], **payload)["choices"]
        logps = choice["logprobs"]["token_logprobs"][len(context) : -1]
        best = choice["logprobs"]["top_logprobs"][len(context) : -1]
        assert len(logps) == len(continuation)
        assert all(logp == max(top.values()) for logp, top in zip(logps, best, strict=True)) is is_greedy


@pytest.mark.slow
@pytest.mark.skipif(LM_EVAL is None, reason="lm_eval is not on the path")
def test_lm_evaluation_harness_has_the_trainers_numbers(url, params, tmp_path):
    """The harness itself, on a task in a local file: sums of log-probabilities, and accuracy."""
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    docs = [{"question": f"{n}+1=", "choices": [str(n + 1), "no", "It is"], "answer": n % 3} for n in range(3)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    task = {
        "task": "letters",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    # JSON is YAML.
    (tmp_path / "letters.yaml").write_text(json.dumps(task))
    model = f"model=tiny,base_url={url}/v1/completions,tokenizer={tmp_path}/tokenizer,max_length=200"
    words = ["--model", "local-completions", "--model_args", model, "--tasks", "letters", "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline
    command = [LM_EVAL, *words, "--include_path", tmp_path, "--output_path", tmp_path / "out"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [samples] = (tmp_path / "out").rglob("samples_letters*.jsonl")
    pairs = [(ids(doc["question"]), ids(choice)) for doc in docs for choice in doc["choices"]]
    expected = [sum(logps) for logps in token_logps(CONFIG, params, pairs, 1.0, Compute(), 256)]
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    found = [float(answer[0]) for row in rows for answer in row["filtered_resps"]]
    np.testing.assert_allclose(found, expected, atol=1e-3)
    best = np.asarray(expected).reshape(3, 3).argmax(axis=1)
    assert [row["acc"] for row in rows] == [float(best[n] == n % 3) for n in range(3)]


def test_scores_disturb_no_request_and_none_disturbs_them(live, params):
    from rlhf.tuning.rollout.requests import Request

    alone = live.submit(Request(ids("one"), 30, seed=4)).result()[0]
    score, _ = live.score(ids(TEXT))
    stream = live.submit(Request(ids("one"), 30, seed=4))
    stream.next()
    assert live.score(ids(TEXT)) == (score, 0)
    assert stream.result()[0].tokens == alone.tokens
    # An engine of its own, with another size of chunks.
    engine = Engine(CONFIG, limits=Limits(slots=1, context=100, chunks=(64,)), top=5)
    engine.load(params)
    np.testing.assert_allclose(engine.score(ids(TEXT)).logps, score.logps, atol=1e-5)
