"""Laws of lineage: what a run names is there, and was made from what it says."""

from __future__ import annotations

from rlhf.stages.auditing.laws import Finding, Law
from rlhf.stages.auditing.run import AuditedRun
from rlhf.stages.store.artifacts import content_digest


def is_there(run: AuditedRun, finding: Finding) -> None:
    """Each finished node's artifact is in the store, with the digest of the record."""
    for name, entry in run.entries.items():
        case = f"{name} with digest {entry['digest'][:12]} is gone or damaged; `rlhf run` makes it again"
        finding.check(name in run.artifacts, case)


def lists_its_files(run: AuditedRun, finding: Finding) -> None:
    """The digest of each artifact is that of its list of files."""
    for name, artifact in run.artifacts.items():
        right = content_digest(artifact.manifest["files"])
        finding.check(right == artifact.digest, f"{name}: its files have the digest {right[:12]}, not its own")


def made_from(run: AuditedRun, finding: Finding) -> None:
    """Each input that a manifest names is an artifact of the store with that digest."""
    for name, artifact in run.artifacts.items():
        for role, source in artifact.manifest["inputs"].items():
            found = run.store.with_digest(source["stage"], source["key"], source["digest"])
            place = f"{name} was made from {role} {source['stage']}/{source['key'][:12]}"
            finding.check(found is not None, f"{place} with digest {source['digest'][:12]}, which is gone")


def has_its_bytes(run: AuditedRun, finding: Finding) -> None:
    """Each file of each artifact has the checksum of the manifest."""
    for name, artifact in run.artifacts.items():
        fault = run.store.verify(artifact)
        finding.check(fault is None, f"{name}: {fault}; `rlhf verify` sets it aside")


def goes_on_from_what_it_names(run: AuditedRun, finding: Finding) -> None:
    """A fork's last shared stage has the digest that its recipe names."""
    fork = run.record["recipe"].get("fork")
    if fork is None:
        return
    found = run.entries.get(fork["node"], {}).get("digest", "none")
    case = f"{fork['node']} is {found[:12]}, the recipe goes on from {fork['digest'][:12]} of run {fork['run']}"
    finding.check(found == fork["digest"], case)


LAWS = [
    Law("artifacts", "what the record names is in the store, as it was used", "artifacts", is_there),
    Law("content", "the digest of an artifact is that of its files", "artifacts", lists_its_files),
    Law("lineage", "every input is an artifact with the digest that its consumer was made from", "inputs", made_from),
    Law("fork", "a fork goes on from the artifact that its recipe names", "forks", goes_on_from_what_it_names),
    Law("checksums", "every file has the bytes that were written", "artifacts", has_its_bytes, deep=True),
]
