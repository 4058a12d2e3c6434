"""Built-in reward functions."""

import pytest

from tuning.rewards import functions as f


def test_exact_match_is_exact_but_for_surrounding_space():
    assert f.exact_match(["p"] * 4, ["12", " 12\n", "12.", "x"], answer=["12", "12", "12", None]) == [
        1.0,
        1.0,
        0.0,
        None,
    ]


def test_number_match_reads_the_last_number():
    assert f.number_match(["p"] * 3, ["so 3 + 4 = 7.", "1,200", "none"], answer=["7", "1200", "1"]) == [1.0, 1.0, 0.0]


def test_token_share_counts_tokens():
    assert f.token_share(["p"], ["x"], completion_ids=[[5, 5, 1, 2]], token=5) == [0.5]


def test_length_penalty_starts_at_the_limit():
    assert f.length_at_most(["p"] * 2, ["", ""], completion_ids=[[1] * 4, [1] * 6], tokens=4) == [0.0, -0.5]


def test_reasoning_gym_scores_its_own_tasks():
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)[0]
    meta = {"task": "chain_sum", "entry": entry}
    assert f.reasoning_gym_score(["q", "q"], [entry["answer"], "wrong"], metadata=[meta, meta])[0] == 1.0


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ValueError, match="no reward function 'exact_mach'; there are exact_match"):
        f.find("exact_mach")
    with pytest.raises(ValueError, match="no_such_module"):
        f.find("no_such_module:f")
