"""A round of RL: from the tables of rollouts and scores to the parameters after it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.oracle.plain import advantages, losses, order
from tests.oracle.plain.advantages import Sample
from tests.oracle.plain.model import Model, real
from tests.oracle.plain.optim import Optimizer
from tests.oracle.plain.tables import Row, name

UNGROUPED = ("reinforce-pp", "reinforce-pp-baseline", "remax", "ppo")
"""Algorithms whose baseline, or whose whitening, is not the group's: a group of equal rewards carries a signal."""
OF_ROUND = ("reinforce-pp", "ppo")
"""Those of them that hold a reward against all of the round; those of `WHITENED` divide by the round's spread."""
WHITENED = (*OF_ROUND, "reinforce-pp-baseline")


@dataclasses.dataclass
class Learner:
    """A model with its optimizer, through all rounds."""

    model: Model
    optimizer: Optimizer

    @classmethod
    def of(cls, module: Model, settings: Any) -> Learner:
        """With an optimizer that remembers nothing yet."""
        return cls(module, Optimizer(module.trained, settings))


@dataclasses.dataclass
class Coefficients:
    """Weights that a run adapts from round to round."""

    kl: float = 1.0
    """Factor on both weights of the KL."""
    entropy: float = 0.0
    bonus: bool = True
    """Whether the entropy bonus is in the loss."""


@dataclasses.dataclass
class Completion:
    """A row of the tables, and what becomes of it."""

    parts: list[tuple[list[int], list[int], list[int]]]
    """(prompt, tokens, places of the tokens that count: those of finite log mu, R5) of each row: of one, or of several
    where the contexts of a trajectory do not extend one another."""
    mu: Tensor
    group: int
    number: int
    """Among the samples of its place."""
    total: float | None
    truncated: bool
    fate: str = "trained"
    """`trained`, or why not."""
    counts: bool = True
    """Whether its reward is in statistics; always of those that are trained."""
    old: Tensor = dataclasses.field(default_factory=lambda: real([]))
    entropy: Tensor = dataclasses.field(default_factory=lambda: real([]))
    """Under the policy before the round."""
    ref: Tensor | None = None
    sample: Sample | None = None
    advantages: Tensor = dataclasses.field(default_factory=lambda: real([]))
    returns: Tensor = dataclasses.field(default_factory=lambda: real([]))
    turns: list[int] | None = None
    """Of a trajectory, the turn of each token that counts."""
    earned: list[float] = dataclasses.field(default_factory=list)
    """The environment's reward of each turn."""
    states: list[str | None] = dataclasses.field(default_factory=list)
    """In which each turn was chosen."""

    @classmethod
    def of(cls, row: Row) -> Completion:
        """From a joined row, or that of an episode."""
        parts, mu, turns = [], [], []
        for number, part in enumerate(row.get("parts", [row])):
            seen = [i for i, x in enumerate(part["logprobs"]) if math.isfinite(x)]
            parts.append((part["prompt_ids"], part["token_ids"], seen))
            mu += [part["logprobs"][i] for i in seen]
            own = [t for t in row.get("turns", []) if t["part"] == number]
            turns += [t["turn"] for i in seen for t in own if t["start"] <= i < t["start"] + len(t["token_ids"])]
        total = row["total"] if row["total"] is not None and math.isfinite(row["total"]) else None
        if row["stop"] == "failed":
            total = None
        found = cls(parts, real(mu), *name(row), total, row["stop"] == "length")
        if row.get("turns"):
            found.turns = turns
            found.earned, found.states = ([t[of] for t in row["turns"]] for of in ("reward", "state"))
        return found

    @property
    def count(self) -> int:
        """Tokens that count."""
        return sum(len(seen) for _, _, seen in self.parts)

    def logps(self, module: Model, temperature: float) -> tuple[Tensor, Tensor]:
        """log pi and entropies of the tokens that count."""
        logps, entropies = [real([])], [real([])]
        for prompt, tokens, seen in self.parts:
            if tokens:
                found, entropy = module.logps(prompt, tokens, temperature)
                logps.append(found[seen])
                entropies.append(entropy[seen])
        return torch.cat(logps), torch.cat(entropies)

    def values(self, module: Model) -> tuple[Tensor, Tensor]:
        """The critic's values of the tokens that count, and behind the last token."""
        found, after = [], real(0.0)
        for prompt, tokens, seen in self.parts:
            values, after = module.values(prompt, tokens)
            found.append(values[seen])
        return torch.cat(found), after


