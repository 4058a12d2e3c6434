"""Groups of completions that a round begins or goes on with, and what is carried into the next one.

    new prompts ----------+                      +-- whole groups -----> rollouts/   scored and trained on in this round
                          +--> so many tokens ---+
    carried/ of before ---+                      +-- the other groups -> carried/    go on in the next round

A group is whole when its last completion has ended: baselines are of whole groups. The bound is a number of tokens and
never the clock, so that the same completions are carried whenever and wherever a round is sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.common.models import load_tokenizer, stop_ids
from stages.common.tables import Shards, as_they_end, by_shard, read_table
from stages.contract.definition import Context
from stages.sampling.native import in_one_go, open_engine
from stages.sampling.rows import context_of
from stages.sampling.settings import Rollout
from stages.store.artifacts import Artifact
from tuning import multihost
from tuning.columns import Numbers
from tuning.rollout.segments import SegmentRow
from tuning.rows import CompletionRow, PromptRow

if TYPE_CHECKING:
    from tuning.rollout.requests import Completion, Request

CARRIED, SEGMENTS = "carried", "segments"
"""Folders of an artifact: completions of groups that are not whole, and the segments of all completions."""
OPEN = "carried"
"""`CompletionRow.stop` of a completion that goes on."""
Name = tuple[int, int]
"""Place and sample."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The completions of one place, as they are before a round samples or after it."""

    rows: tuple[CompletionRow, ...]
    """By sample."""
    segments: Mapping[int, tuple[SegmentRow, ...]]
    """Of each sample, in order."""
    began: int
    """The round in which it began."""
    began_at: int
    """Its place there."""
    version: int
    """Updates before the oldest policy that sampled some of it, which need not be the first one (a fork may raise the
    staleness); before it has tokens, before the policy of the round."""

    @property
    def place(self) -> int:
        """Its place in this round."""
        return self.rows[0].place

    @property
    def is_whole(self) -> bool:
        """Whether all of its completions have ended."""
        return all(row.stop != OPEN for row in self.rows)

    def at(self, place: int) -> Group:
        """The group at another place."""
        rows = tuple(dataclasses.replace(row, place=place) for row in self.rows)
        segments = {
            sample: tuple(dataclasses.replace(segment, place=place) for segment in of_sample)
            for sample, of_sample in self.segments.items()
        }
        return dataclasses.replace(self, rows=rows, segments=segments)


def begun(ctx: Context, config: Rollout, prompts: Iterable[tuple[int, PromptRow]], version: int) -> list[Group]:
    """The groups of new (place, prompt), without a token yet. version: updates before the policy of the round."""

    def row(place: int, prompt: PromptRow, sample: int) -> CompletionRow:
        return CompletionRow(
            place=place,
            sample=sample,
            prompt_id=prompt.id,
            prompt=prompt.prompt,
            answer=prompt.answer,
            metadata=prompt.metadata,
            prompt_ids=prompt.prompt_ids,
            token_ids=[],
            logprobs=[],
            stop=OPEN,
            seed=ctx.seed,
            temperature=config.temperature,
        )

    samples = range(config.completions)
    return [
        Group(tuple(row(place, prompt, sample) for sample in samples), {}, config.round, place, version)
        for place, prompt in prompts
    ]


def read_carried(artifact: Artifact, first: int) -> list[Group]:
    """The groups that the round before has left, the oldest first, at the places from `first` on.

    Raises RuntimeError where the segments of a completion are not its tokens.
    """
    rows: dict[int, list[CompletionRow]] = {}
    for row in read_table(artifact, f"{CARRIED}/", CompletionRow):
        rows.setdefault(row.place, []).append(row)
    segments: dict[Name, list[SegmentRow]] = {}
    for segment in read_table(artifact, f"{SEGMENTS}/", SegmentRow):
        segments.setdefault((segment.place, segment.sample), []).append(segment)
    for row in (row for group in rows.values() for row in group):
        recorded = sum(segment.tokens for segment in segments.get((row.place, row.sample), ()))
        if recorded != len(row.token_ids):
            raise RuntimeError(
                f"{artifact.url}: place {row.place}, sample {row.sample} has {len(row.token_ids)} tokens, its segments "
                f"{recorded}; expected as many: `rlhf verify` finds damaged files, and the run makes them again"
            )
    groups = [_read(group, segments) for group in rows.values()]
    groups.sort(key=lambda group: (group.began, group.began_at))
    return [group.at(place) for place, group in enumerate(groups, first)]


