"""A journal of finished calls of a function that judges completions, for the next try of a stage.

A call is identified by its completions and by all inputs of the function, so a completion that was sampled again and
differs is judged again. The journal stores values only. A call that failed in an earlier try is repeated, because the
failure may have ended that try; it becomes content only if the stage succeeds (R25).

Lines have a checksum: readers skip a line that a kill has cut off or a disk has changed.
"""

from __future__ import annotations

import array
import hashlib
import itertools
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from rlhf.stages.contract.definition import Context
from rlhf.tuning.rewards.samples import Outcome, Sample
from rlhf.tuning.rows import CompletionRow


def write_line(file: BinaryIO, text: str) -> None:
    """Append a line of JSON to an open file and flush it, so that a kill cannot lose it."""
    data = text.encode()
    # The newline comes first, because the previous line may be cut off.
    file.write(b"\n%08x %s" % (zlib.crc32(data), data))
    file.flush()


def read_lines(path: Path) -> Iterator[Any]:
    """Yield the values of the whole lines of a file, if it exists; a file may have gigabytes."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            checksum, _, data = line.rstrip(b"\n").partition(b" ")
            if checksum == b"%08x" % zlib.crc32(data):
                yield json.loads(data)


TELL_SECONDS = 600.0
"""Seconds between reports of slow calls: a silent stage counts as hung (`limits.stall_seconds`)."""


class Journal:
    """Finished calls of a function, one line each in the work folder, so that a kill costs only running calls."""

    def __init__(self, ctx: Context, what: str, name: str, sample: Callable[[CompletionRow], Sample] = Sample.of):
        """what: the function, for messages. name: of the file. sample: returns the function's inputs of a row."""
        self._path, self._what, self._log = ctx.work / f"{quote(name, safe='')}.jsonl", what, ctx.log
        self.sample = sample
        self._told = time.monotonic()
        self._known: dict[str, list[float | None]] = {line["call"]: line["values"] for line in read_lines(self._path)}
        """The values of a call by its name."""
        if kept := sum(map(len, self._known.values())):
            ctx.log(f"{what}: {kept} finished scores are there; those of equal completions are reused")

    def _name(self, rows: Sequence[CompletionRow]) -> str:
        """Return the name of a call: a digest of the completions' names and of all inputs of the function."""
        inputs = []
        for row in rows:
            sample = self.sample(row)
            ids = hashlib.sha256(array.array("i", sample.completion_ids).tobytes()).hexdigest()
            fields = [sample.prompt, sample.completion, ids, sample.answer, sample.metadata]
            inputs.append([row.place, row.sample, *fields])
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]

    def get(self, rows: Sequence[CompletionRow]) -> list[Outcome] | None:
        """Return the scores of a call; None if it has not finished, or had other completions."""
        values = self._known.get(self._name(rows))
        return None if values is None else [Outcome(value) for value in values]

    def tell(self, done: int, of: int) -> None:
        """Log the number of finished calls, unless the last report is recent."""
        if time.monotonic() - self._told > TELL_SECONDS:
            self._told = time.monotonic()
            self._log(f"{self._what}: {done} of {of} calls")

    def add(self, rows: Sequence[CompletionRow], outcomes: Sequence[Outcome]) -> None:
        """Store the scores of a call without failures."""
        text = json.dumps({"call": self._name(rows), "values": [outcome.value for outcome in outcomes]})
        # Opened for each line: a kill costs at most the line that is being written.
        with self._path.open("ab") as file:
            write_line(file, text)


def journaled(
    journal: Journal,
    rows: Sequence[CompletionRow],
    calls: Sequence[Sequence[int]],
    function: str,
    arguments: Mapping[str, Any],
    **limits: Any,
) -> dict[int, Outcome]:
    """Return outcomes of `function` by row number, for calls on some rows each; reuse the calls in the journal.

    limits: as in `rlhf.tuning.rewards.processes.attempt`. Failures are among the outcomes and not in the journal.
    """
    from rlhf.tuning.rewards.processes import attempt

    known = {tuple(call): journal.get([rows[i] for i in call]) for call in calls}
    found = {i: o for call, kept in known.items() if kept is not None for i, o in zip(call, kept, strict=True)}
    todo = [call for call, kept in known.items() if kept is None]
    # `attempt` gets only the samples of these calls, and numbers them itself.
    numbers = [i for call in todo for i in call]
    place = {number: k for k, number in enumerate(numbers)}

    made = itertools.count(1)

    def finished(some: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        journal.tell(next(made), len(todo))
        if all(outcome.failure is None for outcome in outcomes):
            journal.add([rows[numbers[k]] for k in some], outcomes)

    samples = [journal.sample(rows[i]) for i in numbers]
    # A call that has succeeded before shows whether the function's service is up.
    judged: Sequence[int] = next((call for call, kept in known.items() if kept is not None), ())
    outcomes = attempt(
        *(function, arguments, samples),
        calls=[[place[i] for i in call] for call in todo],
        control=[journal.sample(rows[i]) for i in judged],
        finished=finished,
        **limits,
    )
    return found | dict(zip(numbers, outcomes, strict=True))
