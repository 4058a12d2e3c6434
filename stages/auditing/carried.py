"""Laws of partial rollouts: each token has its policy, none is older than it may be, and no completion is lost.

A completion is named here by where it began: round, place there, sample. Its place changes from round to round. What
is allowed in a round is computed from the recipe: what the graph told a stage is among what is looked at.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from stages.auditing.laws import Finding, Law, OfRounds
from stages.auditing.run import AuditedRun, Round, Sampled, tokens_digest
from tuning.rollout.segments import SegmentRow
from tuning.rows import CompletionRow

STAGE = "partial"
Origin = tuple[int, int, int]
Segments = Mapping[tuple[int, int], Sequence[SegmentRow]]
"""Those of each completion by place and sample, in order."""


@dataclasses.dataclass(frozen=True)
class _Left:
    """What a round has left of a completion."""

    tokens: int
    content: bytes
    """A digest of the tokens and of their log-probabilities."""


@dataclasses.dataclass(frozen=True)
class _Allowed:
    """What the recipe allows in a round."""

    version: int
    """Updates before the policy that samples."""
    lag: int
    """The largest of a token that the round trains on, or leaves to the next."""
    tokens: int | None
    """How many a completion gets; None: all, and none is left."""

    @classmethod
    def of(cls, run: AuditedRun, number: int) -> _Allowed:
        """Of round `number`; rounds before a fork have the settings of another run."""
        recipe = run.record["recipe"]
        earlier = (recipe.get("fork") or {}).get("earlier") or ()
        rl = next((part["rl"] for part in earlier if number < part["until"]), recipe.get("rl") or {})
        partial, staleness = rl.get("partial"), rl.get("staleness", 0)
        version = max(0, number - staleness)
        if not partial:
            return cls(version, staleness, None)
        tokens = partial["round_tokens"]
        lag = partial.get("max_lag")
        if lag is None:
            lag = staleness + math.ceil(rl["rollout"]["max_tokens"] / tokens) - 1
        return cls(version, lag, tokens if number + 1 < rl["rounds"] else None)


def _segments(own: Sampled) -> Segments:
    found: dict[tuple[int, int], list[SegmentRow]] = {}
    for row in own.segments:
        found.setdefault((row.place, row.sample), []).append(row)
    return {name: sorted(rows, key=lambda row: row.number) for name, rows in found.items()}


def _with_segments(own: Sampled) -> Iterator[tuple[str, CompletionRow, Sequence[SegmentRow]]]:
    """(case, row, segments) of each completion of a round, of those that are carried too."""
    segments = _segments(own)
    for row in (*own.rows, *own.carried):
        yield f"{own.name}, place {row.place}, sample {row.sample}", row, segments.get((row.place, row.sample), ())


def each_token_its_policy(run: AuditedRun) -> OfRounds:
    """The segments of a completion are its tokens, each of the policy and version that its round sampled from, without
    a round between them; its seed is that of the round in which it began."""
    finding = Finding("completions")
    known: dict[int, tuple[str, int, int]] = {}
    trained: dict[int, str] = {}
    while (round_ := (yield)) is not None:
        own = round_.sampled[0]
        manifest = own.rollouts.manifest
        if round_.update is not None:
            trained[round_.number] = round_.update.manifest["inputs"]["policy"]["digest"]
            trained[round_.number + 1] = round_.update.digest
        if own.rollouts.stage != STAGE:
            continue
        policy, version = manifest["inputs"]["policy"]["digest"], _Allowed.of(run, round_.number).version
        known[round_.number] = policy, version, manifest["seed"]
        _check_version(run, own, version, policy, trained, finding)
        for case, row, segments in _with_segments(own):
            if missing := {one.round for one in segments} - known.keys():
                finding.left_out.append(f"{case}: round {min(missing)}, which sampled some of it, is not in this run")
                continue
            fault = _fault(row, segments, known, round_.number)
            finding.check(not fault, f"{case}: {fault}")
        if strays := _segments(own).keys() - {(row.place, row.sample) for row in (*own.rows, *own.carried)}:
            finding.broken.append(f"{own.name}: place {min(strays)[0]} has segments and no completion")
    return finding


def _check_version(
    run: AuditedRun, own: Sampled, version: int, policy: str, trained: Mapping[int, str], finding: Finding
) -> None:
    """A version is a number of updates of this run: the policy is what the next one of these starts from."""
    # What a rescored run trains never sampled.
    if run.record["recipe"]["rl"].get("rollouts_from"):
        return
    if version not in trained:
        finding.left_out.append(f"{own.name}: the updates before and behind its policy are not in this run")
    elif trained[version] != policy:
        told = f"{own.name} sampled from policy {policy[:12]}, update {version} starts from {trained[version][:12]}"
        finding.broken.append(f"{told}: expected one policy")


def _fault(
    row: CompletionRow, segments: Sequence[SegmentRow], known: Mapping[int, tuple[str, int, int]], number: int
) -> str:
    """What of the segments of a completion is not so; empty where all is."""
    if sum(one.tokens for one in segments) != len(row.token_ids) or not segments:
        return f"{len(row.token_ids)} tokens, its segments have {sum(one.tokens for one in segments)}"
    first, last = segments[0], segments[-1]
    other = [one.round for one in segments if (one.policy, one.version) != known[one.round][:2] or one.tokens < 1]
    rounds, numbers = [one.round for one in segments], [one.number for one in segments]
    faults = {
        f"what rounds {other} gave it names other policies than these sampled from": bool(other),
        f"its segments are of rounds {rounds}": rounds != list(range(first.began, first.began + len(rounds))),
        f"they are numbered {numbers}": numbers != list(range(len(numbers))),
        "they name several beginnings": len({(one.began, one.began_at) for one in segments}) > 1,
        f"it names policy {row.policy[:12]}, its last segment {last.policy[:12]}": row.policy != last.policy,
        f"its seed {row.seed} is not that of round {first.began}": row.seed != known[first.began][2],
        f"it goes on, and round {number} has given it nothing": row.stop == "carried" and last.round != number,
    }
    return ", ".join(said for said, is_so in faults.items() if is_so)


def each_round_its_tokens(run: AuditedRun) -> OfRounds:
    """A completion that goes on got just the tokens of a round from each, and one that ended no more; but the group
    that would become too old, and the oldest one where no other is whole, run to their end."""
    finding = Finding("completions")
    while (round_ := (yield)) is not None:
        own = round_.sampled[0]
        if own.rollouts.stage != STAGE:
            continue
        allowed = [_Allowed.of(run, number) for number in range(round_.number + 1)]
        to_end = _run_to_their_end(own, round_.number, allowed[round_.number].lag)
        for case, row, segments in _with_segments(own):
            fault = _other_amount(row, segments, allowed, row.place in to_end)
            finding.check(not fault, f"{case}: {fault}")
    return finding


def _other_amount(row: CompletionRow, segments: Sequence[SegmentRow], allowed: Sequence[_Allowed], to_end: bool) -> str:
    """Which round gave a completion more or fewer tokens than it should have; empty where none has.

    allowed: of each round, up to that of the table. to_end: whether in this its group may have got more.
    """
    for i, one in enumerate(segments):
        most = allowed[one.round].tokens
        goes_on = i + 1 < len(segments) or row.stop == "carried"
        if goes_on and one.tokens != most:
            return f"it has {one.tokens} tokens of round {one.round} and goes on, expected {most or 'its end'}"
        longer = to_end and one.round == len(allowed) - 1
        if not goes_on and most is not None and one.tokens > most and not longer:
            return f"it ended with {one.tokens} tokens of round {one.round}, expected {most} at most"
    return ""


def _run_to_their_end(own: Sampled, number: int, lag: int) -> set[int]:
    """The places whose completions round `number` may give all that they have left.

    lag: the largest that it may leave to the next round.
    """
    groups: dict[int, list[SegmentRow]] = {}
    for row in own.segments:
        groups.setdefault(row.place, []).append(row)
    found = {place for place, rows in groups.items() if number + 1 - min(row.version for row in rows) > lag}
    whole = {row.place for row in own.rows}
    oldest = min(groups, key=lambda place: (groups[place][0].began, groups[place][0].began_at), default=None)
    return found | (whole if whole == {oldest} else set())


def none_is_too_old(run: AuditedRun) -> OfRounds:
    """The oldest token is behind the policy that is trained, or will be in the next round, by no more updates than
    allowed; the mean and the largest lag are those of the round's metrics."""
    finding = Finding("completions")
    while (round_ := (yield)) is not None:
        own, number = round_.sampled[0], round_.number
        metrics = own.rollouts.metrics
        if own.rollouts.stage != STAGE:
            continue
        carrying = _Allowed.of(run, number).lag
        # What was carried into this round was so by the bound of the round before.
        bound = max(carrying, _Allowed.of(run, number - 1).lag if number else 0)
        lags, tokens = [], []
        ended = {(row.place, row.sample) for row in own.rows}
        for name, segments in _segments(own).items():
            trained = name in ended
            lag = number + (not trained) - min(one.version for one in segments)
            case = f"{own.name}, place {name[0]}, sample {name[1]}: its first tokens are {lag} updates old"
            finding.check(lag <= (bound if trained else carrying), f"{case}, allowed are {carrying}")
            lags += [number - one.version for one in segments if trained]
            tokens += [one.tokens for one in segments if trained]
        mean = float(np.average(lags, weights=tokens)) if tokens else math.nan
        largest = max(lags, default=0)
        right = math.isclose(metrics["lag"], mean, rel_tol=1e-9) and metrics["lag_max"] == largest
        told = f"{metrics['lag']} and {metrics['lag_max']}"
        if not right:
            finding.broken.append(f"{own.name}: lags of {told} in its metrics, its segments say {mean} and {largest}")
    return finding