def _read(rows: Sequence[CompletionRow], segments: Mapping[Name, Sequence[SegmentRow]]) -> Group:
    """The group of these rows."""
    rows = sorted(rows, key=lambda row: row.sample)
    of_sample = {
        row.sample: tuple(sorted(segments[row.place, row.sample], key=lambda segment: segment.number)) for row in rows
    }
    first = of_sample[rows[0].sample][0]
    oldest = min(segment.version for of_one in of_sample.values() for segment in of_one)
    return Group(tuple(rows), of_sample, first.began, first.began_at, oldest)


class Going:
    """Samples what groups get in a round, in shards, each of which outlives a kill."""

    def __init__(self, ctx: Context, config: Rollout, groups: Sequence[Group], version: int, oldest: int):
        """groups: all of the round. version: updates before its policy. oldest: the first version whose tokens the next
        round may train on: completions with older ones run to their end."""
        self.ctx, self.config, self.version, self.oldest = ctx, config, version, oldest
        self.tokenizer = load_tokenizer(ctx, ctx.inputs["tokenizer"])
        self.eos = stop_ids(ctx, ctx.inputs["tokenizer"])
        self.control = set(self.tokenizer.all_special_ids) | set(self.eos)
        # As in `rows`, of all groups: a shard has the same bits whichever shards an earlier try has left.
        self.context = context_of(max(len(group.rows[0].prompt_ids) for group in groups), config.max_tokens)
        self.engine: Any = None
        self.tokens: int | None = None

    def on(self, groups: Sequence[Group], tokens: int | None, folder: str) -> list[Group]:
        """The groups with their new tokens. folder: of the shards in the work folder.

        tokens: most that a completion gets; None: all that it has left. Of a process group process 0 has all groups,
        the others those that were sampled in this try.
        """
        self.tokens = tokens
        shards = Shards(folder, CompletionRow, CompletionRow.schema(), self.config.shard_prompts, "prompts")
        if in_one_go(self.config.engine):
            rows, _ = as_they_end(self.ctx, shards, groups, self._stream)
        else:
            rows, _ = by_shard(self.ctx, shards, groups, self._shard)
        found = {(row.place, row.sample): row for row in rows}
        return [self._with(group, found) for group in groups if (group.place, group.rows[0].sample) in found]

    def _with(self, group: Group, found: Mapping[Name, CompletionRow]) -> Group:
        """The group after the round, whose rows are among those found."""
        rows = tuple(found[row.place, row.sample] for row in group.rows)
        segments = {row.sample: self._segments(group, old, row) for old, row in zip(group.rows, rows, strict=True)}
        return dataclasses.replace(group, rows=rows, segments=segments)

    def _segments(self, group: Group, old: CompletionRow, row: CompletionRow) -> tuple[SegmentRow, ...]:
        before, new = group.segments.get(row.sample, ()), len(row.token_ids) - len(old.token_ids)
        if not new:
            return before
        policy = self.ctx.inputs["policy"].digest
        if before and (before[-1].policy, before[-1].round) == (policy, self.config.round):
            # What was begun in this round has run to its end in it.
            return (*before[:-1], dataclasses.replace(before[-1], tokens=before[-1].tokens + new))
        segment = SegmentRow(
            place=row.place,
            sample=row.sample,
            number=len(before),
            tokens=new,
            policy=policy,
            round=self.config.round,
            version=self.version,
            began=group.began,
            began_at=group.began_at,
        )
        return (*before, segment)

    def _shard(self, groups: Sequence[Group]) -> list[CompletionRow]:
        return next(rows for _, rows in self._stream({0: groups}))

    def _stream(self, missing: Mapping[int, Sequence[Group]]) -> Iterator[tuple[int, list[CompletionRow]]]:
        """(number, rows) of shards, given by number, as the last completion of each ends."""
        asked = [(number, *ask) for number, groups in missing.items() for group in groups for ask in self._asked(group)]
        # Those that run to their end first: begun last, they would go on alone where all others have ended.
        asked.sort(key=lambda one: -one[2].max_tokens)
        requests = [request for _, _, request in asked]
        if self.engine is None:
            config = self.config
            self.engine = open_engine(self.ctx, config.engine, config.quantize, self.context, requests)
        left = {number: sum(number == one for one, _, _ in asked) for number in missing}
        found: dict[Name, CompletionRow] = {}
        for i, completions in self.engine.run(requests):
            number, rows, _ = asked[i]
            for row, completion in zip(rows, completions, strict=True):
                found[row.place, row.sample] = self._longer(row, completion)
            left[number] -= 1
            if not left[number]:
                before = [row for group in missing[number] for row in group.rows]
                yield number, [found.pop((row.place, row.sample), row) for row in before]

    def _asked(self, group: Group) -> list[tuple[list[CompletionRow], Request]]:
        """Rows of a group that go on, with the request for what they get: new ones together, begun ones one by one."""
        fresh = [row for row in group.rows if not len(row.token_ids)]
        asked = [(fresh, self._request(group, fresh[0], len(fresh)))] if fresh else []
        going_on = [row for row in group.rows if row.stop == OPEN and len(row.token_ids)]
        return asked + [([row], self._request(group, row, 1)) for row in going_on]

    def _request(self, group: Group, row: CompletionRow, samples: int) -> Request:
        from tuning.rollout.requests import Request, Sampling

        made = len(row.token_ids)
        room = self.config.max_tokens - made
        # What it gets now may be older than what it has.
        runs_out = min(group.version, self.version) < self.oldest
        # All requests of a round are there at once: arrays, as in the table, and no object for each token.
        pieces = [np.asarray(piece, np.int32) for piece in (row.prompt_ids, row.token_ids)]
        return Request(
            Numbers(np.concatenate(pieces)),
            room if self.tokens is None or runs_out else min(room, self.tokens),
            Sampling(temperature=self.config.temperature),
            self.eos,
            row.seed,
            group.began_at,
            samples,
            first_sample=row.sample,
            begun=made,
            name=row.prompt_id,
        )

    def _longer(self, row: CompletionRow, completion: Completion) -> CompletionRow:
        """The row with the tokens of a completion behind its own."""
        tokens = np.concatenate([np.asarray(row.token_ids, np.int32), np.asarray(completion.tokens, np.int32)])
        logps = np.concatenate([np.asarray(row.logprobs, np.float32), np.asarray(completion.logps, np.float32)])
        cut = completion.stop == "length" and len(tokens) < self.config.max_tokens
        return dataclasses.replace(
            row,
            token_ids=Numbers(tokens),
            logprobs=Numbers(logps),
            stop=OPEN if cut else completion.stop,
            policy=self.ctx.inputs["policy"].digest,
        )

    def told(self, row: CompletionRow) -> CompletionRow:
        """The row with its text, which rewards read: carried ones have none, nobody reads it."""
        return dataclasses.replace(row, text=self.tokenizer.decode([t for t in row.token_ids if t not in self.control]))


