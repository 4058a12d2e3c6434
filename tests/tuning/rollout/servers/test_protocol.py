"""What a server is asked, and which of its answers count: seeds of their own, and whole completions alone."""

import pytest

from rlhf.tuning.rollout.requests import Request
from rlhf.tuning.rollout.servers.kinds import KINDS
from rlhf.tuning.rollout.servers.protocol import ServerLost, sample_seed


def test_seeds_differ():
    seeds = {sample_seed(48, seed, counter) for seed in range(3) for counter in range(1000)}
    assert len(seeds) == 3000
    assert max(seeds) < 2**48


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": []}, "0 samples of 1"),
        ({"error": "x"}, "not a completion"),
        ({"choices": [{"index": 0, "token_ids": [1, 2], "logprobs": None}]}, "lacks token ids or log-probabilities"),
        ({"choices": [{"index": 0, "token_ids": [1], "logprobs": {"token_logprobs": [-0.1]}}]}, "after 1 of 3 tokens"),
        (
            {"choices": [{"index": 0, "token_ids": [1, 2, 9], "logprobs": {"token_logprobs": [-0.1, None, -1.0]}}]},
            "expected integers from 0 on",
        ),
        *(
            (
                {"choices": [{"index": 0, "token_ids": ids, "logprobs": {"token_logprobs": [-0.1] * 3}}]},
                "expected integers from 0 on",
            )
            for ids in (["a", "b", "c"], [5.5, 6, 9], [-5, 6, 9], [True, 6, 9], "abc", {"a": 1})
        ),
        *(
            ({"choices": [{"index": 0, "token_ids": [1, 2, 9], "logprobs": {"token_logprobs": logps}}]}, "at most 0")
            for logps in (["a", "b", "c"], "abc", [-1.0, 50.0, -1.0])
        ),
        *(
            ({"choices": choices}, "not a completion")
            for choices in (None, 1, [1], [{"index": 0, "token_ids": [9], "logprobs": [1]}])
        ),
        ([], "not a completion"),
        ("x", "not a completion"),
        (
            {"choices": [{"index": 0, "prompt_token_ids": [0, 5], "token_ids": [9], "logprobs": {}}]},
            "other token ids than the one sent",
        ),
    ],
)
def test_an_answer_that_is_not_whole_is_none(answer, message):
    with pytest.raises(ServerLost, match=message):
        KINDS["vllm"].completions(Request([5], 3, stop_ids=(9,)), answer)


@pytest.mark.parametrize("pair", [(-1.0, float("nan")), (-1.0, 5.5), (-1.0, "5"), ("-1", 5), (float("inf"), 5)])
def test_ids_and_numbers_of_sglang_are_taken_as_they_are(pair):
    answer = {"meta_info": {"output_token_logprobs": [[*pair, None]]}}
    with pytest.raises(ServerLost):
        KINDS["sglang"].completions(Request([5], 1), answer)
