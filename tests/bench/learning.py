"""Does each algorithm learn? Trains a tiny random model from three seeds, and compares pass rates before and after.

`python -m tests.bench.learning` runs every algorithm and writes tests/bench/results/learning.json and .png. With names
of algorithms as arguments it runs those and only prints. The task is to repeat the last of a prompt's three letters
three times. The reward is the share of right tokens. The pass rate is the share of completions without a wrong token,
on held-out prompts.
"""

import argparse
import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlhf.tuning.agents.rows import TurnRow
from rlhf.tuning.algorithms.learner import Learner
from rlhf.tuning.algorithms.registry import ALGORITHMS
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.rounds import run_round
from rlhf.tuning.algorithms.settings import CriticSettings, RoundSettings
from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.huggingface import random_params, scalar_head_params
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.requests import Sampling
from rlhf.tuning.rows import CompletionRow, ScoreRow
from rlhf.tuning.settings import OptimizerSettings
from rlhf.tuning.training.step import copy
from tests.tuning.algorithms.support import rows_of, scores_of

RESULTS = Path(__file__).parent / "results"
MARGIN = 0.5
"""Pass rate that every algorithm must gain on average over the seeds; each seed must gain half of it."""
EOS, LETTERS = 1, range(2, 12)
MODEL = tiny(12)
ROUNDS, PROMPTS, COMPLETIONS, HELDOUT = 30, 16, 16, 64
TOKENS = 3

OWN: dict[str, dict[str, Any]] = {
    # GSPO's own clip range of about 1e-4 suits long sequences and many steps; here a round takes two steps.
    "gspo": {"clip_low": 0.2, "clip_high": 0.2},
    "gspo-token": {"clip_low": 0.2, "clip_high": 0.2},
    "ppo": {"critic": CriticSettings(optimizer=OptimizerSettings(learning_rate=0.003), pretrain_epochs=2)},
    "dr-grpo": {"constant": float(TOKENS)},
    "dppo": {"constant": float(TOKENS)},
    "dppo-kl": {"constant": float(TOKENS)},
    "opo": {"prompts_per_step": PROMPTS},
    "gpg": {"prompts_per_step": PROMPTS},
}

LONGER = {"remax": 90, "online-dpo": 60}
"""Algorithms that need more rounds. ReMax: greedy completions beat most sampled ones at first. Online DPO: it trains on
a pair of each group of 16."""


def settings_of(algorithm: str, **more: Any) -> RoundSettings:
    """The update's settings: the algorithm's own, one learning rate, weak KL where it has one."""
    values = {"prompts_per_step": 8, "optimizer": OptimizerSettings(learning_rate=0.003)} | OWN.get(algorithm, {})
    plain = RoundSettings.of(algorithm, **values)
    weak = {n: 0.001 for n in ("kl_coef", "kl_in_reward") if getattr(plain, n)}
    return dataclasses.replace(plain, **weak | more)


def right_share(prompt: list[int], tokens: list[int]) -> float:
    return sum(t == prompt[-1] for t in tokens) / TOKENS


def turns_of(rows: list[CompletionRow]) -> list[TurnRow]:
    """Each token as a turn, which begins in the state that the tokens before it make."""
    return [
        TurnRow(
            place=row.place, sample=row.sample, turn=t, start=t, token_ids=[token], logprobs=[row.logprobs[t]], text="",
            stop="eos", state=repr(row.token_ids[:t]), reward=right_share(row.prompt_ids, [token]),
        )
        for row in rows
        for t, token in enumerate(row.token_ids)
    ]  # fmt: skip