def none_is_lost(run: AuditedRun) -> OfRounds:
    """What a round leaves under way the next one has, from the same tokens on; what began ends in one round's table,
    once, with its whole group; the last round leaves nothing."""
    finding = Finding("completions")
    # Only of the round before: what was trained on in it is not among what it has left.
    left: dict[Origin, _Left] | None = {}
    last: Round | None = None
    while (round_ := (yield)) is not None:
        if round_.number != (0 if last is None else last.number + 1):
            left = None
        left, last = _next_left(round_, left, finding), round_
    if last is not None and left:
        total = (run.record["recipe"].get("rl") or {}).get("rounds")
        case = f"{last.name} is the last round, and leaves {len(left)} completions, such as {_named(min(left))}"
        if last.number + 1 == total:
            finding.broken.append(case)
        else:
            finding.left_out.append(f"{last.name} leaves {len(left)} completions to a round that is not in this run")
    return finding


def _next_left(round_: Round, left: Mapping[Origin, _Left] | None, finding: Finding) -> dict[Origin, _Left]:
    """What a round leaves, once it was compared with what the one before has left; None: nobody knows what."""
    own, number = round_.sampled[0], round_.number
    found = _by_origin(own) if own.rollouts.stage == STAGE else {}
    for origin in sorted((left or {}).keys() - found.keys()):
        finding.check(False, f"{round_.name} has not {_named(origin)}, which the round before has left")
    if left is None and (unknown := sum(origin[0] < number for origin in found)):
        finding.left_out.append(f"{round_.name}: the round before it, which left {unknown}, is not in this run")
    for origin, row in found.items():
        if left is not None or origin[0] == number:
            fault = _unlike(origin, row, (left or {}).get(origin), number)
            finding.check(not fault, f"{own.name}, place {row.place}: {_named(origin)} {fault}")
    mixed = {row.place for row in own.rows} & {row.place for row in own.carried}
    if mixed:
        finding.broken.append(f"{own.name}: place {min(mixed)} is trained on and carried: its group is not whole")
    ended = {(row.place, row.sample) for row in own.rows}
    return {origin: _left(row) for origin, row in found.items() if (row.place, row.sample) not in ended}


