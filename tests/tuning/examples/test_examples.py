"""The examples run as their headers say: rewards rise and losses fall."""

import subprocess
import sys

import pytest

from tuning.examples import rl_loop, sft


@pytest.mark.slow
def test_the_reward_of_the_rl_loop_rises():
    before, after = rl_loop.main()
    assert before < 0.05
    assert after > 0.5


def test_the_loss_of_sft_falls():
    losses = sft.main()
    assert losses[0] > 2
    assert losses[-1] < 0.1


@pytest.mark.parametrize("name", ["rl_loop", "sft"])
def test_an_example_is_short_and_loads_no_stage(name):
    module = {"rl_loop": rl_loop, "sft": sft}[name]
    with open(module.__file__) as f:
        assert len(f.readlines()) <= 100
    program = f"import sys, tuning.examples.{name}; print(*{{m.split('.')[0] for m in sys.modules}})"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert "tuning" in loaded and not {"stages", "flows"} & set(loaded)
