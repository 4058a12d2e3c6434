"""Rounds whose completions go on in the next round against rounds that end all of theirs: speed, and what is learnt.

`python -m tests.bench.partial --write` samples the same completions, of lengths with a long tail, both ways in turn by
the engine of one device, with weights that come anew before each round. Lengths are imposed. It prints decoding steps,
the share of slots that were busy in them, and tokens a step and a processor second. On a GPU or TPU a step takes about
as long whatever its slots do, so that there steps are time. `--learn` trains GRPO on the task of
`tests.bench.learning` instead, one token of three a round, so that a completion has tokens of three policies.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.bench import learning
from tests.bench.training import config_of
from tuning.algorithms.round_data import RoundData
from tuning.algorithms.rounds import run_round
from tuning.models.huggingface import random_params
from tuning.rollout.engine.engine import Engine
from tuning.rollout.engine.limits import Limits
from tuning.rollout.requests import Request, Sampling
from tuning.rows import CompletionRow, ScoreRow
from tuning.shapes import bucket

RESULTS = Path(__file__).parent / "results" / "partial.json"
ROUNDS, PROMPTS, COMPLETIONS, SLOTS = 8, 4, 8, 16
PROMPT_TOKENS, MEDIAN, SPREAD, LONGEST = 32, 16, 1.0, 256
ROUND_TOKENS = (32, 64)


def lengths(seed: int = 1) -> np.ndarray:
    """Tokens of each completion, [round, prompt, sample]: log-normal, cut off at the longest."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SPREAD, (ROUNDS, PROMPTS, COMPLETIONS))
    return np.clip(drawn, 1, LONGEST).astype(int)


@dataclasses.dataclass
class Going:
    """A completion under way."""

    prompt: list[int]
    counter: int
    sample: int
    length: int
    tokens: list[int] = dataclasses.field(default_factory=list)

    def request(self, most: int) -> Request:
        """For at most so many new tokens; without an id that ends it: its length is imposed."""
        return Request(
            [*self.prompt, *self.tokens],
            min(most, self.length - len(self.tokens)),
            seed=1,
            counter=self.counter,
            first_sample=self.sample,
            begun=len(self.tokens),
        )


def sampled(engine: Engine, params: Any, round_tokens: int) -> dict[str, float]:
    """All rounds with so many tokens a completion and round, the last one to the end: what they took."""
    rng, of_all = np.random.default_rng(0), lengths()
    carried: list[Going] = []
    steps, began = engine.steps, os.times()
    per_round = []
    for number in range(ROUNDS):
        # New weights: nothing that is cached is of use any more.
        engine.load(params)
        prompts = [rng.integers(3, 2048, PROMPT_TOKENS).tolist() for _ in range(PROMPTS)]
        new = [
            Going(prompt, number * PROMPTS + p, s, int(of_all[number, p, s]))
            for p, prompt in enumerate(prompts)
            for s in range(COMPLETIONS)
        ]
        going, before = carried + new, engine.steps
        most = LONGEST if number + 1 == ROUNDS else round_tokens
        for i, (completion,) in engine.run([one.request(most) for one in going]):
            going[i].tokens += completion.tokens
        carried = [one for one in going if len(one.tokens) < one.length]
        per_round.append(engine.steps - before)
    assert not carried
    now, tokens, steps = os.times(), int(of_all.sum()), engine.steps - steps
    seconds = now.user + now.system - began.user - began.system
    return {
        "tokens": tokens,
        "steps": steps,
        "busy": tokens / steps / SLOTS,
        "longest_round": max(per_round[:-1]),
        "cpu_seconds": seconds,
        "tokens_per_cpu_second": tokens / seconds,
    }


def speed(repeats: int) -> list[dict[str, Any]]:
    """A line for whole rounds and one for each bound, medians of runs in turn."""
    config = config_of("tiny")
    params = random_params(config, 0)
    context = bucket(PROMPT_TOKENS + LONGEST, 64)
    engine = Engine(config, "float32", Limits(slots=SLOTS, context=context))
    ways = (LONGEST, *ROUND_TOKENS)
    for way in ways:
        # Compiles what it needs.
        print(json.dumps({"round_tokens": way, "warm": sampled(engine, params, way)}), flush=True)
    runs = [{way: sampled(engine, params, way) for way in ways} for _ in range(repeats)]
    return [
        {"round_tokens": None if way == LONGEST else way}
        | {name: round(statistics.median(run[way][name] for run in runs), 4) for name in runs[0][way]}
        for way in ways
    ]


