"""Two evaluations, perhaps of different data, on the prompts that they have in common."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from stages.common.tables import batches
from stages.common.verdicts import verdicts_of
from stages.evaluate import Config
from stages.store.artifacts import Artifact
from stages.store.keys import config_content, differences

if TYPE_CHECKING:
    from tuning.evaluation.verdicts import Difference, Judged

MOST = 3
"""Settings that the reason names."""
COLUMNS = ("place", "prompt_id", "prompt", "answer", "metadata")

NO_VERDICT = ("problems", "shard_prompts", "judges")
"""Settings of an evaluation that change no verdict of the judge that decides."""

Problem = tuple[str, str, str | None, str]
"""Id, prompt, answer and what else the judge is given."""


@dataclasses.dataclass(frozen=True)
class Paired:
    """How two evaluations compare."""

    places: list[tuple[int, int]]
    """Places of the prompts that both have, in the one and in the other."""
    prompts: tuple[int, int]
    """Prompts of each."""
    difference: Difference | None
    """Of their scores on these prompts; None where there are too few, or `reason` is said."""
    reason: str = ""
    """Why there is none."""


def problems_of(evaluation: Artifact) -> dict[int, Problem]:
    """What each place of an evaluation asks."""
    found: dict[int, Problem] = {}
    for batch in batches(evaluation, "rollouts/", COLUMNS):
        for place, *problem in zip(*(batch.column(name).to_pylist() for name in COLUMNS), strict=True):
            if place not in found:
                found[place] = (problem[0], problem[1], problem[2], _metadata(problem[3]))
    return found


def _metadata(text: str | None) -> str:
    """The metadata of a problem, by its content: nothing says in which order its fields are written."""
    return json.dumps(json.loads(text or "{}"), sort_keys=True)


def paired(before: Artifact, after: Artifact) -> Paired:
    """The second evaluation against the first, on prompts that are the same in both, wherever they stand."""
    from tuning.evaluation.verdicts import difference

    first, second = problems_of(before), problems_of(after)
    where = {problem: place for place, problem in second.items()}
    places = [(place, where[problem]) for place, problem in sorted(first.items()) if problem in where]
    counts = (len(first), len(second))
    if changed := _changed(before, after):
        named = "; ".join(changed[:MOST]) + (f" and {len(changed) - MOST} more" if len(changed) > MOST else "")
        return Paired(places, counts, None, f"they were evaluated with other settings or code: {named}")
    if not places:
        return Paired(places, counts, None, "they have no prompt in common")
    old = _at(verdicts_of(before), [place for place, _ in places])
    new = _at(verdicts_of(after), [place for _, place in places])
    # A group may have another name where the data has grown: that of the second is taken for both.
    old = dataclasses.replace(old, groups=new.groups)
    return Paired(places, counts, difference(old, new))


def _changed(before: Artifact, after: Artifact) -> list[str]:
    """What differs between two evaluations, each with both values: settings, and the code and packages of judges."""
    manifests = [evaluation.manifest for evaluation in (before, after)]
    try:
        # What older settings leave out has its default.
        found = [config_content(Config.model_validate(manifest["config"])) for manifest in manifests]
    except ValidationError:
        found = [manifest["config"] for manifest in manifests]
    settings: list[dict[str, Any]] = [{n: v for n, v in one.items() if n not in NO_VERDICT} for one in found]
    sources = [manifest["key_parts"].get("sources") or {} for manifest in manifests]
    return [*differences(settings[0], settings[1]), *differences(sources[0], sources[1])]


def _at(judged: Judged, places: list[int]) -> Judged:
    """The verdicts of some places, numbered anew in this order."""
    at = {place: i for i, place in enumerate(judged.places)}
    rows = [at[place] for place in places]
    return dataclasses.replace(
        judged,
        places=list(range(len(rows))),
        groups=[judged.groups[i] for i in rows],
        correct_PS=judged.correct_PS[rows],
        answers_PS=[judged.answers_PS[i] for i in rows],
    )
