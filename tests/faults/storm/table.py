"""Results of a storm: read, and as a page."""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CALM = "as calm"
DAMAGE = re.compile(r" (deleted|emptied|flipped|truncated)$|: .*")
"""The part of a fault's kind that its row of the table leaves out."""


def read(path: Path) -> list[dict[str, Any]]:
    """The scenes that were played; a line that was cut by a kill is none."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def page(scenes: Sequence[dict[str, Any]]) -> str:
    """A page with a table of faults by kind, and the scenes that did not end well."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for scene in scenes:
        for fault in scene["faults"]:
            kinds[DAMAGE.sub("", fault["kind"])].append(fault)
    faults = [fault for some in kinds.values() for fault in some]
    network = sum(fault["network"] for fault in faults)
    broken = [scene for scene in scenes if scene["end"] != CALM]
    lines = [
        "# Results of the storm",
        "",
        f"`make faults` played {len(faults) - network} faults of processes, files, disks, leases and power",
        f"and {network} of the network in {len(scenes)} scenes. {len(scenes) - len(broken)} scenes ended as the",
        "[description](README.md) demands. A fault was survived by the running command (*by itself*) or by the",
        "same command, typed again. Files are truncated, emptied, flipped or deleted.",
        "",
        "| fault | stages | count | by itself | same command |",
        "|---|---|---|---|---|",
    ]
    for kind, some in sorted(kinds.items()):
        stages = ", ".join(sorted({fault["stage"] for fault in some}))
        alone = sum(fault["end"] == "by itself" for fault in some)
        lines.append(f"| {kind} | {stages} | {len(some)} | {alone} | {len(some) - alone} |")
    lines += [f"\n`{scene['scene']}` (seed {scene['seed']}) is broken: {scene['end']}" for scene in broken]
    return "\n".join(lines) + "\n"
