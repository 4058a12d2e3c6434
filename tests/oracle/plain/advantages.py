"""Advantages of a round, in loops over groups. A `Sample` is a completion that counts: failed ones are not here (R24).

Rewards of tokens are [tokens]; the last one holds the score (R12).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

LEAST_SPREAD = 1e-6
"""Groups whose rewards span less than this are ties (R9)."""


@dataclasses.dataclass
class Sample:
    """A completion, as far as advantages are concerned."""

    group: int
    total: float
    penalty: np.ndarray
    """Weighted KL to the reference of each token; zeros without one."""
    in_loss: bool = True
    """False where the reward alone counts, in the baseline of its group."""
    greedy: float = math.nan
    """Reward of the greedy completion of the prompt."""
    values: np.ndarray | None = None
    """Of the states in which the tokens were chosen."""
    after: float = 0.0
    """Value behind the last token where the completion goes on there."""
    turns: list[int] | None = None
    """Of a trajectory, the turn of each token."""
    earned: dict[int, float] = dataclasses.field(default_factory=dict)
    """What of the total each turn has earned by itself."""
    states: list[str | None] = dataclasses.field(default_factory=list)
    """In which each turn was chosen."""

    @property
    def ends(self) -> list[int]:
        """The last token of each turn that has one, in order."""
        own = self.turns or []
        return [t for t in range(len(own)) if t + 1 == len(own) or own[t + 1] != own[t]]

    @property
    def reward(self) -> float:
        """Of the completion as one action."""
        return self.total - float(self.penalty.sum())

    @property
    def rewards(self) -> np.ndarray:
        """Token by token."""
        found, left = -self.penalty, self.total
        for end in self.ends if self.earned else []:
            assert self.turns is not None
            found[end] += self.earned[self.turns[end]]
            left -= self.earned[self.turns[end]]
        if len(found):
            found[-1] += left
        return found


def groups_of(samples: Sequence[Sample]) -> dict[int, list[int]]:
    """Numbers of the samples by group."""
    found: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        found.setdefault(sample.group, []).append(i)
    return found


def tied(rewards: Sequence[float]) -> bool:
    """Whether a group of these rewards carries no signal (R9)."""
    return len(rewards) < 2 or max(rewards) - min(rewards) < LEAST_SPREAD


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation; 0 for fewer than two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def whitened(rows: Sequence[np.ndarray], samples: Sequence[Sample]) -> list[np.ndarray]:
    """Tokens of all rows, those that are trained on with mean 0 and variance 1."""
    every = np.concatenate([np.zeros(0), *(row for row, s in zip(rows, samples, strict=True) if s.in_loss)])
    if not len(every):
        return list(rows)
    variance = float(np.var(every, ddof=1)) if len(every) > 1 else 0.0
    return [(row - every.mean()) / math.sqrt(variance + 1e-8) for row in rows]


def to_go(rewards: np.ndarray) -> np.ndarray:
    """The sum of the rewards from each token on."""
    return np.cumsum(rewards[::-1])[::-1].copy()


def of_completions(settings: Any, samples: Sequence[Sample]) -> list[float]:
    """One advantage a completion, by the algorithms whose baseline is the group's."""
    found = [0.0] * len(samples)
    every = [s.reward for s in samples]
    groups = [[every[i] for i in members] for members in groups_of(samples).values()]
    settings = {**settings, "taught": sum(len(group) for group in groups if not tied(group))}
    for members in groups_of(samples).values():
        rewards = [samples[i].reward for i in members]
        if tied(rewards):
            continue
        for i, a in zip(members, _of_group(settings, rewards, [samples[i] for i in members], every), strict=True):
            found[i] = a
    return found


def _of_group(settings: Any, r: list[float], members: Sequence[Sample], every: Sequence[float]) -> list[float]:
    n, mean = len(r), sum(r) / len(r)
    match settings["algorithm"]:
        case "rloo":
            return [x - (sum(r) - x) / (n - 1) for x in r]
        case "opo":
            lengths = [len(s.penalty) for s in members]
            base = sum(a * b for a, b in zip(lengths, r, strict=True)) / max(sum(lengths), 1)
            return [x - base for x in r]
        case "gpg":
            # Chu et al., arXiv:2504.02546: alpha makes up for the groups without a gradient that count.
            alpha = len(every) / settings["taught"] if settings["tied_groups"] == "count" else 1.0
            return [(x - mean) * alpha for x in r]
        case "pass-at-k":
            first, second = sorted(r, reverse=True)[:2]
            return [(first - second) / (deviation(r) + 1e-6) if x == first else 0.0 for x in r]
        case "reinforce-pp-baseline":
            return [x - mean for x in r]
    scale = {"std": deviation(r), "batch-std": deviation(every)}
    if settings["normalisation"] == "none":
        return [x - mean for x in r]
    return [(x - mean) / (scale[settings["normalisation"]] + 1e-4) for x in r]