@dataclasses.dataclass
class Run:
    """One algorithm from one seed."""

    settings: RoundSettings
    seed: int

    def __post_init__(self) -> None:
        params = random_params(MODEL, 1000 + self.seed)
        self.reference, self.engine = params, Engine(MODEL)
        self.policy, self.critic = Learner.start(copy(params), self.settings.optimizer), None
        if self.settings.needs_critic:
            critic = scalar_head_params(MODEL, copy(params))
            self.critic = Learner.start(critic, self.settings.critic.optimizer)
        rng = np.random.default_rng(self.seed)
        letters = len(LETTERS)
        numbers = rng.permutation(letters**3)
        prompts = [[2 + n // letters**2, 2 + n // letters % letters, 2 + n % letters] for n in numbers.tolist()]
        self.heldout, self.prompts = prompts[:HELDOUT], prompts[HELDOUT:]

    def sample(
        self, prompts: list[list[int]], samples: int, seed: int, temperature: float = 1.0
    ) -> list[CompletionRow]:
        rows = self.engine.generate(
            self.policy.params, prompts, samples=samples, max_tokens=TOKENS, sampling=Sampling(temperature=temperature),
            eos_ids=(EOS,), seed=seed, counters=range(len(prompts)),
        )  # fmt: skip
        return rows_of(prompts, rows)

    def pass_rate(self) -> float:
        rows = self.sample(self.heldout, 4, 7)
        return float(np.mean([right_share(r.prompt_ids, r.token_ids) == 1 for r in rows]))

    def round(self, number: int) -> dict[str, Any]:
        first = number * PROMPTS % (len(self.prompts) - PROMPTS)
        prompts = self.prompts[first : first + PROMPTS]

        def scores(rows: list[CompletionRow]) -> list[ScoreRow]:
            return scores_of(rows, [right_share(r.prompt_ids, r.token_ids) for r in rows])

        rows = self.sample(prompts, COMPLETIONS, 1000 * self.seed + number)
        greedy = scores(self.sample(prompts, 1, 0, 0.0)) if self.settings.needs_greedy else None
        settings = dataclasses.replace(self.settings, round=number)
        reference = self.reference if settings.needs_reference else None
        turns = turns_of(rows) if self.settings.entry is not None and self.settings.entry.turns else None
        data = RoundData.from_rows(rows, scores(rows), greedy, turns)
        return run_round(data, settings, MODEL, self.policy, self.critic, reference=reference).metrics


def learn(algorithm: str, seed: int, rounds: int = 0, every: int = 5) -> list[float]:
    """Held-out pass rates before, after each `every` rounds and at the end."""
    rounds = rounds or LONGER.get(algorithm, ROUNDS)
    run = Run(settings_of(algorithm), seed)
    rates = [run.pass_rate()]
    for number in range(rounds):
        run.round(number)
        if (number + 1) % every == 0 or number + 1 == rounds:
            rates.append(run.pass_rate())
    return rates


def plot(found: dict[str, dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 4
    figure = Figure(figsize=(11, 2.4 * -(-len(found) // columns)), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (name, of) in enumerate(found.items()):
        axes = figure.add_subplot(-(-len(found) // columns), columns, place + 1)
        for rates in of["pass_rates"]:
            axes.plot([5 * i for i in range(len(rates))], rates, linewidth=1.3)
        axes.set(title=name, ylim=(-0.02, 1.02), xlabel="round")
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=70)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.learning", description=__doc__)
    parser.add_argument("algorithms", nargs="*", choices=[*ALGORITHMS, []], default=[])
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name in args.algorithms or ALGORITHMS:
        started = time.monotonic()
        rates = [learn(name, seed) for seed in range(args.seeds)]
        gains = [r[-1] - r[0] for r in rates]
        # Every compiled program holds memory maps, whose number per process is limited.
        jax.clear_caches()
        found[name] = {
            "rounds": LONGER.get(name, ROUNDS),
            "pass_rates": [[round(x, 4) for x in r] for r in rates],
            "gain": round(float(np.mean(gains)), 4),
            "least_gain": round(min(gains), 4),
            "seconds": round(time.monotonic() - started, 1),
            "learned": float(np.mean(gains)) >= MARGIN and min(gains) >= MARGIN / 2,
        }
        print(json.dumps({"algorithm": name} | found[name]), flush=True)
        if not args.algorithms:
            write(found)


def write(found: dict[str, dict[str, Any]]) -> None:
    """The results so far, as numbers and as curves."""
    RESULTS.mkdir(exist_ok=True)
    task = {"rounds": ROUNDS, "prompts": PROMPTS, "completions": COMPLETIONS, "tokens": TOKENS, "margin": MARGIN}
    about = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    text = json.dumps({"task": task, **about, "algorithms": found}, indent=1)
    # Each curve is one line of the file, so that a diff shows which curves changed.
    text = re.sub(r"\[[\s\d.,]+\]", lambda m: re.sub(r"\s+", " ", m[0]).replace("[ ", "[").replace(" ]", "]"), text)
    (RESULTS / "learning.json").write_text(text + "\n")
    plot(found, RESULTS / "learning.png")


if __name__ == "__main__":
    main()
