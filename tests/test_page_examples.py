"""The functions of the guides compute what their docstrings say."""

from pathlib import Path

import numpy as np
import pytest

from rlhf.tuning.algorithms.algorithm import Objective, Scored
from rlhf.tuning.algorithms.algorithm import find as find_algorithm
from rlhf.tuning.algorithms.flat import Column
from rlhf.tuning.rewards.functions import find as find_reward
from tests.pages import blocks_of


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a Python file of a guide to an importable folder, and returns its module's name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(guide: str, file: str) -> str:
        [block] = [b for b in blocks_of(Path("docs/guides") / guide) if b.file == file]
        name = Path(file).stem
        (tmp_path / f"{name}.py").write_text(block.text)
        return name

    return write


def test_rewards(written):
    shortest = find_reward(f"{written('rewards.md', 'shortest.py')}:shortest")
    assert shortest(["?"] * 2, ["4", "so 4"], answer=["4", "4"]) == [1.0, 0.25]
    brevity = find_reward(f"{written('extend.md', 'brevity.py')}:brevity")
    assert brevity(["?"], ["ab"], completion_ids=[[7, 8]], tokens=8) == [0.75]


def test_the_algorithm_compares_with_the_mean_of_the_round(written):
    name = written("extend.md", "tuning/algorithms/round_mean.py")
    mask = Column(np.ones((4, 2)).__getitem__, 4, 2, np.dtype(float))
    penalty = Column.zeros(np.full(4, 2), 2, float)
    scored = Scored(np.array([1.0, 0.0, 0.0, 1.0]), np.array([0, 0, 1, 1]), np.ones(4, bool), mask, penalty)
    algorithm = find_algorithm(Objective(algorithm=f"{name}:algorithm"))
    assert np.asarray(algorithm.advantages(scored)).tolist() == [0.5, -0.5, -0.5, 0.5]
