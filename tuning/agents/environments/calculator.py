"""Products of two two-digit numbers, with a calculator: an episode of tools alone, whose prompts come from the data.

A small model does not multiply in its head, and copies the answer of a tool. A tenth of the transcripts uses the tool:
RL has to find out that calls pay.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf.tuning.agents.contract import Task
from rlhf.tuning.agents.environments.records import RawRecord
from rlhf.tuning.agents.environments.reference_levels import Levels
from rlhf.tuning.agents.tools.calculator import make
from rlhf.tuning.agents.tools.schemas import schema_of
from rlhf.tuning.chat.calls import Call, instructions, render

ENVIRONMENT = None
TOOLS = ("calculator",)
FORMAT = "hermes"
"""Form of the calls in transcripts."""
LOW, HIGH = 10, 99
_PAIRS = (HIGH - LOW + 1) * (HIGH - LOW + 2) // 2

Message = Mapping[str, Any]


def records(
    seed: int = 0,
    transcripts: int = 60,
    prompts: int = 256,
    heldout: int = 128,
    calls: float = 0.1,
) -> Iterator[RawRecord]:
    """Transcripts for SFT, and problems with their answers; no two records hold the same two numbers.

    The transcripts are written as text, for templates without tools: the system's message says how tools are called,
    and results come as the user's turn. The others answer at once, rightly: from so few nobody learns to multiply.

    Args:
        seed: which problems. transcripts, prompts, heldout: how many, 4095 in all at most.
        calls: share of the transcripts that call the tool.
    Raises:
        ValueError: more problems than there are, or a share outside 0..1.
    """
    if min(transcripts, prompts, heldout) < 0 or transcripts + prompts + heldout > _PAIRS:
        asked = f"{transcripts} + {prompts} + {heldout}"
        raise ValueError(f"transcripts, prompts and heldout must add up to {_PAIRS} pairs at most, got {asked}")
    if not 0 <= calls <= 1:
        raise ValueError(f"argument calls must be in 0..1, got {calls}")
    rng = random.Random(f"calculator:{seed}")
    pairs = [(a, b) for a in range(LOW, HIGH + 1) for b in range(a, HIGH + 1)]
    drawn = [pair if rng.random() < 0.5 else pair[::-1] for pair in rng.sample(pairs, transcripts + prompts + heldout)]
    shown, trained = drawn[:transcripts], drawn[transcripts : transcripts + prompts]
    called = round(calls * transcripts)
    system = instructions([schema_of(make())], FORMAT) if transcripts else ""
    return iter(
        [
            *(_transcript(pair, number < called, system) for number, pair in enumerate(shown)),
            *(_problem(pair, "prompts") for pair in trained),
            *(_problem(pair, "heldout") for pair in drawn[transcripts + prompts :]),
        ]
    )


def question(pair: tuple[int, int]) -> str:
    """The prompt of two numbers."""
    return f"What is {pair[0]} * {pair[1]}?"


def _problem(pair: tuple[int, int], split: str) -> RawRecord:
    a, b = pair
    return {
        "id": f"calculator-{a}*{b}",
        "prompt": question(pair),
        "answer": str(a * b),
        "group": f"{min(pair)}*{max(pair)}",
        "split": split,
        "metadata": {"task": "calculator"},
    }


def _transcript(pair: tuple[int, int], calls: bool, system: str) -> RawRecord:
    a, b = pair
    messages: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": question(pair)}]
    if calls:
        call = Call("calculator", {"expression": f"{a} * {b}"})
        messages += [
            {"role": "assistant", "content": render([call], FORMAT)},
            {"role": "user", "content": f"<tool_response>\n{a * b}\n</tool_response>"},
        ]
    return {
        "id": f"calculator-play-{a}*{b}",
        "messages": [*messages, {"role": "assistant", "content": str(a * b)}],
        "group": f"{min(pair)}*{max(pair)}",
        "split": "sft",
        "metadata": {"task": "calculator", "calls": calls},
    }


def levels(tasks: Sequence[Task], turns: int | None = None) -> Levels:
    """Exact levels over exactly these tasks' answers (`row["answer"]`).

    Random: a number drawn from those that a product can be, 100 to 9801, without the tool. Blind: the answer that is
    commonest among the tasks. The first evaluation shows how often the policy multiplies without the
    tool. One turn is too few to read a result; then nothing is said of the optimum.

    Raises ValueError without tasks, or for one without an answer.
    """
    if not tasks:
        raise ValueError("levels are over tasks, and there are none")
    answers = [task.row.get("answer") for task in tasks]
    if None in answers:
        raise ValueError(f"task {answers.index(None) + 1} of {len(tasks)} has no answer in its row")
    common = collections.Counter(map(str, answers)).most_common(1)[0][1]
    return Levels(
        random=1 / (HIGH * HIGH - LOW * LOW + 1),
        blind=common / len(tasks),
        optimal=None if turns == 1 else 1.0,
    )
