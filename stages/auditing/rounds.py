"""Laws of rounds: each round consists of its own parts and continues the previous one, computed or cached."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.stages.auditing.laws import Finding, Law
from rlhf.stages.auditing.run import ROUND, AuditedRun, Round
from rlhf.stages.store.artifacts import Artifact


def check_inputs(run: AuditedRun, finding: Finding) -> None:
    """Scores are of the round's rollouts; its update reads these, and starts at the previous round's policy.

    The manifest of a cached node, or one of an earlier try of the run, names its inputs too.
    """
    last: Round | None = None
    for round_ in run.rounds:
        for reader, artifact, inputs in _readers(round_, last):
            for role, expected in inputs.items():
                digest = artifact.manifest["inputs"].get(role, {}).get("digest", "nothing")
                if expected is not None:
                    case = f"{reader} has {digest[:12]} as {role}, {round_.name} has {expected.digest[:12]}"
                    finding.check(digest == expected.digest, case)
        last = round_
    # If a round is finished, the record has all earlier ones.
    finished = {int(match[1]) for name in run.entries if (match := ROUND.fullmatch(name)) and match[2] == "update"}
    for number in sorted(set(range(max(finished, default=-1))) - finished):
        finding.broken.append(f"round-{number:03d}.update is not in the record, that of round {max(finished)} is")


def _readers(round_: Round, last: Round | None) -> Iterator[tuple[str, Artifact, dict[str, Artifact | None]]]:
    """Yield each node of a round with its expected inputs by role; None where the run lacks them."""
    first, *refills = round_.sampled
    tables: dict[str, Artifact | None] = {"rollouts": first.artifact, "scores": first.scores}
    for number, refill in enumerate(refills, 1):
        yield refill.name, refill.artifact, dict(tables)
        tables |= {f"refill_{number}": refill.artifact, f"refill_{number}_scores": refill.scores}
    for table in round_.scored:
        assert table.scores is not None
        yield f"{table.name} (its scores)", table.scores, {"rollouts": table.artifact}
    if round_.greedy is not None:
        yield round_.greedy.name, round_.greedy.artifact, {"rollouts": first.artifact}
        tables["greedy_scores"] = round_.greedy.scores
    if round_.update is not None:
        before = last.update if last is not None and last.number + 1 == round_.number else None
        yield f"{round_.name}.update", round_.update, tables | {"policy": before}


def check_greedy(round_: Round, finding: Finding) -> None:
    """ReMax's baselines: one completion of each prompt of the round, at temperature 0, by the policy that sampled."""
    sampled, greedy = round_.sampled[0], round_.greedy
    if greedy is None:
        return
    asked = {row.place: (row.prompt_id, row.prompt_ids) for row in sampled.rows}
    seen: set[int] = set()
    for row in greedy.rows:
        faults = {
            "is a second one": row.place in seen,
            f"has the number {row.sample}": row.sample != 0,
            f"was sampled at temperature {row.temperature:g}": row.temperature != 0,
            "has another prompt than the round": (row.prompt_id, row.prompt_ids) != asked.get(row.place),
            f"is of policy {row.policy[:12]}, the round of {sampled.policy[:12]}": row.policy != sampled.policy,
        }
        seen.add(row.place)
        fault = ", ".join(text for text, applies in faults.items() if applies)
        finding.check(not fault, f"{greedy.name}, place {row.place}: {fault}")
    for missing in sorted(asked.keys() - seen)[:1]:
        finding.broken.append(f"{greedy.name}: place {missing} has no baseline")


LAWS = [
    Law("rounds", "each round consists of its own parts and continues the previous one", "inputs", check_inputs),
    Law("greedy", "each prompt of a ReMax round has one greedy baseline", "baselines", check_greedy, "rounds"),
]
