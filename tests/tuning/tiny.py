"""A model that compiles in seconds, and ragged groups of completions for it: what tests of the core share."""

import numpy as np

from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.training.batch import Group

CONFIG = tiny(97)
PARAMS = random_params(CONFIG, 3)


def ragged_groups(seed: int = 0, count: int = 6) -> list[Group]:
    """Prompts of 3 to 19 tokens, each with 1 to 4 completions of 1 to 8 tokens."""
    rng = np.random.default_rng(seed)
    groups, number = [], 0
    for _ in range(count):
        prompt = rng.integers(0, 97, rng.integers(3, 20)).tolist()
        completions = [rng.integers(0, 97, rng.integers(1, 9)).tolist() for _ in range(rng.integers(1, 5))]
        groups.append(Group(prompt, completions, list(range(number, number + len(completions)))))
        number += len(completions)
    return groups
