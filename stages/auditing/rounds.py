"""Laws of rounds: each is made of its own parts and goes on from the one before, whether made, resumed or cached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stages.auditing.laws import Finding, Law, OfRounds
from stages.auditing.run import ROUND, AuditedRun, Round, Sampled
from stages.store.artifacts import Artifact

Read = tuple[str, str, Artifact, Artifact]
"""A node, a role of it, what it has there by its own manifest, and the run's artifact that belongs there."""


def made_of_own(run: AuditedRun) -> OfRounds:
    """Scores are of the round's rollouts, and its update reads these, from the policy where the last round ended.

    A node that was cached, or made by an earlier try of the run, was made from the same: its manifest says of what.
    """
    finding = Finding("inputs")
    last: Round | None = None
    while (round_ := (yield)) is not None:
        for reader, role, artifact, expected in _reads(round_, last):
            name = reader.split(".")[0]
            source = artifact.manifest["inputs"].get(role)
            found = "nothing" if source is None else source["digest"]
            case = f"{reader} has {found[:12]} as {role}, {name} has {expected.digest[:12]}"
            finding.check(found == expected.digest, case)
        last = round_
    _all_there(run, finding)
    return finding


def _reads(round_: Round, last: Round | None) -> Iterator[Read]:
    """What each node of a round has to read of this round, and of the last."""
    own = round_.sampled[0]
    for table in round_.scored:
        assert table.scores is not None
        yield f"{table.name} (its scores)", "rollouts", table.scores, table.rollouts
    refills = list(enumerate(round_.sampled[1:], start=1))
    for number, refill in refills:
        yield from _of_round(refill.name, refill.rollouts, own, [r for k, r in refills if k < number])
    if round_.greedy is not None:
        yield round_.greedy.name, "rollouts", round_.greedy.rollouts, own.rollouts
    if round_.update is None:
        return
    update = f"{round_.name}.update"
    yield from _of_round(update, round_.update, own, [refill for _, refill in refills])
    if round_.greedy is not None and round_.greedy.scores is not None:
        yield update, "greedy_scores", round_.update, round_.greedy.scores
    if last is not None and last.update is not None and last.number + 1 == round_.number:
        yield update, "policy", round_.update, last.update


def _of_round(name: str, reader: Artifact, own: Sampled, refills: Iterable[Sampled]) -> Iterator[Read]:
    """The round's own table and its refills, as a refill and the update read them."""
    yield name, "rollouts", reader, own.rollouts
    if own.scores is not None:
        yield name, "scores", reader, own.scores
    for number, refill in enumerate(refills, start=1):
        yield name, f"refill_{number}", reader, refill.rollouts
        if refill.scores is not None:
            yield name, f"refill_{number}_scores", reader, refill.scores


def _all_there(run: AuditedRun, finding: Finding) -> None:
    """A finished round means that the rounds before it are finished, in this run's record."""
    finished = {int(match[1]) for name in run.entries if (match := ROUND.fullmatch(name)) and match[2] == "update"}
    for number in sorted(set(range(max(finished, default=-1))) - finished):
        finding.broken.append(f"round-{number:03d}.update is not in the record, that of round {max(finished)} is")


def greedy_of_its_prompts(run: AuditedRun) -> OfRounds:
    """ReMax's baselines: one completion of each prompt of the round, at temperature 0, of the policy that sampled."""
    finding = Finding("baselines")
    while (round_ := (yield)) is not None:
        if round_.greedy is not None:
            _baselines(round_.sampled[0], round_.greedy, finding)
    return finding


def _baselines(sampled: Sampled, greedy: Sampled, finding: Finding) -> None:
    asked = {row.place: (row.prompt_id, row.prompt_ids) for row in sampled.rows}
    policy = sampled.rollouts.manifest["inputs"]["policy"]["digest"]
    seen: set[int] = set()
    for row in greedy.rows:
        place = f"{greedy.name}, place {row.place}"
        faults = {
            "is a second one": row.place in seen,
            f"has the number {row.sample}": row.sample != 0,
            f"was sampled at temperature {row.temperature:g}": row.temperature != 0,
            "has another prompt than the round": (row.prompt_id, row.prompt_ids) != asked.get(row.place),
            f"is of policy {row.policy[:12]}, the round of {policy[:12]}": row.policy != policy,
        }
        seen.add(row.place)
        finding.check(not any(faults.values()), f"{place}: {', '.join(f for f, is_so in faults.items() if is_so)}")
    for lost in sorted(asked.keys() - seen)[:1]:
        finding.broken.append(f"{greedy.name}: place {lost} has no baseline")


LAWS = [
    Law("rounds", "each round is made of its own parts and goes on from the last", made_of_own, over="rounds"),
    Law("greedy", "each prompt of a ReMax round has one greedy baseline", greedy_of_its_prompts, over="rounds"),
]
