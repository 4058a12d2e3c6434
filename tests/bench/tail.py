"""Learning at equal time with long tails: whole rounds, rounds of so many tokens, and rounds that sample ahead.

`python -m tests.bench.tail` trains GRPO on the task of `tests.bench.learning`. Each completion lasts a number of decoding
steps from a log-normal distribution (median 16, longest 256), and its three tokens are sampled at its start, third and
two thirds. A round takes the steps of `SLOTS` slots under continuous batching, and its update a time in proportion to its
groups. `whole` waits for the longest completion; `carried` gives each `--tokens` steps a round and trains on whole groups;
`ahead` samples whole rounds with the policy of one update before while that update runs (`rl.staleness: 1`). `x2` and `x4`
have so many times the prompts a round, with as many prompts a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json

import numpy as np

from tests.bench import learning
from tuning.algorithms.round_data import RoundData
from tuning.algorithms.rounds import run_round
from tuning.rollout.requests import Request, Sampling
from tuning.rows import CompletionRow, ScoreRow

SLOTS, MEDIAN, SPREAD, LONGEST = 128, 16, 1.0, 256
SHARES = (0.0, 0.25, 0.5)
"""Updates' share of the time of a whole round."""


@dataclasses.dataclass
class Going:
    row: CompletionRow
    length: int
    done: int = 0


def steps_of(lengths: list[int]) -> int:
    """Steps until all have ended, in order, each in the first slot that is free."""
    slots = [0] * SLOTS
    for length in lengths:
        heapq.heappush(slots, heapq.heappop(slots) + length)
    return max(slots)


class Run(learning.Run):
    """Rounds with a tail."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.going: list[Going] = []
        self.lengths = np.random.default_rng(100 + self.seed)
        self.lags: list[float] = []

    def tail(self, number: int, most: int) -> tuple[int, int]:
        """Samples and trains; the steps of the round, and how many groups it trained on."""
        first = number * learning.PROMPTS % (len(self.prompts) - learning.PROMPTS)
        for p, prompt in enumerate(self.prompts[first : first + learning.PROMPTS]):
            for s in range(learning.COMPLETIONS):
                length = int(np.clip(self.lengths.lognormal(np.log(MEDIAN), SPREAD), 1, LONGEST))
                row = CompletionRow(place=number * learning.PROMPTS + p, sample=s, prompt_id=str(p), prompt_ids=prompt,
                                    token_ids=[], logprobs=[], seed=number)  # fmt: skip
                self.going.append(Going(row, length))
        steps = steps_of([min(most, one.length - one.done) for one in self.going])
        self._sample(most)
        open_places = {one.row.place for one in self.going if one.done < one.length}
        trained = [one.row for one in self.going if one.row.place not in open_places]
        self.going = [one for one in self.going if one.row.place in open_places]
        if trained:
            self.lags += [number - row.seed for row in trained]
            scores = [
                ScoreRow(place=row.place, sample=row.sample, prompt_id=row.prompt_id,
                         total=learning.right_share(list(row.prompt_ids), list(row.token_ids)))
                for row in trained
            ]  # fmt: skip
            settings = dataclasses.replace(self.settings, round=number)
            reference = self.reference if settings.needs_reference else None
            run_round(RoundData.from_rows(trained, scores), settings, learning.MODEL, self.policy, reference=reference)
        return steps, len({row.place for row in trained})

    def _sample(self, most: int) -> None:
        requests, asked = [], []
        for i, one in enumerate(self.going):
            if one.done >= one.length:
                continue
            one.done = min(one.length, one.done + most)
            # Token t is sampled in the step that is t thirds through the completion.
            tokens = min(learning.TOKENS, -(-one.done * learning.TOKENS // one.length)) - len(one.row.token_ids)
            if tokens < 1 or list(one.row.token_ids)[-1:] == [learning.EOS]:
                continue
            begun = list(one.row.token_ids)
            asked.append(i)
            requests.append(Request([*one.row.prompt_ids, *begun], tokens, Sampling(1.0), (learning.EOS,),
                                    seed=1000 * self.seed, counter=one.row.place, first_sample=one.row.sample,
                                    begun=len(begun)))  # fmt: skip
        self.engine.load(self.policy.params if self.behind is None else self.behind)
        for at, (completion,) in self.engine.run(requests):
            one = self.going[asked[at]]
            one.row = dataclasses.replace(one.row, token_ids=[*one.row.token_ids, *completion.tokens],
                                          logprobs=[*one.row.logprobs, *completion.logps])  # fmt: skip

    behind = None


def follow(way: str, seed: int, rounds: int, tokens: int) -> dict:
    """Steps, groups and held-out pass rates after each round of one run."""
    settings = learning.settings_of("grpo", max_mismatch_kl=1.0)
    run = Run(settings, seed)
    lines = []
    earlier = None
    for number in range(rounds):
        if way == "ahead":
            # Round k samples with the policy before update k - 1.
            run.behind, earlier = earlier, learning.copy(run.policy.params)
        steps, groups = run.tail(number, tokens if way == "carried" else LONGEST)
        lines.append((steps, groups, round(run.pass_rate(), 4)))
    return {"way": way, "seed": seed, "lag": round(float(np.mean(run.lags)), 2), "lines": lines}


def rate_at(run: dict, per_group: float, time: float) -> float:
    """The pass rate that a run has reached after so much time, linear between rounds."""
    clock, times, rates = 0.0, [0.0], [0.0]
    for steps, groups, rate in run["lines"]:
        update = per_group * groups
        clock += max(steps, update) if run["way"] == "ahead" else steps + update
        times.append(clock)
        rates.append(rate)
    return float(np.interp(time, times, rates))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.tail", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=learning.ROUNDS)
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 32])
    args = parser.parse_args()
    runs, prompts = [], learning.PROMPTS
    for seed in range(args.seeds):
        learning.PROMPTS, longer = prompts, args.rounds * 5 // 2
        of_seed = [follow("whole", seed, args.rounds, 0), follow("ahead", seed, args.rounds * 2, 0)]
        of_seed += [follow("carried", seed, longer, tokens) | {"tokens": tokens} for tokens in args.tokens]
        for times in (2, 4):
            learning.PROMPTS = prompts * times
            of_seed.append(follow("whole", seed, longer // times, 0) | {"tokens": f"x{times}"})
        of_seed.append(follow("ahead", seed, longer // 4, 0) | {"tokens": "x4"})
        for run in of_seed:
            print(json.dumps(run), flush=True)
        runs += of_seed
    for share in SHARES:
        for part in (1 / 3, 1 / 2, 2 / 3, 1.0):
            found = {}
            for seed in range(args.seeds):
                of_seed = [run for run in runs if run["seed"] == seed]
                whole = of_seed[0]["lines"]
                steps, groups = sum(x[0] for x in whole), sum(x[1] for x in whole)
                per_group = share / (1 - share) * steps / groups
                for run in of_seed:
                    name = f"{run['way']} {run.get('tokens', '')}".strip()
                    found.setdefault(name, []).append(round(rate_at(run, per_group, part * steps / (1 - share)), 3))
            means = {name: [round(float(np.mean(x)), 3), *x] for name, x in found.items()}
            print(json.dumps({"update_share": share, "time": round(part, 2)} | means), flush=True)


if __name__ == "__main__":
    main()
