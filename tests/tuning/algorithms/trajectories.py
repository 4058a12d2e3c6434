"""Made-up trajectories of several turns: as one row with holes, or in rows of their own contexts."""

import dataclasses

import numpy as np

from rlhf.tuning.agents.rows import TurnRow
from rlhf.tuning.rows import CompletionRow, ScoreRow

VOCABULARY = 97
SHAPES = [
    # Of each trajectory the lengths of its turns and of the observations between them.
    [(0, 0, (2, 3, 1, 2, 2)), (0, 1, (1, 2, 3)), (0, 2, (4,))],
    [(1, 0, (2, 1, 2)), (1, 1, (3, 2, 1, 4, 2)), (1, 2, (2, 2, 2))],
]
TOTALS = [1.0, 0.0, 0.4, 0.3, 0.9, 0.1]


def tokens(*seed, count):
    return np.random.default_rng(seed).integers(2, VOCABULARY, count).tolist()


def trajectory(place, sample, lengths, apart=True):
    """(row, turns) of a trajectory in one row; `apart`: those of place 1 begin from contexts of their own."""
    prompt = tokens(place, sample if apart and place == 1 else 0, count=4 + place)
    ids, logps, turns = [], [], []
    for number, length in enumerate(lengths):
        new = tokens(place, sample, number, 7, count=length)
        mu = (-4.5 + 0.3 * np.random.default_rng((place, sample, number)).normal(size=length)).tolist()
        if number % 2 == 0:
            state = f"s{(place + sample) % 2}" if number < 4 else f"late {sample}"
            turn = TurnRow(
                place=place, sample=sample, turn=number // 2, start=len(ids), token_ids=new, logprobs=mu, text="",
                stop="eos", state=state, reward=0.1 * (number // 2) * (1 + sample),
            )  # fmt: skip
            turns.append(turn)
        ids += new
        logps += [np.nan] * length if number % 2 else mu
    row = CompletionRow(
        place=place, sample=sample, prompt_id=f"p{place}", prompt_ids=prompt, token_ids=ids, logprobs=logps,
        stop="length" if (place, sample) == (1, 1) else "eos",
    )  # fmt: skip
    return row, turns


def split(row, turns, at):
    """The trajectory in rows: a new one begins with each turn whose number is in `at`."""
    rows, moved = [], []
    starts = [0, *(turns[number].start for number in at if number < len(turns))]
    for part, (start, stop) in enumerate(zip(starts, [*starts[1:], len(row.token_ids)], strict=True)):
        own = [turn for turn in turns if start <= turn.start < stop]
        # Observations before the next part are its context, and nobody trains on them.
        stop = own[-1].start + len(own[-1].token_ids)
        context = row.prompt_ids + row.token_ids[:start]
        rows.append(
            dataclasses.replace(
                row, part=part, prompt_ids=context, token_ids=row.token_ids[start:stop],
                logprobs=row.logprobs[start:stop], stop=row.stop if stop == len(row.token_ids) else "eos",
            )
        )  # fmt: skip
        moved += [dataclasses.replace(turn, part=part, start=turn.start - start) for turn in own]
    return rows, moved


def tables(at=(), apart=True):
    """(rollouts, scores, turns) of all trajectories."""
    rollouts, turns = [], []
    for place, sample, lengths in [shape for group in SHAPES for shape in group]:
        rows, own = split(*trajectory(place, sample, lengths, apart), at)
        rollouts += rows
        turns += own
    scores = [
        ScoreRow(place=row.place, sample=row.sample, prompt_id=row.prompt_id, total=total)
        for row, total in zip([row for row in rollouts if row.part == 0], TOTALS, strict=True)
    ]
    return rollouts, scores, turns
