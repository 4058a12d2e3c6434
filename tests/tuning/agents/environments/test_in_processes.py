"""Built-in environments are played in processes by their names, as they are played here."""

from rlhf.tuning.agents.contract import Spec, Task
from rlhf.tuning.agents.environments.guess import Guess
from rlhf.tuning.agents.processes import Environments


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
