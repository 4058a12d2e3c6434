"""Finished calls of a function that judges completions, kept for the next try of a stage.

A call is known by the names of its completions and by everything that the function sees of them: one that was sampled
again, and is another now, is judged again. Only values are kept. A call that failed in an earlier try is repeated: it
may have been the cause that the try ended, and is content only once the stage has succeeded (R25).
"""

from __future__ import annotations

import array
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from rlhf.stages.common.checked_lines import read_lines, write_line
from rlhf.stages.contract.definition import Context
from rlhf.tuning.rewards.samples import Outcome, Sample
from rlhf.tuning.rows import CompletionRow

TELL_SECONDS = 600.0
"""Seconds between reports of slow calls: a silent stage counts as hung (`limits.stall_seconds`)."""


class Journal:
    """Finished calls of a function, one line each in the work folder, so that a kill costs only those under way."""

    def __init__(self, ctx: Context, what: str, name: str, sample: Callable[[CompletionRow], Sample] = Sample.of):
        """what: the function for people. name: of the file. sample: a row as the function sees it."""
        self._path, self._what, self._log = ctx.work / f"{quote(name, safe='')}.jsonl", what, ctx.log
        self.sample = sample
        self._told = time.monotonic()
        self._known: dict[str, list[float | None]] = {}
        """The values of a call by its name."""
        if self._path.exists():
            # Lines of before name places alone, not what was judged there.
            lines = (line for line in read_lines(self._path) if isinstance(line, dict))
            self._known = {line["call"]: line["values"] for line in lines}
            # How many of them are of completions that there are now is known call by call.
            kept = sum(map(len, self._known.values()))
            ctx.log(f"{what}: {kept} finished scores are there, and reused where their completions are the same")

    def _name(self, rows: Sequence[CompletionRow]) -> str:
        """The name of a call on some completions."""
        return _digest([_seen(row, self.sample(row)) for row in rows])

    def get(self, rows: Sequence[CompletionRow]) -> list[Outcome] | None:
        """The scores of a call's completions; None where it was not made, or on others."""
        values = self._known.get(self._name(rows))
        return None if values is None else [Outcome(value) for value in values]

    def tell(self, done: int, of: int) -> None:
        """Log the number of finished calls, unless the last report is recent."""
        if time.monotonic() - self._told > TELL_SECONDS:
            self._told = time.monotonic()
            self._log(f"{self._what}: {done} of {of} calls")

    def failed(self, outcomes: Sequence[Outcome]) -> None:
        """Receive the outcomes of a failed call, which are not stored."""

    def add(self, rows: Sequence[CompletionRow], outcomes: Sequence[Outcome]) -> None:
        """Stores the scores of a call, in which nothing failed."""
        text = json.dumps({"call": self._name(rows), "values": [outcome.value for outcome in outcomes]})
        # Opened for each line: a kill costs at most the line that is being written.
        with self._path.open("ab") as file:
            write_line(file, text)


def _seen(row: CompletionRow, sample: Sample) -> list[Any]:
    """The inputs of a value: the completion's name, and the fields that the function sees."""
    ids = hashlib.sha256(array.array("i", sample.completion_ids).tobytes()).hexdigest()
    return [row.place, row.sample, sample.prompt, sample.completion, ids, sample.answer, sample.metadata]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def journaled(
    journal: Journal,
    rows: Sequence[CompletionRow],
    calls: Sequence[Sequence[int]],
    function: str,
    arguments: Mapping[str, Any],
    **limits: Any,
) -> dict[int, Outcome]:
    """Outcomes of `function` by number of the row, for calls on some rows each; those in the journal are not made.

    limits: as in `rlhf.tuning.rewards.processes.attempt`, whose outages are among the outcomes and not in the journal.
    """
    from rlhf.tuning.rewards.processes import attempt

    known = {tuple(call): journal.get([rows[i] for i in call]) for call in calls}
    found = {i: o for call, kept in known.items() if kept is not None for i, o in zip(call, kept, strict=True)}
    todo = [call for call, kept in known.items() if kept is None]
    # Numbered anew: `attempt` gets the samples of these calls alone.
    numbers = [i for call in todo for i in call]
    place = {number: k for k, number in enumerate(numbers)}

    made = itertools.count(1)

    def finished(some: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        journal.tell(next(made), len(todo))
        if any(outcome.failure is not None for outcome in outcomes):
            journal.failed(outcomes)
        else:
            journal.add([rows[numbers[k]] for k in some], outcomes)

    samples = [journal.sample(rows[i]) for i in numbers]
    # Any call with a verdict shows whether the function's service is up.
    judged: Sequence[int] = next((call for call, kept in known.items() if kept is not None), ())
    outcomes = attempt(
        *(function, arguments, samples),
        calls=[[place[i] for i in call] for call in todo],
        control=[journal.sample(rows[i]) for i in judged],
        finished=finished,
        **limits,
    )
    return found | dict(zip(numbers, outcomes, strict=True))
