"""Explain a miss by the differences to the nearest artifact that an earlier run made of the node."""

from __future__ import annotations

import difflib
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

MOST_COMPARED = 20
"""Artifacts of a node that are compared, the newest: each is a manifest to read."""
FAR = 8
"""Differences from which on an artifact of another recipe is no comparison."""
LONGEST = 200
"""Characters of an error that are shown."""
MOST_LINES = 8
"""Changed lines of a module that are shown."""

FATES = {"new": "is read now and was not before", "gone": "is read no more"}
"""Of inputs that only one of two keys has."""

Record = Mapping[str, Any]


def reasons_of(
    store: Store, recipe: str, node: Node, parts: dict[str, Any], key: str, runs: Sequence[Record]
) -> tuple[list[str], str]:
    """Why a node is a miss, a line for each part of its key that differs, and the run that it is compared with.

    runs: records, oldest first.
    """
    work = store.scratch / "work" / node.stage / key
    begun = [f"goes on from work in progress ({work})"] if work.exists() and any(work.iterdir()) else []
    entries = [(r, e) for r in reversed(runs) if (e := r["nodes"].get(node.name)) and e["stage"] == node.stage]
    same = [e for _, e in entries if e["key"] == key]
    if same:
        # Nothing of the key changed: the artifact is missing.
        if any("digest" in e for e in same):
            return ["its artifact is gone or damaged", *begun], ""
        if same[0].get("state") == "failed":
            return [f"failed last time: {_first_line(same[0].get('error', ''))}"], ""
        return ["was not finished last time", *begun], ""
    found, others = _nearest(store, recipe, node, parts, entries)
    if found is None:
        ours = any(r["recipe"]["name"] == recipe and "digest" in e for r, e in entries)
        never = others or "never made"
        return ["changed; the artifact that would say what is gone" if ours else never, *begun], ""
    record, artifact = found
    # The run that made it, where it is still known: others have only read it.
    made = str(artifact.manifest.get("run"))
    name = made if any(r["name"] == made for r in runs) else str(record["name"])
    return [*_told(store, node, artifact.manifest["key_parts"], parts), *begun], name


def beside_inputs(store: Store, node: Node, artifact: Artifact, parts: dict[str, Any]) -> list[str]:
    """What differs between an artifact of a node and the parts of its key that are known before its inputs are, a line
    for each."""
    old: dict[str, Any] = artifact.manifest["key_parts"]
    waiting = node.inputs.keys() - parts["inputs"].keys()
    now = [f"input {name} ({node.inputs[name].node}) {FATES['new']}" for name in sorted(waiting - old["inputs"].keys())]
    known = {name: digest for name, digest in old["inputs"].items() if name not in waiting}
    return [*_told(store, node, old | {"inputs": known}, parts), *now]


def _first_line(error: str) -> str:
    """The error of a record's entry without the names of the classes around it, cut to a line."""
    text = error.partition("\n")[0]
    while (parts := text.partition(": "))[0].isidentifier() and parts[0][:1].isupper() and parts[2]:
        text = parts[2]
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _nearest(
    store: Store, recipe: str, node: Node, parts: dict[str, Any], entries: Sequence[tuple[Record, Record]]
) -> tuple[tuple[Record, Artifact] | None, str]:
    """The artifact, of those that runs made of this node, from which the fewest parts of the key differ; and what is
    to say where there is none but others, whose many differences say nothing or which are gone."""
    keys: set[str] = set()
    others = ""
    found: list[tuple[int, bool, int, Record, Artifact]] = []
    for age, (record, entry) in enumerate(entries):
        if "digest" not in entry or entry["key"] in keys or len(keys) == MOST_COMPARED:
            continue
        keys.add(entry["key"])
        artifact = store.get(node.stage, entry["key"])
        if artifact is not None:
            lines = differences(*_moves_left_out(artifact.manifest["key_parts"], parts))
            other = record["recipe"]["name"] != recipe
            if not other or (len(lines) <= FAR and not any(map(_is_of_data, lines))):
                # Of equals the recipe's own, then the newest.
                found.append((len(lines), other, age, record, artifact))
            else:
                # Of other recipes, or of other data.
                others = "made before, with much else different"
        else:
            others = others or "made before; the artifact that would say what is different is gone"
    best = min(found, key=lambda f: f[:3], default=None)
    return best and best[3:], others


def _is_of_data(line: str) -> bool:
    """Whether a difference is one of data or weights that are read: another recipe's then say nothing of these."""
    return line.startswith(("sources.source ", "config.source"))


def _told(store: Store, node: Node, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The differences between the parts of two keys, in words."""
    texts: dict[str, dict[str, str]] | None = None
    lines: list[str] = []
    reached: list[str] = []
    old, new = (parts | {"config": as_read(parts["config"])} for parts in (old, new))
    for line in differences(*_moves_left_out(old, new)):
        section, _, rest = line.partition(".")
        place, _, change = rest.partition(": ")
        if line.startswith("seed: "):
            # A stage's own is derived: its digits say nothing.
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
    """The settings of data without those of a single source where several stand in their place."""
    return {name: value for name, value in data.items() if not (data.get("sources") and name in ALONE)}


def setting(stage: str, rest: str) -> str:
    """A setting's change with its place in the recipe, where the environment has a section of its own."""
    if rest.startswith(("environment.", "environment:")):
        return rest
    return f"{find_stage(stage).section or stage}.{rest}"


def changed_lines(before: Mapping[str, str] | None, path: Path | None) -> list[str]:
    """The file of a module, with the lines that are new and gone; empty where its old or its new text is not there.

    before: `file` and `text` as they were.
    """
    if path is None or before is None:
        return []
    return lines_between(before["text"], path.read_text(encoding="utf-8"), path.name)


def lines_between(old_text: str, new_text: str, name: str) -> list[str]:
    """The lines of a file that are new and gone, with their numbers; at most `MOST_LINES`, and how many more there are.

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
"""What `rlhf.stages.prepare` and `rlhf.stages.base` call the files that they read."""


def _named(node: Node, kind: str | None, number: str, file: str) -> str:
    """A file of a source, by the setting's value: `data.source data/*.jsonl: file 2`; of a single file that alone."""
    if kind is None or not hasattr(node.config, "all_sources"):
        return file
    source = node.config.all_sources()[int(number) - 1].source
    return f"data.source {source}" if Path(source).suffix and "*" not in source else f"data.source {source}: {file}"


def _fate(change: str, else_: str = "changed") -> str:
    """What became of a module or file, from a line of `differences`."""
    return next((word for word in ("new", "gone") if change.startswith(word)), else_)


def _moves_left_out(old: dict[str, Any], new: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parts of two keys without the modules whose content is in both, under any name."""
    both = set(old["code"].values()) & set(new["code"].values())
    codes = [{name: content for name, content in p["code"].items() if content not in both} for p in (old, new)]
    # A module that changed has changed links too; links say something only where no module changed.
    hidden = {"imports": ""} if any(codes) else {}
    return old | {"code": codes[0]} | hidden, new | {"code": codes[1]} | hidden