class Carrying(learning.Run):
    """As `learning.Run`, with one token of each completion a round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.carried: list[CompletionRow] = []
        self.lags: list[int] = []

    def round(self, number: int, last: bool = False) -> dict[str, Any]:
        """Samples a token of each completion under way and new, and trains on the groups that have all of theirs."""
        first = number * learning.PROMPTS % (len(self.prompts) - learning.PROMPTS)
        new = [
            CompletionRow(
                place=number * learning.PROMPTS + p,
                sample=s,
                prompt_id=str(p),
                prompt_ids=prompt,
                token_ids=[],
                logprobs=[],
                seed=number,
            )  # fmt: skip
            for p, prompt in enumerate(self.prompts[first : first + learning.PROMPTS])
            for s in range(learning.COMPLETIONS)
        ]
        rows = self._longer(self.carried + new, learning.TOKENS if last else 1)
        ended = {row.place for row in rows} - {row.place for row in rows if self._goes_on(row)}
        self.carried = [row for row in rows if row.place not in ended]
        trained = [row for row in rows if row.place in ended]
        if not trained:
            return {}
        scores = [
            ScoreRow(
                place=row.place,
                sample=row.sample,
                prompt_id=row.prompt_id,
                total=learning.right_share(list(row.prompt_ids), list(row.token_ids)),
            )  # fmt: skip
            for row in trained
        ]
        self.lags += [number - row.seed for row in trained]
        settings = dataclasses.replace(self.settings, round=number)
        reference = self.reference if settings.needs_reference else None
        return run_round(RoundData.from_rows(trained, scores), settings, learning.MODEL, self.policy,
                         reference=reference).metrics  # fmt: skip

    def _goes_on(self, row: CompletionRow) -> bool:
        return len(row.token_ids) < learning.TOKENS and list(row.token_ids)[-1:] != [learning.EOS]

    def _longer(self, rows: list[CompletionRow], most: int) -> list[CompletionRow]:
        going = [i for i, row in enumerate(rows) if self._goes_on(row)]
        self.engine.load(self.policy.params)
        requests = [
            Request(
                [*rows[i].prompt_ids, *rows[i].token_ids],
                min(most, learning.TOKENS - len(rows[i].token_ids)),
                Sampling(1.0),
                (learning.EOS,),
                seed=1000 * self.seed,
                counter=rows[i].place,
                first_sample=rows[i].sample,
                begun=len(rows[i].token_ids),
            )
            for i in going
        ]
        found = list(rows)
        for at, (completion,) in self.engine.run(requests):
            row = rows[going[at]]
            found[going[at]] = dataclasses.replace(
                row, token_ids=[*row.token_ids, *completion.tokens], logprobs=[*row.logprobs, *completion.logps]
            )
        return found


def learnt(seeds: int, rounds: int) -> list[dict[str, Any]]:
    """Held-out pass rates before and after the rounds, each seed both ways; the same completions are trained on."""

    def rates(make: Callable[[int], learning.Run]) -> list[list[float]]:
        found = []
        for seed in range(seeds):
            run = make(seed)
            before = run.pass_rate()
            for number in range(rounds):
                if isinstance(run, Carrying):
                    run.round(number, last=number + 1 == rounds)
                else:
                    run.round(number)
            lag = float(np.mean(run.lags)) if isinstance(run, Carrying) else 0.0
            found.append([round(x, 4) for x in (before, run.pass_rate(), lag)])
            print(json.dumps({"seed": seed, "way": type(run).__name__, "rates": found[-1]}), flush=True)
        return found

    # Three policies a completion: the first tokens are two updates old.
    settings = learning.settings_of("grpo", max_mismatch_kl=1.0)
    ways = {"whole": learning.Run, "carried": Carrying}
    return [
        {
            "way": name,
            "rounds": rounds,
            "before_after_lag": (of := rates(lambda seed, kind=kind: kind(settings, seed))),
            "after": round(float(np.mean([one[1] for one in of])), 4),
        }  # fmt: skip
        for name, kind in ways.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.partial", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=learning.ROUNDS)
    parser.add_argument("--write", action="store_true", help="keep the result beside the others")
    args = parser.parse_args()
    lines = learnt(args.seeds, args.rounds) if args.learn else speed(args.repeats)
    for line in lines:
        print(json.dumps(line), flush=True)
    if not args.write:
        return
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    about = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    kept |= {"learning" if args.learn else "speed": {**about, "lines": lines}}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
