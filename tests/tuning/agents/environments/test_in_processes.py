"""Built-in environments are played in processes by their names, as they are played here."""

import subprocess
import sys

import pytest

from rlhf.tuning.agents.adapters import built_in
from rlhf.tuning.agents.contract import Spec, Task
from rlhf.tuning.agents.environments import BUILT_IN
from rlhf.tuning.agents.environments.guess import Guess
from rlhf.tuning.agents.processes import Environments


def test_each_name_has_one_class_but_for_tools():
    for name, module in BUILT_IN.items():
        if module.ENVIRONMENT is None:
            with pytest.raises(ValueError, match="made of tools alone"):
                built_in(name)
        else:
            assert built_in(name) is module.ENVIRONMENT
    with pytest.raises(ValueError, match="guess"):
        built_in("gues")


def test_an_episode_in_a_process_is_the_one_here():
    here = Guess(high=15, guesses=2)
    with Environments(Spec("guess", {"high": 15, "guesses": 2})) as environments:
        for seed in (3, 4):
            environments.open(seed, Task(seed))
        found = {}
        while len(found) < 2:
            found.update(environments.poll(10.0))
        environments.step(4, "9")
        ((key, answer),) = environments.poll(10.0)
    observation, info = here.reset(seed=4)
    assert (found[4].observation, found[4].info) == (observation, info)
    assert key == 4
    assert (answer.observation, answer.reward, answer.terminated, answer.truncated, answer.info) == here.step("9")


def test_processes_of_environments_load_no_numeric_library():
    """They are forked, which threads do not survive; levels, computed elsewhere, load numpy."""
    program = (
        "import sys\nfrom rlhf.tuning.agents.environments import BUILT_IN\nassert all(BUILT_IN.values())\n"
        "print(*sorted({'jax', 'numpy', 'transformers', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
