"""Explain a miss by the differences to the nearest artifact that an earlier run made of the node."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.flows.graph.build import Node
from rlhf.stages.contract.registry import stage as find_stage
from rlhf.stages.contract.signatures import source_file
from rlhf.stages.contract.source_archive import kept
from rlhf.stages.prepare.settings import ALONE
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.stages.store.keys import differences
from rlhf.stages.store.work import OUT

MOST_COMPARED = 20
"""Number of newest artifacts of a node that are compared; each is a manifest to read."""
LONGEST = 200
"""Shown characters of an error."""
MOST_LINES = 8
"""Shown changed lines of a module."""

FATES = {"new": "is read now and was not before", "gone": "is read no more"}
"""Descriptions of inputs that only one of two keys has."""

Record = Mapping[str, Any]


def reasons_of(
    store: Store, recipe: str, node: Node, parts: dict[str, Any], key: str, runs: Sequence[Record]
) -> tuple[list[str], str]:
    """Return why a node is a miss, a line for each part of its key that differs, and the run that it is compared with.

    runs: records, oldest first.
    """
    work = store.scratch / "work" / node.stage / key
    begun = [f"resumes from work in progress ({work})"] if _has_kept(work) else []
    entries = [(r, e) for r in reversed(runs) if (e := r["nodes"].get(node.name)) and e["stage"] == node.stage]
    same = [e for _, e in entries if e["key"] == key]
    if same:
        # Nothing of the key changed: the artifact is missing.
        if any("digest" in e for e in same):
            return ["its artifact is gone or damaged", *begun], ""
        if same[0].get("state") == "failed":
            error = str(same[0].get("error", "")).partition("\n")[0]
            return [f"failed last time: {error[:LONGEST]}"], ""
        return ["was not finished last time", *begun], ""
    entries = [(record, e) for record, e in entries if record["recipe"]["name"] == recipe and "digest" in e]
    if (found := _nearest(store, node, parts, entries)) is None:
        return ["changed; the artifact to compare with is gone" if entries else "never made", *begun], ""
    record, artifact = found
    # The run that made it, if its record is still there; others have only read it.
    made = str(artifact.manifest.get("run"))
    name = made if any(r["name"] == made for r in runs) else str(record["name"])
    return [*_described(store, node, artifact.manifest["key_parts"], parts), *begun], name


def _has_kept(work: Path) -> bool:
    """Whether a work folder has more than empty folders and the output of a killed try, which no other try reads."""
    return any(files for folder, _, files in os.walk(work) if f"/{OUT}." not in folder.removeprefix(str(work)))


def _nearest(
    store: Store, node: Node, parts: dict[str, Any], entries: Sequence[tuple[Record, Record]]
) -> tuple[Record, Artifact] | None:
    """Return the record and artifact of this node with the fewest differences in the key, the newest of equal ones."""
    newest: dict[str, Record] = {}
    for record, entry in entries:
        newest.setdefault(entry["key"], record)
    found = []
    for key, record in list(newest.items())[:MOST_COMPARED]:
        if artifact := store.get(node.stage, key):
            count = len(differences(*_moves_left_out(artifact.manifest["key_parts"], parts)))
            found.append((count, record, artifact))
    best = min(found, key=lambda one: one[0], default=None)
    return best and best[1:]


def _described(store: Store, node: Node, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the differences between the parts of two keys, in words."""
    texts: dict[str, dict[str, str]] | None = None
    lines: list[str] = []
    reached: list[str] = []
    old, new = (parts | {"config": as_read(parts["config"])} for parts in (old, new))
    for line in differences(*_moves_left_out(old, new)):
        section, _, rest = line.partition(".")
        place, _, change = rest.partition(": ")
        if line.startswith("seed: "):
            # The seed of a stage is derived; its digits are meaningless.
            lines.append("seed: another, which follows from the recipe's `seed`")
        elif section == "inputs":
            source = node.inputs[place].node if place in node.inputs else ""
            named = f"input {place}{f' ({source})' if source else ''}"
            lines.append(f"{named} {FATES.get(_fate(change), 'has other content')}")
        elif section == "code" or (section == "sources" and "module:" in rest):
            module, _, change = rest.rpartition("module:")[2].partition(": ")
            lines.append(f"code {module} {_fate(change)}")
            texts = kept(store, old) if texts is None else texts
            lines += changed_lines(texts.get(module), source_file(module))
        elif section.startswith("imports:"):
            lines.append("an import reaches another module")
        elif section == "sources" and rest.startswith("reached from "):
            reached.append(f"code that {place.removeprefix('reached from ')} imports changed")
        elif section == "sources" and (file := _FILE.fullmatch(rest)):
            lines.append(f"{_named(node, *file.groups()[:3])} {_fate(file[4], 'has other content')}")
        elif section == "config":
            lines.append(setting(node.stage, rest))
        else:
            lines.append(line)
    # What a user's module reaches changes with the module itself.
    return lines or reached


def as_read(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of data without those of a single source if `sources` replaces them."""
    return {name: value for name, value in data.items() if not (data.get("sources") and name in ALONE)}


def setting(stage: str, rest: str) -> str:
    """Return a setting's change with its place in the recipe, which has a section for the environment."""
    if rest.startswith(("environment.", "environment:")):
        return rest
    return f"{find_stage(stage).section or stage}.{rest}"


def changed_lines(before: Mapping[str, str] | None, path: Path | None) -> list[str]:
    """Return the new and removed lines of a module's file; empty if its old or new text is missing.

    before: the old `file` and `text`.
    """
    if path is None or before is None:
        return []
    return lines_between(before["text"], path.read_text(encoding="utf-8"), path.name)


def lines_between(old_text: str, new_text: str, name: str) -> list[str]:
    """Return at most `MOST_LINES` new and removed lines of a file with their numbers, and the number of further ones.

    name: of the file.
    """
    old, new = old_text.splitlines(), new_text.splitlines()
    shown = []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            shown += [f"  {name}:{at + 1} - {old[at]}" for at in range(i, j)]
            shown += [f"  {name}:{at + 1} + {new[at]}" for at in range(k, m)]
    more = len(shown) - MOST_LINES
    return [*shown[:MOST_LINES], *([f"  and {more} more changed lines of {name}"] if more > 0 else [])]


_FILE = re.compile(r"(?:(source) (\d+): )?(file \d+): (.*)", re.DOTALL)
"""The names of files in keys of `rlhf.stages.prepare` and `rlhf.stages.base`."""


def _named(node: Node, kind: str | None, number: str, file: str) -> str:
    """Return the name of a source's file, such as `data.source data/*.jsonl: file 2`, or just that of a single file."""
    if kind is None or not hasattr(node.config, "all_sources"):
        return file
    source = node.config.all_sources()[int(number) - 1].source
    return f"data.source {source}" if Path(source).suffix and "*" not in source else f"data.source {source}: {file}"


def _fate(change: str, else_: str = "changed") -> str:
    """Return the state of a module or file by a line of `differences`."""
    return next((word for word in ("new", "gone") if change.startswith(word)), else_)


def _moves_left_out(old: dict[str, Any], new: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parts of two keys without modules whose content is in both, under any name."""
    both = set(old["code"].values()) & set(new["code"].values())
    codes = [{name: content for name, content in p["code"].items() if content not in both} for p in (old, new)]
    # A module that changed has changed links too; links say something only where no module changed.
    hidden = {"imports": ""} if any(codes) else {}
    return old | {"code": codes[0]} | hidden, new | {"code": codes[1]} | hidden