def of_tokens(settings: Any, samples: Sequence[Sample]) -> list[np.ndarray]:
    """The advantage of each token of each sample."""
    match settings["algorithm"]:
        case "reinforce-pp":
            # Hu et al., arXiv:2501.03262.
            return whitened([to_go(s.rewards) for s in samples], samples)
        case "remax":
            # Li et al., arXiv:2310.10505.
            return [to_go(s.rewards) - s.greedy for s in samples]
        case "gigpo":
            return gigpo(settings, samples)
    rows = [np.full(len(s.penalty), a) for s, a in zip(samples, of_completions(settings, samples), strict=True)]
    return whitened(rows, samples) if settings["algorithm"] == "reinforce-pp-baseline" else rows


def gigpo(settings: Any, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Feng et al., arXiv:2505.10978: of episodes, and of turns against those that began in the same state."""
    returns: dict[tuple[int, int], float] = {}
    met: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for i, sample in enumerate(samples):
        assert sample.turns is not None
        later = 0.0
        numbers = [sample.turns[end] for end in sample.ends]
        for u in reversed(range(max(numbers, default=-1) + 1)):
            own = sum(r for r, turn in zip(sample.rewards, sample.turns, strict=True) if turn == u)
            later = float(own) + settings["step_gamma"] * later
            returns[i, u] = later
        for u in numbers:
            if (state := sample.states[u]) is not None:
                met.setdefault((sample.group, state), []).append((i, u))
    of_turn = dict.fromkeys(returns, 0.0)
    for members in met.values():
        r = [returns[m] for m in members]
        if not tied(r):
            of_turn |= dict(zip(members, _of_group(settings, r, [], []), strict=True))
    # The authors' code has one score a step (`compute_mean_std_cross_steps`).
    steps = [i for i, sample in enumerate(samples) for _ in sample.ends]
    episodes = dict(zip(steps, of_completions(settings, [samples[i] for i in steps]), strict=True))
    found = []
    for i, sample in enumerate(samples):
        of_tokens = [of_turn[i, u] for u in sample.turns or []]
        found.append(episodes.get(i, 0.0) + settings["step_advantage_w"] * np.asarray(of_tokens, np.float64))
    return found


def over_turns(
    settings: Any, samples: Sequence[Sample], rewards: Sequence[np.ndarray], lam: float | None
) -> list[np.ndarray]:
    """Rewards of tokens where the last one of each turn has the return of its turn (VAGEN, RAGEN)."""
    gamma = settings["high_level_gamma"]
    own = settings["lam"] if settings["high_level_lam"] is None else settings["high_level_lam"]
    lam, found = own if lam is None else lam, []
    for sample, of_tokens in zip(samples, rewards, strict=True):
        assert sample.values is not None
        r, following, a = of_tokens.copy(), sample.after, 0.0
        for end in reversed(sample.ends):
            a = r[end] + gamma * following - sample.values[end] + gamma * lam * a
            following = sample.values[end]
            r[end] = a + following
        found.append(r)
    return found


def gae(settings: Any, samples: Sequence[Sample], lam: float | None) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Raw advantages by Schulman et al., arXiv:1506.02438, and returns. `settings`: of the critic; `lam`:
    in place of its own ones."""
    by_turn = settings["bi_level_gae"]
    rewards = [s.rewards for s in samples]
    if settings["whiten_rewards"]:
        # Scaled, not shifted (Ziegler et al., arXiv:1909.08593).
        every = np.concatenate(rewards)
        spread = math.sqrt((float(np.var(every, ddof=1)) if len(every) > 1 else 0.0) + 1e-8)
        rewards = [(r - every.mean()) / spread + every.mean() for r in rewards]
    if by_turn:
        rewards = over_turns(settings, samples, rewards, lam)
    lam = settings["lam"] if lam is None else lam
    advantages, returns = [], []
    for sample, r in zip(samples, rewards, strict=True):
        assert sample.values is not None
        following, a, found = sample.after, 0.0, np.zeros(len(r))
        for t in reversed(range(len(r))):
            if by_turn and t in sample.ends:
                following, a = 0.0, 0.0
            delta = r[t] + settings["gamma"] * following - sample.values[t]
            a = delta + settings["gamma"] * lam * a
            found[t], following = a, sample.values[t]
        advantages.append(found)
        returns.append(found + sample.values)
    return advantages, returns
