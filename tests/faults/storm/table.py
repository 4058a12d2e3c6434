"""Results of a storm: read, and as a page."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CALM = "as calm"


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
    """A page with a table of faults by kind and place, and what the scenes that did not end well say."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for scene in scenes:
        # A scene's time and tries are shared by its faults.
        share = max(1, len(scene["faults"]))
        for fault in scene["faults"]:
            more = {"tries": scene["tries"], "seconds": scene["seconds"] / share, "well": scene["end"] == CALM}
            rows[fault["kind"], fault["stage"]].append(fault | more)
    faults = [fault for scene in scenes for fault in scene["faults"]]
    network = sum(fault["network"] for fault in faults)
    well = [scene for scene in scenes if scene["end"] == CALM]
    lines = [
        "# Results of the storm",
        "",
        "Made by `make faults`.",
        f"{len(faults) - network} faults of processes, files, disks, leases and power and {network} of the network in",
        f"{len(scenes)} scenes; {len(well)} scenes ended with the digests of an undisturbed run, with nothing done",
        "twice that was finished, no process left, no lease held, and `rlhf verify` and `rlhf audit` clean.",
        "",
        "| fault | stage | moments | count | by itself | same command | tries of its scene | seconds | as calm |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (kind, stage), some in sorted(rows.items()):
        moments = sorted({fault["moment"].split(",")[0] for fault in some})
        shown = "; ".join(moments[:4]) + (f"; and {len(moments) - 4} more" if len(moments) > 4 else "")
        alone = sum(fault["end"] == "by itself" for fault in some)
        tries = sum(fault["tries"] for fault in some) / len(some)
        seconds = sum(fault["seconds"] for fault in some)
        calm = sum(fault["well"] for fault in some)
        lines.append(
            f"| {kind} | {stage} | {shown} | {len(some)} | {alone} | {len(some) - alone} | {tries:.1f} | {seconds:.0f} "
            f"| {calm} |"
        )
    return "\n".join(lines) + "\n"
