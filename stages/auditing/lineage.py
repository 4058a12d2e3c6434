"""Laws of lineage: artifacts exist, and were made from the recorded inputs."""

from __future__ import annotations

from rlhf.stages.auditing.laws import Finding, Law
from rlhf.stages.auditing.run import AuditedRun
from rlhf.stages.store.artifacts import content_digest


def check_artifacts(run: AuditedRun, finding: Finding) -> None:
    """Each finished node's artifact is in the store, with the digest of the record."""
    for name, entry in run.entries.items():
        case = f"{name} with digest {entry['digest'][:12]} is missing or damaged; `rlhf run` recomputes it"
        finding.check(name in run.artifacts, case)


def check_content(run: AuditedRun, finding: Finding) -> None:
    """The digest of each artifact is that of its list of files."""
    for name, artifact in run.artifacts.items():
        expected = content_digest(artifact.manifest["files"])
        finding.check(expected == artifact.digest, f"{name}: its files have the digest {expected[:12]}, not its own")


def check_lineage(run: AuditedRun, finding: Finding) -> None:
    """Each input that a manifest names is an artifact of the store with that digest."""
    for name, artifact in run.artifacts.items():
        for role, source in artifact.manifest["inputs"].items():
            place = f"{name} was made from {role} {source['stage']}/{source['key'][:12]}"
            case = f"{place} with digest {source['digest'][:12]}, which is gone"
            finding.check(run.stored(source) is not None, case)


def check_fork(run: AuditedRun, finding: Finding) -> None:
    """A fork's last shared stage has the digest that its recipe names."""
    if (fork := run.record["recipe"].get("fork")) is not None:
        digest = run.entries.get(fork["node"], {}).get("digest", "none")
        case = f"{fork['node']} is {digest[:12]}, the recipe names {fork['digest'][:12]} of run {fork['run']}"
        finding.check(digest == fork["digest"], case)


LAWS = [
    Law("artifacts", "every artifact of the record is in the store, with its digest", "artifacts", check_artifacts),
    Law("content", "the digest of an artifact is that of its files", "artifacts", check_content),
    Law(
        "lineage", "every input is an artifact with the digest that its consumer was made from", "inputs", check_lineage
    ),
    Law("fork", "a fork continues from the artifact that its recipe names", "forks", check_fork),
]