@dataclasses.dataclass
class Round:
    """A round in progress; `run` does all of it."""

    settings: Mapping[str, Any]
    completions: list[Completion]
    policy: Learner
    reference: Model | None = None
    critic: Learner | None = None
    coefficients: Coefficients = dataclasses.field(default_factory=Coefficients)
    greedy: Mapping[int, float | None] | None = None
    """Reward of the greedy completion, by place."""

    kl_sum: float = 0.0
    entropy_sum: float = 0.0
    tokens: int = 0

    def run(self) -> None:
        """Decides fates, takes what does not move from the policies as they are, and makes the steps."""
        self.leave_unless_usable()
        self.freeze()
        self.leave_ties()
        if self.critic is None and self.settings["algorithm"] != "online-dpo":
            samples = [c.sample for c in self.counted if c.sample is not None]
            self.take(self.counted, self.unless_noise(advantages.of_tokens(self.settings, samples)))
        steps = self.steps()
        if not steps:
            return
        if self.critic is not None:
            self.prepare_critic(steps)
        for _ in range(self.settings["epochs"]):
            for step in steps:
                if self.regularised or self.ties_count or not self.is_noise:
                    self.policy_step(step)
                if self.critic is not None:
                    self.critic_step(step)
        if self.is_noise and not self.regularised and not self.ties_count:
            # The critic alone has learned from them.
            self.leave(self.trained, "tied")

    @property
    def regularised(self) -> bool:
        """Whether KL or entropy have a weight in the loss."""
        s = self.settings
        return bool(s["kl_coef"] > 0 or s["entropy_coef"] > 0 or s["entropy_target"] is not None)

    @property
    def ties_count(self) -> bool:
        """Whether groups without an advantage stay in their steps and denominators, as in TRL and verl."""
        grouped = self.settings["algorithm"] not in (*UNGROUPED, "online-dpo")
        return grouped and self.settings["tied_groups"] == "count"

    @property
    def is_noise(self) -> bool:
        """Whether advantages are divided by a spread over a round in which the task tells nothing apart (R24)."""
        s, samples = self.settings, [c.sample for c in self.counted if c.sample is not None]
        if s["algorithm"] not in WHITENED and s["normalisation"] != "batch-std":
            return False
        if any(reward for sample in samples for reward in sample.earned.values()):
            return False
        if s["algorithm"] in OF_ROUND:
            return advantages.tied([sample.total for sample in samples])
        groups = advantages.groups_of(samples).values()
        return all(advantages.tied([samples[i].total for i in members]) for members in groups)

    def unless_noise(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Advantages, or zeros in their place."""
        return [0.0 * row for row in rows] if self.is_noise else list(rows)

    @property
    def trained(self) -> list[Completion]:
        """Those that are in the loss, in table order."""
        return [c for c in self.completions if c.fate == "trained"]

    @property
    def counted(self) -> list[Completion]:
        """Those that are in statistics: no other is (R24)."""
        return [c for c in self.completions if c.counts]

    def leave_unless_usable(self) -> None:
        """Failed rewards, groups of little variety and, where the settings mask them, completions that were cut off."""
        varied = self.most_varied()
        for c in self.completions:
            if c.fate != "trained":
                continue
            if c.total is None:
                c.fate, c.counts = "failed", False
            elif c.group not in varied:
                c.fate, c.counts = "filtered", False
            elif c.truncated and self.settings["truncated"] != "keep":
                c.fate, c.counts = "truncated", self.settings["truncated"] == "mask-loss"
            elif self.greedy is not None and not _finite(self.greedy.get(c.group)):
                c.fate, c.counts = "no baseline", False

    def most_varied(self) -> set[int]:
        """The groups that are trained on: all, or those whose totals deviate most (RAGEN, arXiv:2504.20073)."""
        spreads: dict[int, float] = {}
        masks = self.settings["truncated"] == "mask"
        for group in sorted({c.group for c in self.completions}):
            own = [c for c in self.completions if c.group == group and not (masks and c.truncated)]
            totals = [c.total for c in own if c.total is not None]
            spreads[group] = float(np.std(totals, ddof=1)) if len(totals) > 1 else -1.0
        share = self.settings["keep_most_varied"]
        count = len(spreads) if share is None else max(1, math.ceil(share * len(spreads) - 1e-9))
        return set(sorted(spreads, key=lambda group: -spreads[group])[:count])

    def earned(self, c: Completion) -> dict[int, float]:
        """What each turn has earned of the total by itself, where the settings give it to turns."""
        s = self.settings
        by_turn = s["algorithm"] in ("ppo", "gigpo") if s["credit"] == "auto" else s["credit"] == "turn"
        return {u: s["environment_weight"] * (r or 0.0) for u, r in enumerate(c.earned)} if by_turn else {}

    @torch.no_grad()
    def freeze(self) -> None:
        """log pi_old, log pi_ref, and from them the KL in the reward (R4, R8)."""
        s = self.settings
        for c in self.counted:
            c.old = c.mu if s["old_logps"] == "sampler" else c.logps(self.policy.model, s["temperature"])[0]
            if s["top_entropy"] is not None:
                c.entropy = c.logps(self.policy.model, s["temperature"])[1]
            if self.reference is not None:
                c.ref = c.logps(self.reference, s["temperature"])[0]
            penalty = real([0.0] * c.count)
            if s["kl_in_reward"] > 0:
                assert c.ref is not None
                estimate = losses.kl(c.old, c.ref, s["kl_in_reward_kind"], s["kl_clamp"])
                penalty = s["kl_in_reward"] * self.coefficients.kl * estimate
            assert c.total is not None
            c.sample = Sample(c.group, c.total, penalty.numpy(), c.fate == "trained")
            c.sample.turns, c.sample.earned, c.sample.states = c.turns, self.earned(c), c.states
            if self.greedy is not None:
                c.sample.greedy = float(self.greedy[c.group])  # type: ignore[arg-type]

    def leave_ties(self) -> None:
        """Groups whose whole rewards do not differ, the KL in them (R9, R24), unless KL or entropy ask for them.

        Of the others online-DPO keeps the best and the worst.
        """
        s = self.settings
        paired = s["algorithm"] == "online-dpo"
        stay = self.ties_count or (self.regularised and s["tied_groups"] == "count" and not paired)
        if self.is_noise and not stay and self.critic is None:
            self.leave(self.counted, "tied")
        if self.is_noise or s["algorithm"] in UNGROUPED:
            return
        for members in self.by_group().values():
            rewards = [c.sample.reward for c in members]  # type: ignore[union-attr]
            ties = advantages.tied(rewards)
            if s["algorithm"] == "gigpo":
                # The turns of a group that ties on the whole may differ.
                rows = advantages.gigpo(s, [c.sample for c in members])  # type: ignore[misc]
                ties = not any(row.any() for row in rows)
            if ties and not stay:
                self.leave(members, "tied")
            elif paired:
                pair = {rewards.index(max(rewards)), rewards.index(min(rewards))}
                self.leave([c for i, c in enumerate(members) if i not in pair], "unchosen")

    def by_group(self) -> dict[int, list[Completion]]:
        """Those that count, by group."""
        found: dict[int, list[Completion]] = {}
        for c in self.counted:
            found.setdefault(c.group, []).append(c)
        return found

    def leave(self, members: Sequence[Completion], fate: str) -> None:
        """Takes completions that count out of the loss."""
        for c in members:
            assert c.sample is not None
            c.fate, c.sample.in_loss = (fate if c.fate == "trained" else c.fate), False

    def take(self, whose: Sequence[Completion], rows: Sequence[np.ndarray]) -> None:
        """Their advantages."""
        for c, row in zip(whose, rows, strict=True):
            c.advantages = torch.from_numpy(np.ascontiguousarray(row))

    def steps(self) -> list[list[Completion]]:
        """The completions of each optimizer step: whole groups, in the order of the table."""
        numbers = list(dict.fromkeys(c.group for c in self.trained))
        found = order.even(numbers, self.settings["prompts_per_step"])
        return [[c for c in self.trained if c.group in set(step)] for step in found]

    def policy_step(self, step: Sequence[Completion]) -> None:
        """One step down the whole loss: surrogate, KL and entropy, each over the counts of the step (R1)."""
        s, tokens = self.settings, sum(c.count for c in step)
        total, marked = real(0.0), self.marked(step)
        for c in step:
            if not c.count:
                continue
            logps, entropy = c.logps(self.policy.model, s["temperature"])

            def share(x: Tensor) -> Tensor:
                return losses.share(x, s, tokens, len(step))

            if s["algorithm"] != "online-dpo":
                surrogate = losses.surrogate(s, logps, c.old, c.advantages)
                if s["algorithm"] == "clip-cov":
                    surrogate = surrogate * (1 - marked[id(c)])
                if s["algorithm"] == "kl-cov":
                    # A ratio that differs from 1 by rounding alone has no sign.
                    far = ((logps - c.old).abs() > 1e-5).to(logps.dtype)
                    surrogate = surrogate + marked[id(c)] * far * (logps - c.old).abs()
                if s["top_entropy"] is not None:
                    surrogate = surrogate * self.top(step)[id(c)]
                total = total + share(surrogate * losses.correction(s, c.old, c.mu))
            if c.ref is not None:
                kl = losses.kl(logps, c.ref, s["kl_kind"], s["kl_clamp"])
                self.kl_sum += float(kl.detach().sum())
                if s["kl_coef"] > 0:
                    total = total + s["kl_coef"] * self.coefficients.kl * share(kl)
            self.entropy_sum += float(entropy.detach().sum())
            if s["entropy_coef"] > 0 or s["entropy_target"] is not None:
                total = total - self.coefficients.bonus * self.coefficients.entropy * share(entropy)
        if s["algorithm"] == "online-dpo":
            total = total + self.pairs(step)
        self.tokens += tokens
        self.policy.optimizer.step(total)

    def marked(self, step: Sequence[Completion]) -> dict[int, Tensor]:
        """Cui et al., arXiv:2505.22617: 1 on the tokens that clip-cov and kl-cov choose, by completion."""
        name, counts = self.settings["algorithm"], [c.count for c in step]
        if name not in ("clip-cov", "kl-cov"):
            return {}
        a, logps = (torch.cat([getattr(c, of) for c in step]).numpy() for of in ("advantages", "old"))
        cov, found = (a - a.mean()) * (logps - logps.mean()), np.zeros(len(a))
        if name == "kl-cov":
            found[np.argsort(-cov, kind="stable")[: max(1, int(0.002 * len(a)))]] = 1
        else:
            eligible = np.flatnonzero((cov > 1) & (cov < 5))
            found[np.random.default_rng(len(a)).permutation(eligible)[: max(1, int(0.0002 * len(a)))]] = 1
        return {id(c): part for c, part in zip(step, torch.split(torch.from_numpy(found), counts), strict=True)}

    def top(self, step: Sequence[Completion]) -> dict[int, Tensor]:
        """Wang et al., arXiv:2506.01939: 1 on the step's tokens of highest entropy before the round, by completion."""
        every = torch.cat([c.entropy for c in step]).numpy()
        least = np.quantile(every, 1 - self.settings["top_entropy"])
        return {id(c): (c.entropy >= least).to(c.entropy.dtype) for c in step}

    def pairs(self, step: Sequence[Completion]) -> Tensor:
        """Guo et al., arXiv:2402.04792: DPO between the best and the worst completion of each prompt."""
        found = []
        for group in dict.fromkeys(c.group for c in step):
            pair = [c for c in step if c.group == group]
            ratios = []
            for c in sorted(pair, key=lambda c: -c.sample.reward):  # type: ignore[union-attr]
                assert c.ref is not None
                ratios.append(c.logps(self.policy.model, self.settings["temperature"])[0].sum() - c.ref.sum())
            found.append(losses.smoothed(self.settings["beta"] * (ratios[0] - ratios[1]), 0.0))
        return torch.stack(found).mean()

    def prepare_critic(self, steps: Sequence[Sequence[Completion]]) -> None:
        """Passes that train the critic alone, towards Monte-Carlo returns, then its judgement of the round."""
        assert self.critic is not None
        epochs = self.settings["critic"]["pretrain_epochs"] if self.settings["round"] == 0 else 0
        for _ in range(epochs):
            self.judge(1.0)
            for step in steps:
                self.critic_step(step)
        self.judge()

    def judge(self, lam: float | None = None) -> None:
        """Values, returns and whitened advantages by the critic as it is; `lam` in place of its own."""
        critic = self.settings["critic"]
        assert self.critic is not None
        with torch.no_grad():
            for c in self.trained:
                assert c.sample is not None
                values, after = c.values(self.critic.model)
                c.sample.values = values.numpy()
                c.sample.after = float(after) if c.truncated and critic["bootstrap_truncated"] else 0.0
        samples = [c.sample for c in self.trained if c.sample is not None]
        raw, returns = advantages.gae(critic, samples, lam)
        self.take(self.trained, self.unless_noise(advantages.whitened(raw, samples)))
        for c, row in zip(self.trained, returns, strict=True):
            c.returns = torch.from_numpy(row)

    def critic_step(self, step: Sequence[Completion]) -> None:
        """One step of the critic, mean over the tokens of the step."""
        assert self.critic is not None
        tokens, total = sum(c.count for c in step), real(0.0)
        for c in step:
            assert c.sample is not None and c.sample.values is not None
            new, _ = c.values(self.critic.model)
            old = torch.from_numpy(c.sample.values)
            total = total + losses.value(new, old, c.returns, self.settings["critic"]["value_clip"]).sum() / tokens
        self.critic.optimizer.step(total)

    def next_coefficients(self) -> Coefficients:
        """Ziegler et al., arXiv:1909.08593, for the KL; Skywork-OR1, arXiv:2505.22312, for the entropy."""
        s, now = self.settings, self.coefficients
        if not self.tokens:
            return now
        scale, entropy, bonus = now.kl, now.entropy, now.bonus
        if s["kl_target"] is not None:
            error = min(max(self.kl_sum / self.tokens / s["kl_target"] - 1, -0.2), 0.2)
            scale *= 1 + error * len(self.trained) / s["kl_horizon"]
        if s["entropy_target"] is not None:
            below = self.entropy_sum / self.tokens < s["entropy_target"]
            entropy = max(0.0, entropy + (s["entropy_step"] if below else -s["entropy_step"]))
            bonus = self.entropy_sum / self.tokens <= s["entropy_target"]
        return Coefficients(scale, entropy, bonus)


def _finite(x: float | None) -> bool:
    return x is not None and math.isfinite(x)
