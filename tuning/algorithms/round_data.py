"""The scored rollouts of a round as arrays, and how they fall into optimizer steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tuning.shapes import bucket
from tuning.training.batch import Group


@dataclasses.dataclass(frozen=True)
class RoundData:
    """The rollouts of a round with their totals, in table order."""

    prompts: list[list[int]]
    completions: list[list[int]]
    mu: list[list[float]]
    groups_N: np.ndarray
    totals_N: np.ndarray
    valid_N: np.ndarray
    truncated_N: np.ndarray
    greedy_N: np.ndarray | None = None

    @classmethod
    def from_rows(
        cls,
        rollouts: Sequence[dict[str, Any]],
        scores: Sequence[dict[str, Any]],
        greedy: Sequence[dict[str, Any]] | None = None,
    ) -> RoundData:
        """From the rows of the rollout and score tables; a completion whose reward failed is not valid.

        `greedy`: the score rows of one greedy completion of each prompt.
        """
        numbers: dict[str, int] = {}
        groups = [numbers.setdefault(r["prompt_id"], len(numbers)) for r in rollouts]
        totals = _totals(scores)
        baseline = None
        if greedy is not None:
            found = dict(zip([s["prompt_id"] for s in greedy], _totals(greedy), strict=True))
            baseline = np.asarray([found.get(r["prompt_id"], np.nan) for r in rollouts], np.float32)
        return cls(
            prompts=[r["prompt_ids"] for r in rollouts],
            completions=[r["token_ids"] for r in rollouts],
            mu=[r["logprobs"] for r in rollouts],
            groups_N=np.asarray(groups),
            totals_N=totals,
            valid_N=np.isfinite(totals),
            truncated_N=np.asarray([r.get("stop") == "length" for r in rollouts]),
            greedy_N=baseline,
        )

    @functools.cached_property
    def mu_NT(self) -> np.ndarray:
        """The sampler's log-probabilities, [N, T] with T of few sizes; 0 past the end."""
        out = np.zeros((len(self.mu), bucket(max(len(c) for c in self.completions))), np.float32)
        for i, logps in enumerate(self.mu):
            out[i, : len(logps)] = logps
        return out

    @functools.cached_property
    def mask_NT(self) -> np.ndarray:
        """1 on tokens whose sampler log-probability is finite: another leaves numerator and denominator (R5)."""
        lengths = np.asarray([len(c) for c in self.completions])
        return (np.arange(self.mu_NT.shape[1]) < lengths[:, None]) & np.isfinite(self.mu_NT)

    def steps(self, keep_N: np.ndarray, prompts_per_step: int) -> list[list[Group]]:
        """Kept completions as groups, at most `prompts_per_step` of them a step, in table order.

        Steps are even: a last step of few groups would move the weights as far, on little evidence.
        """
        members: dict[int, list[int]] = {}
        for i in np.flatnonzero(keep_N):
            members.setdefault(int(self.groups_N[i]), []).append(int(i))
        groups = [self._group(m) for m in members.values()]
        count = -(-len(groups) // prompts_per_step)
        bounds = [len(groups) * i // count for i in range(count + 1)] if count else []
        return [groups[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]

    def _group(self, members: list[int]) -> Group:
        lengths = [len(self.completions[i]) for i in members]
        masks = [self.mask_NT[i, :n].astype(int).tolist() for i, n in zip(members, lengths, strict=True)]
        whole = all(sum(m) == n for m, n in zip(masks, lengths, strict=True))
        texts = [self.completions[i] for i in members]
        return Group(self.prompts[members[0]], texts, members, None if whole else masks)


def _totals(scores: Iterable[dict[str, Any]]) -> np.ndarray:
    return np.asarray([np.nan if s["total"] is None else s["total"] for s in scores], np.float32)
