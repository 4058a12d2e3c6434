"""The scored rollouts of a round as arrays, and how they fall into optimizer steps.

A trajectory of several turns is one completion, whatever rows it became: its tokens are those of its parts, one after
another, with NaN for the sampler's log-probability on what nobody sampled (R27).

Axes: N completions of the round, T completion tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf.tuning.agents.rows import TurnRow
from rlhf.tuning.algorithms.flat import Column
from rlhf.tuning.algorithms.turns import Turns
from rlhf.tuning.losses.aggregate import Counts
from rlhf.tuning.losses.masks import sampled_mask
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.rows import CompletionRow, ScoreRow, by_trajectory, names_of, numbers_of_groups
from rlhf.tuning.shapes import bucket
from rlhf.tuning.training.batch import Group

OfTokens = Any
"""An array with a number for each token, which a `Group` takes as a sequence."""


class Part(NamedTuple):
    """A stretch of a trajectory that has its own context."""

    prompt: OfTokens
    start: int
    """Tokens of the trajectory before it."""
    length: int


@dataclasses.dataclass(frozen=True)
class Division:
    """The completions of a loss in optimizer steps."""

    packed_N: np.ndarray
    """Those that micro-batches have, [N] bool."""
    groups: list[list[Group]]
    """The same, as groups of equal prompts, of each step."""
    unpacked: list[Counts]
    """Counts of the others of each step."""


@dataclasses.dataclass(frozen=True)
class RoundData:
    """The rollouts of a round with their totals, in table order."""

    prompts: Sequence[OfTokens]
    """Tokens of the prompt of each completion, [N] arrays of int32; of a trajectory, its first context."""
    completions: Sequence[OfTokens]
    """Tokens of each completion, [N] arrays of int32."""
    mu: Sequence[OfTokens]
    """Log-probabilities of the sampler for these tokens, [N] arrays of float32."""
    groups_N: np.ndarray
    """Number of the completion's place: a prompt that is drawn twice is two groups (R21)."""
    totals_N: np.ndarray
    """Reward, float32; NaN where a reward failed."""
    valid_N: np.ndarray
    """False where a reward failed."""
    truncated_N: np.ndarray
    """Whether the completion was truncated by max_tokens, or a limit of its episode."""
    greedy_N: np.ndarray | None = None
    """Reward of the greedy completion of the same place; NaN where there is none."""
    parts: Mapping[int, Sequence[Part]] = dataclasses.field(default_factory=dict)
    """Of trajectories in several parts, by number of the completion."""
    turns: Turns | None = None
    """Where the rollouts are of an environment."""
    widest: int = 0
    """Tokens for which T is wide enough in any case."""
    experts: Sequence[np.ndarray] | None = None
    """To replay: for each completion the experts of all tokens of its prompt and its own but the last, [tokens, layers,
    X]; none are recorded of trajectories in several parts. None: the router chooses."""

    def __post_init__(self) -> None:
        # Of lists too; arrays of these types are not copied.
        for name, kind in {"prompts": np.int32, "completions": np.int32, "mu": np.float32}.items():
            object.__setattr__(self, name, [np.asarray(row, kind) for row in getattr(self, name)])
        for i, (tokens, mu) in enumerate(zip(self.completions, self.mu, strict=True)):
            if len(tokens) != len(mu):
                raise ValueError(
                    f"completion {i} of the round has {len(tokens)} tokens and {len(mu)} log-probabilities of the "
                    "sampler: expected one of each token"
                )

    @classmethod
    def from_rows(
        cls,
        rollouts: Sequence[CompletionRow],
        scores: Sequence[ScoreRow],
        greedy: Sequence[ScoreRow] | None = None,
        turns: Iterable[TurnRow] | None = None,
        widest: int = 0,
        replayed: DecoderConfig | None = None,
    ) -> RoundData:
        """From the rows of the rollout and score tables; a completion whose reward or episode failed is not valid.

        greedy: the scores of one greedy completion of each place. turns: those of the trajectories. replayed: a mixture
        that takes the recorded experts. Raises ValueError where the two tables do not list the same completions in the
        same order, or one twice, where turns are not in the trajectories, and where no experts are recorded.
        """
        trajectories = by_trajectory(rollouts)
        last = [rows[-1] for rows in trajectories]
        names = names_of(last)
        if names != names_of(scores):
            raise ValueError(
                "rollouts and scores must list the same completions (place, sample), each once, in one order"
            )
        totals_N = _totals(scores)
        greedy_N = None
        if greedy is not None:
            # The greedy table has one row a place, the rollout table one a completion.
            of_place = dict(zip([score.place for score in greedy], _totals(greedy), strict=True))
            greedy_N = np.asarray([of_place.get(row.place, np.nan) for row in last], np.float32)
        data = cls(
            prompts=[np.asarray(rows[0].prompt_ids, np.int32) for rows in trajectories],
            completions=[_joined([row.token_ids for row in rows], np.int32) for rows in trajectories],
            mu=[_joined([row.logprobs for row in rows], np.float32) for rows in trajectories],
            groups_N=np.asarray(numbers_of_groups(last)),
            totals_N=totals_N,
            valid_N=np.isfinite(totals_N) & np.asarray([row.stop != "failed" for row in last], bool),
            truncated_N=np.asarray([row.stop == "length" for row in last], bool),
            greedy_N=greedy_N,
            parts={i: _parts(rows) for i, rows in enumerate(trajectories) if len(rows) > 1},
            widest=widest,
            experts=None if replayed is None else [_experts(rows[0], replayed) for rows in trajectories],
        )
        if turns is None:
            return data
        return dataclasses.replace(data, turns=Turns.from_rows(turns, trajectories, data.width))

    @property
    def unfinished_N(self) -> np.ndarray:
        """Truncated completions after which the episode would have continued, [N] (Pardo et al., arXiv:1712.00378).

        A turn that its limit cut off may be the answer that ends the episode.
        """
        return self.truncated_N if self.turns is None else self.truncated_N & ~self.turns.ended_N

    @property
    def lengths_N(self) -> np.ndarray:
        """Tokens of each completion, [N]."""
        return np.asarray([len(c) for c in self.completions], np.int64)

    @property
    def width(self) -> int:
        """T, of few sizes: a round with another longest completion uses the same programs."""
        return bucket(max(self.widest, max(len(c) for c in self.completions)))

    def mask_of(self, i: int) -> np.ndarray:
        """True on the tokens of completion i whose sampler log-probability is finite.

        Other tokens count neither in the loss nor in its denominator (R5).
        """
        mu_T = self.mu[i]
        return sampled_mask(np.asarray([len(mu_T)]), mu_T[None])[0]

    @property
    def sampler(self) -> Column:
        """The sampler's log-probabilities."""
        return Column(self.mu.__getitem__, len(self.mu), self.width, np.dtype(np.float32))

    @property
    def sampled(self) -> Column:
        """`mask_of` every completion."""
        return Column(self.mask_of, len(self.mu), self.width, np.dtype(bool))

    def divided(self, keep_N: np.ndarray, computed_N: np.ndarray, prompts_per_step: int) -> Division:
        """Those kept in steps of at most `prompts_per_step` places, in table order; those outside `computed_N` add 0 to
        the loss and are in no micro-batch.

        Steps are even: a last step of few groups would move the weights as far, on little evidence.
        """
        places = self._by_place(np.flatnonzero(keep_N))
        # Rounded up. 9 groups in 2 steps become 4 + 5, not 8 + 1.
        count = -(-len(places) // prompts_per_step)
        bounds = [len(places) * i // count for i in range(count + 1)] if count else []
        steps = [[i for place in places[a:b] for i in place] for a, b in itertools.pairwise(bounds)]
        # A step of others alone is one of the optimizer all the same: a single completion stands for them.
        packed = [[i for i in ids if computed_N[i]] or ids[:1] for ids in steps]
        packed_N = np.isin(np.arange(len(keep_N)), [i for ids in packed for i in ids])
        rest = [[self.mask_of(i) for i in ids if not packed_N[i]] for ids in steps]
        groups = [[group for place in self._by_place(ids) for group in self._packed_together(place)] for ids in packed]
        unpacked = [Counts(sum(int(mask.sum()) for mask in masks), len(masks)) for masks in rest]
        return Division(packed_N, groups, unpacked)

    def _by_place(self, ids: Iterable[int]) -> list[list[int]]:
        members: dict[int, list[int]] = {}
        for i in ids:
            members.setdefault(int(self.groups_N[i]), []).append(int(i))
        return list(members.values())

    def check_pairs(self, algorithm: str) -> None:
        """Raise ValueError if completions of one place cannot be packed as a pair after one prompt."""
        first: dict[int, np.ndarray] = {}
        for i, prompt in enumerate(self.prompts):
            if i in self.parts or not np.array_equal(first.setdefault(int(self.groups_N[i]), prompt), prompt):
                raise ValueError(
                    f"algorithm {algorithm!r} compares two completions of one prompt, and those of group "
                    f"{int(self.groups_N[i])} of the round have other contexts: use an algorithm without pairs, or an "
                    "environment whose episodes of a task begin with one observation"
                )

    def _packed_together(self, members: list[int]) -> list[Group]:
        """The completions of a place, those of equal prompts together and each part of a trajectory by itself."""
        of_prompt: dict[bytes, list[int]] = {}
        for i in members:
            if i not in self.parts:
                of_prompt.setdefault(self.prompts[i].tobytes(), []).append(i)
        groups = []
        for same in of_prompt.values():
            masks: list[OfTokens] = [self.mask_of(i) for i in same]
            complete = all(mask.all() for mask in masks)
            completions = [self.completions[i] for i in same]
            experts = self.experts and [self.experts[i] for i in same]
            prompt = self.prompts[same[0]]
            groups.append(Group(prompt, completions, same, None if complete else masks, experts=experts))
        for i in members:
            for prompt, start, length in self.parts.get(i, ()):
                here = slice(start, start + length)
                mask: OfTokens = self.mask_of(i)[here]
                groups.append(Group(prompt, [self.completions[i][here]], [i], [mask], [start]))
        return groups


def _experts(row: CompletionRow, model: DecoderConfig) -> np.ndarray:
    """The recorded experts of a row."""
    shape = len(row.prompt_ids) + len(row.token_ids) - 1, model.num_layers, model.experts_per_token
    if row.stop == "failed":
        # It is not trained on.
        return np.zeros(shape, model.expert_type)
    known = np.frombuffer(row.routing or b"", model.expert_type)
    if known.size != math.prod(shape) or known.max(initial=0) >= model.num_experts:
        raise ValueError(
            f"the rollout of place {row.place}, sample {row.sample} names {known.size} experts, expected are "
            f"{math.prod(shape)} below {model.num_experts}: servers and agents' programs record none. Let the router "
            "choose (rl.update.routing: free), or sample in the worker"
        )
    return known.reshape(shape)


def _parts(rows: Sequence[CompletionRow]) -> list[Part]:
    """The parts of a trajectory in several rows; one without a token only where all are."""
    starts = np.cumsum([0, *(len(row.token_ids) for row in rows)])
    parts = [
        Part(np.asarray(row.prompt_ids, np.int32), int(start), len(row.token_ids))
        for row, start in zip(rows, starts, strict=False)
    ]
    return [part for part in parts if part.length] or parts[-1:]


def _joined(pieces: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    """Concatenate pieces of a row; a single array of this type is not copied."""
    arrays: list[np.ndarray] = [np.asarray(piece, dtype) for piece in pieces]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _totals(scores: Iterable[ScoreRow]) -> np.ndarray:
    return np.asarray([np.nan if score.total is None else score.total for score in scores], np.float32)
