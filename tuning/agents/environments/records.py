"""Records of a game: tasks by seed, and transcripts that teach SFT the form of a turn.

Transcripts are of random play, and in a chosen share of perfect play. A base model of 135M parameters that has seen
nothing but random moves explores for hours; from a minority of good episodes RL learns which moves pay.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

RawRecord = Mapping[str, Any]
"""A record as `rlhf.tuning.data.records` reads it."""

HELDOUT = 4
"""One in four instances is held out, by the hash of its name."""
_SEEDS = 1_000_000
"""Seeds of tasks that belong to one seed of the data; transcripts begin in the middle."""
_SEARCHED = 20_000


class Playable(Protocol):
    """A text environment that says which texts are valid moves, and which of them perfect play makes."""

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]: ...
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]: ...
    def moves(self) -> list[str]: ...
    def best(self) -> list[str]: ...


def records(
    name: str,
    environment: Playable,
    seed: int,
    transcripts: int,
    prompts: int,
    heldout: int,
    instance: Callable[[int], str] | None = None,
    skilled: float = 0.0,
) -> Iterator[RawRecord]:
    """Transcripts for `sft`, then tasks for `prompts` and `heldout`, which begin no episode of the others' instances.

    Args:
        seed: of the data; another one gives other seeds of tasks. transcripts, prompts, heldout: how many.
        instance: the thing that an episode's seed stands for (a map): training and held-out tasks share none, and the
            tasks of one are a group. None: tasks are numbered one after another, the held-out ones after the others,
            and each is its own group.
        skilled: share of the transcripts that are of perfect play, one move a turn.
    Raises:
        ValueError: a negative count, a share outside 0..1, or no instance is left for a side.
    """
    for argument, count in (("transcripts", transcripts), ("prompts", prompts), ("heldout", heldout)):
        if not 0 <= count < _SEEDS // 2:
            raise ValueError(f"argument {argument} must be in 0..{_SEEDS // 2 - 1}, got {count}")
    if not 0 <= skilled <= 1:
        raise ValueError(f"argument skilled must be in 0..1, got {skilled}")
    first, middle = seed * _SEEDS, seed * _SEEDS + _SEEDS // 2
    trained: Iterator[int]
    held: Iterator[int]
    played: Iterator[int]
    if instance is None:
        trained, held, played = (itertools.count(n) for n in (first, first + prompts, middle))
    else:
        trained, held = (_side(instance, first, side) for side in (False, True))
        played = _side(instance, middle, False)
    # Lists first: errors are raised before any record is written.
    sides = {"prompts": list(itertools.islice(trained, prompts)), "heldout": list(itertools.islice(held, heldout))}
    shown = list(itertools.islice(played, transcripts))
    chosen = set(random.Random(f"{name}:skilled:{seed}").sample(shown, round(skilled * len(shown))))

    def grouped(record: RawRecord, number: int) -> RawRecord:
        # Tasks of one map are one problem, which statistics count once.
        return record if instance is None else {**record, "group": f"{name}:{instance(number)}"}

    return itertools.chain(
        (grouped(transcript(name, environment, number, number in chosen), number) for number in shown),
        (grouped(task(name, number, split), number) for split, numbers in sides.items() for number in numbers),
    )


def task(name: str, seed: int, split: str) -> RawRecord:
    """A task: its prompt is a name for people, since the policy reads the environment's first observation."""
    return {
        "id": f"{name}-{seed}",
        "prompt": f"{name} {seed}",
        "group": f"{name}-{seed}",
        "metadata": {"task": name, "seed": seed},
        "split": split,
    }


def transcript(name: str, environment: Playable, seed: int, skilled: bool = False) -> RawRecord:
    """An episode of uniformly random valid moves, or of perfect play, as messages that end with the policy's turn."""
    rng = random.Random(f"{name}:transcript:{seed}")
    observation, _ = environment.reset(seed=seed)
    messages, ended = [], False
    while not ended:
        move = rng.choice(environment.best()) if skilled else rng.choices(environment.moves())[0]
        messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": move}]
        observation, _, terminated, truncated, _ = environment.step(move)
        ended = terminated or truncated
    return {
        "id": f"{name}-play-{seed}",
        "messages": messages,
        "split": "sft",
        "group": f"{name}-play-{seed}",
        "metadata": {"task": name, "seed": seed, "skilled": skilled},
    }


def is_heldout(instance: str) -> bool:
    """Whether an instance is on the held-out side: by its name alone, so that both sides hold for any counts."""
    return int(hashlib.sha256(f"held out: {instance}".encode()).hexdigest(), 16) % HELDOUT == 0


def _side(instance: Callable[[int], str], first: int, heldout: bool) -> Iterator[int]:
    """Seeds from `first` on whose instance is on a side."""
    idle = 0
    for seed in itertools.count(first):
        if is_heldout(instance(seed)) == heldout:
            idle = 0
            yield seed
        elif (idle := idle + 1) == _SEARCHED:
            side = "held out" if heldout else "trained on"
            raise ValueError(f"of {_SEARCHED} seeds none has an instance that is {side}; vary more")
