"""The scored rollouts of a round as arrays, and how they fall into optimizer steps.

Axes: N completions of the round, T completion tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import numpy as np

from tuning.losses.masks import sampled_mask
from tuning.rows import CompletionRow, ScoreRow, names_of, numbers_of_groups
from tuning.shapes import bucket
from tuning.training.batch import Group


@dataclasses.dataclass(frozen=True)
class RoundData:
    """The rollouts of a round with their totals, in table order."""

    prompts: list[list[int]]
    """Tokens of the prompt of each completion, [N] lists."""
    completions: list[list[int]]
    """Tokens of each completion, [N] lists."""
    mu: list[list[float]]
    """Log-probabilities of the sampler for these tokens, [N] lists."""
    groups_N: np.ndarray
    """Number of the completion's place: a prompt that is drawn twice is two groups (R21)."""
    totals_N: np.ndarray
    """Reward, float32; NaN where a reward failed."""
    valid_N: np.ndarray
    """False where a reward failed."""
    truncated_N: np.ndarray
    """Whether the completion was truncated by max_tokens."""
    greedy_N: np.ndarray | None = None
    """Reward of the greedy completion of the same place; NaN where there is none."""

    @classmethod
    def from_rows(
        cls,
        rollouts: Sequence[CompletionRow],
        scores: Sequence[ScoreRow],
        greedy: Sequence[ScoreRow] | None = None,
    ) -> RoundData:
        """From the rows of the rollout and score tables; a completion whose reward failed is not valid.

        greedy: the scores of one greedy completion of each place. Raises ValueError where the two tables do not list
        the same completions in the same order, or one twice.
        """
        names = names_of(rollouts)
        if names != names_of(scores) or len(set(names)) != len(names):
            raise ValueError(
                "rollouts and scores must list the same completions (place, sample), each once, in one order"
            )
        totals_N = _totals(scores)
        greedy_N = None
        if greedy is not None:
            # The greedy table has one row a place, the rollout table one a completion.
            of_place = dict(zip([score.place for score in greedy], _totals(greedy), strict=True))
            greedy_N = np.asarray([of_place.get(row.place, np.nan) for row in rollouts], np.float32)
        return cls(
            prompts=[row.prompt_ids for row in rollouts],
            completions=[row.token_ids for row in rollouts],
            mu=[row.logprobs for row in rollouts],
            groups_N=np.asarray(numbers_of_groups(rollouts)),
            totals_N=totals_N,
            valid_N=np.isfinite(totals_N),
            truncated_N=np.asarray([row.stop == "length" for row in rollouts]),
            greedy_N=greedy_N,
        )

    @functools.cached_property
    def mu_NT(self) -> np.ndarray:
        """The sampler's log-probabilities, [N, T] with T of few sizes; 0 past the end."""
        # Bucketed, so that a round with another longest completion uses the same programs.
        out = np.zeros((len(self.mu), bucket(max(len(c) for c in self.completions))), np.float32)
        for i, logps in enumerate(self.mu):
            out[i, : len(logps)] = logps
        return out

    @functools.cached_property
    def mask_NT(self) -> np.ndarray:
        """1 on tokens whose sampler log-probability is finite, [N, T].

        Other tokens count neither in the loss nor in its denominator (R5).
        """
        lengths = np.asarray([len(c) for c in self.completions])
        return sampled_mask(lengths, self.mu_NT)

    def steps(self, keep_N: np.ndarray, prompts_per_step: int) -> list[list[Group]]:
        """Kept completions as groups, at most `prompts_per_step` of them a step, in table order.

        Steps are even: a last step of few groups would move the weights as far, on little evidence.
        """
        members: dict[int, list[int]] = {}
        for i in np.flatnonzero(keep_N):
            members.setdefault(int(self.groups_N[i]), []).append(int(i))
        groups = [self._group(m) for m in members.values()]
        # Rounded up. 9 groups in 2 steps become 4 + 5, not 8 + 1.
        count = -(-len(groups) // prompts_per_step)
        bounds = [len(groups) * i // count for i in range(count + 1)] if count else []
        return [groups[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]

    def _group(self, members: list[int]) -> Group:
        """The completions `members` of one prompt, with masks only where a token is left out."""
        completions = [self.completions[i] for i in members]
        masks = [
            self.mask_NT[i, : len(tokens)].astype(int).tolist() for i, tokens in zip(members, completions, strict=True)
        ]
        complete = all(all(mask) for mask in masks)
        return Group(self.prompts[members[0]], completions, members, None if complete else masks)


def _totals(scores: Iterable[ScoreRow]) -> np.ndarray:
    return np.asarray([np.nan if score.total is None else score.total for score in scores], np.float32)