def _by_origin(own: Sampled) -> dict[Origin, CompletionRow]:
    """The completions of a round by where they began. Raises ValueError where two have one beginning."""
    found: dict[Origin, CompletionRow] = {}
    for case, row, segments in _with_segments(own):
        if not segments:
            raise ValueError(f"{case} has no segments")
        origin = segments[0].began, segments[0].began_at, row.sample
        if origin in found:
            raise ValueError(f"{case} and place {found[origin].place} are both {_named(origin)}")
        found[origin] = row
    return found


def _unlike(origin: Origin, row: CompletionRow, left: _Left | None, number: int) -> str:
    """How a completion of round `number` differs from what was left of it; empty where it does not."""
    if origin[0] == number:
        return "" if origin[1] == row.place else "began at another place than it has"
    if left is None:
        return "was not left by the round before"
    same = len(row.token_ids) >= left.tokens and _left(row, left.tokens) == left
    return "" if same else f"has other first {left.tokens} tokens, or log-probabilities, than were left"


def _left(row: CompletionRow, count: int | None = None) -> _Left:
    """The first `count` tokens of a row, or all."""
    tokens, logps = np.asarray(row.token_ids)[:count], np.asarray(row.logprobs, np.float32)[:count]
    return _Left(len(tokens), tokens_digest(tokens.tolist()) + tokens_digest(logps.view(np.int32).tolist()))


def _named(origin: Origin) -> str:
    return f"the completion of round {origin[0]}, place {origin[1]}, sample {origin[2]}"


LAWS = [
    Law("segments", "each token of a carried completion names the policy that sampled it", each_token_its_policy,
        over="rounds"),
    Law("amounts", "a round gives a completion as many tokens as rl.partial says", each_round_its_tokens,
        over="rounds"),
    Law("lag", "no token is older than rl.partial allows when it is trained on", none_is_too_old, over="rounds"),
    Law("carried", "what a round leaves under way the next goes on with: none is lost or twice", none_is_lost,
        over="rounds"),
]  # fmt: skip
