"""Laws of rounds: each is made of its own parts and goes on from the one before, whether made, resumed or cached."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.stages.auditing.laws import Finding, Law
from rlhf.stages.auditing.run import ROUND, AuditedRun, Round
from rlhf.stages.store.artifacts import Artifact


def made_of_own(run: AuditedRun, finding: Finding) -> None:
    """Scores are of the round's rollouts, and its update reads these, from the policy where the last round ended.

    A node that was cached, or made by an earlier try of the run, was made from the same: its manifest says of what.
    """
    last: Round | None = None
    for round_ in run.rounds:
        for reader, artifact, inputs in _readers(round_, last):
            for role, expected in inputs.items():
                source = artifact.manifest["inputs"].get(role)
                found = "nothing" if source is None else source["digest"]
                if expected is not None:
                    case = f"{reader} has {found[:12]} as {role}, {round_.name} has {expected.digest[:12]}"
                    finding.check(found == expected.digest, case)
        last = round_
    # A finished round means that the rounds before it are finished, in this run's record.
    finished = {int(match[1]) for name in run.entries if (match := ROUND.fullmatch(name)) and match[2] == "update"}
    for number in sorted(set(range(max(finished, default=-1))) - finished):
        finding.broken.append(f"round-{number:03d}.update is not in the record, that of round {max(finished)} is")


def _readers(round_: Round, last: Round | None) -> Iterator[tuple[str, Artifact, dict[str, Artifact | None]]]:
    """The nodes of a round, and for each role of a node the artifact that belongs there, as far as the run has it."""
    tables: dict[str, Artifact | None] = {}
    for number, part in enumerate(round_.sampled):
        if number:
            yield part.name, part.rollouts, dict(tables)
            tables |= {f"refill_{number}": part.rollouts, f"refill_{number}_scores": part.scores}
        else:
            tables |= {"rollouts": part.rollouts, "scores": part.scores}
    for part in round_.tables:
        if part.scores is not None:
            yield f"{part.name} (its scores)", part.scores, {"rollouts": part.rollouts}
    if round_.greedy is not None:
        yield round_.greedy.name, round_.greedy.rollouts, {"rollouts": round_.sampled[0].rollouts}
        tables["greedy_scores"] = round_.greedy.scores
    if round_.update is not None:
        before = last.update if last is not None and last.number + 1 == round_.number else None
        yield f"{round_.name}.update", round_.update, tables | {"policy": before}


def greedy_of_its_prompts(round_: Round, finding: Finding) -> None:
    """ReMax's baselines: one completion of each prompt of the round, at temperature 0, of the policy that sampled."""
    sampled, greedy = round_.sampled[0], round_.greedy
    if greedy is None:
        return
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
    Law("rounds", "each round is made of its own parts and goes on from the last", "inputs", made_of_own),
    Law(
        "greedy",
        "each prompt of a ReMax round has one greedy baseline",
        "baselines",
        greedy_of_its_prompts,
        "rounds",
    ),
]