def spread(groups: Sequence[Group]) -> list[Group]:
    """The groups in such an order that those of each age are spread over all of it evenly.

    Optimizer steps follow the order of the table. By age the first would train on the round's own short completions
    alone, and the last on carried long ones.
    """
    of_age: dict[int, list[Group]] = {}
    for group in groups:
        of_age.setdefault(group.began, []).append(group)
    at = [((2 * i + 1) / (2 * len(alike)), -began, i) for began, alike in of_age.items() for i in range(len(alike))]
    return [of_age[-age][i] for _, age, i in sorted(at)]


def first_to_end(groups: Sequence[Group]) -> Group | None:
    """The oldest group where none is whole, to be run to its end: each round trains on something. None where one is.

    groups: after the round; of a process group those of process 0 count, which has all of them.
    """

    def of_lead() -> dict[str, Any] | None:
        if any(group.is_whole for group in groups):
            return None
        oldest = dataclasses.asdict(min(groups, key=lambda group: (group.began, group.began_at)))
        for row in oldest["rows"]:
            row |= {name: list(row[name]) for name in ("prompt_ids", "token_ids", "logprobs")}
        # Keys of JSON are text.
        return oldest | {"segments": list(oldest["segments"].items())}

    found = multihost.from_primary(of_lead)
    if found is None:
        return None
    rows = tuple(CompletionRow(**row) for row in found.pop("rows"))
    segments = {sample: tuple(SegmentRow(**one) for one in of_sample) for sample, of_sample in found.pop("segments")}
    return Group(rows, segments, **found)
