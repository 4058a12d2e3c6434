"""Two evaluations, perhaps of different data, on the prompts that they have in common."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rlhf.stages.common.tables import batches
from rlhf.stages.common.verdicts import verdicts_of
from rlhf.stages.evaluate import Config
from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.store.keys import config_content, differences

if TYPE_CHECKING:
    from rlhf.tuning.evaluation.verdicts import Difference, Judged

MOST = 3
"""Settings that the reason names."""
COLUMNS = ("place", "prompt_id", "prompt", "answer", "metadata")
TOKENS = "prompt_ids"

NO_VERDICT = ("problems", "shard_prompts", "judges")
"""Settings of an evaluation that change no verdict of the judge that decides."""

Problem = tuple[str, str, str | None, str, bytes]
"""Id, prompt, answer, what else the judge is given, and the tokens that it was asked in: none where the evaluations
have other tokenizers."""


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


def problems_of(evaluation: Artifact, tokens: bool) -> dict[int, Problem]:
    """What each place of an evaluation asks. tokens: also in which tokens, the system's turn and the template's too."""
    found: dict[int, Problem] = {}
    for batch in batches(evaluation, "rollouts/", (*COLUMNS, TOKENS) if tokens else COLUMNS):
        for row, (place, *problem) in enumerate(zip(*(batch.column(n).to_pylist() for n in COLUMNS), strict=True)):
            if place not in found:
                asked = batch.column(TOKENS)[row].values.to_numpy().tobytes() if tokens else b""
                found[place] = (problem[0], problem[1], problem[2], _metadata(problem[3]), asked)
    return found


def _metadata(text: str | None) -> str:
    """The metadata of a problem, by its content: nothing says in which order its fields are written."""
    return json.dumps(json.loads(text or "{}"), sort_keys=True)


def paired(before: Artifact, after: Artifact) -> Paired:
    """The second evaluation against the first, on prompts that are the same in both, wherever they stand."""
    from rlhf.tuning.evaluation.verdicts import difference

    # A system prompt of the recipe is in no text, and makes another question.
    tokens = _tokenizer(before) == _tokenizer(after)
    first, second = problems_of(before, tokens), problems_of(after, tokens)
    where = {problem: place for place, problem in second.items()}
    places = [(place, where[problem]) for place, problem in sorted(first.items()) if problem in where]
    counts = (len(first), len(second))
    if changed := _changed(before, after):
        named = "; ".join(changed[:MOST]) + (f" and {len(changed) - MOST} more" if len(changed) > MOST else "")
        return Paired(places, counts, None, f"they were evaluated with other settings or code: {named}")
    if not places:
        texts = {problem[:-1] for problem in first.values()} & {problem[:-1] for problem in second.values()}
        how = f", though {len(texts)} texts: the system prompt differs" if texts else ""
        return Paired(places, counts, None, f"they have no prompt in common{how}")
    old = _at(verdicts_of(before), [place for place, _ in places])
    new = _at(verdicts_of(after), [place for _, place in places])
    # A group may have another name where the data has grown: that of the second is taken for both.
    old = dataclasses.replace(old, groups=new.groups)
    return Paired(places, counts, difference(old, new))


def _tokenizer(evaluation: Artifact) -> str | None:
    """The digest of the tokenizer and its template."""
    return evaluation.manifest["key_parts"].get("inputs", {}).get("tokenizer")


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
    return dataclasses.replace(judged.at([at[place] for place in places]), places=list(range(len(places))))
