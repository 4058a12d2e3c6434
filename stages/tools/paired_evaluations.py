"""Compare two evaluations, perhaps of different data, on the prompts that they share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError

from rlhf.stages.common.tables import batches
from rlhf.stages.common.verdicts import verdicts_of
from rlhf.stages.evaluate import Config
from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.store.keys import config_content, differences

if TYPE_CHECKING:
    from rlhf.tuning.evaluation.verdicts import Difference, Judged

MOST = 3
"""Most differences that a reason names."""
COLUMNS = ("place", "prompt_id", "prompt", "answer", "metadata")
TOKENS = "prompt_ids"

NO_VERDICT = ("problems", "shard_prompts", "judges")
"""Settings that do not change the deciding judge's verdicts."""

Problem = tuple[str, str, str | None, str, bytes]
"""Id, prompt, answer, metadata, and tokens: empty if the evaluations have different tokenizers."""


@dataclasses.dataclass(frozen=True)
class Paired:
    """Comparison of two evaluations."""

    places: list[tuple[int, int]]
    """Places of the shared prompts in both."""
    prompts: tuple[int, int]
    """Prompts of each."""
    judged: tuple[Judged, Judged] | None
    """Their verdicts on the shared prompts, at equal places."""
    reason: str = ""
    """Why there are none."""

    @property
    def difference(self) -> Difference | None:
        """Of their scores on the shared prompts."""
        from rlhf.tuning.evaluation.verdicts import difference

        return None if self.judged is None else difference(*self.judged)


def problems_of(evaluation: Artifact, tokens: bool) -> dict[int, Problem]:
    """Return the problem of each place. tokens: with the tokens of the system's turn and the template."""
    problems: dict[int, Problem] = {}
    for batch in batches(evaluation, "rollouts/", (*COLUMNS, TOKENS) if tokens else COLUMNS):
        rows = zip(*(batch.column(name).to_pylist() for name in COLUMNS), strict=True)
        for number, (place, prompt_id, prompt, answer, metadata) in enumerate(rows):
            if place not in problems:
                asked = batch.column(TOKENS)[number].values.to_numpy().tobytes() if tokens else b""
                # Nothing fixes the order of the metadata's fields.
                content = json.dumps(json.loads(metadata or "{}"), sort_keys=True)
                problems[place] = (prompt_id, prompt, answer, content, asked)
    return problems


def paired(before: Artifact, after: Artifact) -> Paired:
    """Compare the second evaluation with the first on the prompts that both have, at any place."""
    # Tokens, because no text shows the recipe's system prompt.
    tokens = _tokenizer(before) == _tokenizer(after)
    first, second = problems_of(before, tokens), problems_of(after, tokens)
    where = {problem: place for place, problem in second.items()}
    places = [(place, where[problem]) for place, problem in sorted(first.items()) if problem in where]
    counts = (len(first), len(second))
    if changed := _changed(before, after):
        named = "; ".join(changed[:MOST]) + (f" and {len(changed) - MOST} more" if len(changed) > MOST else "")
        return Paired(places, counts, None, f"they were evaluated with other settings or code: {named}")
    if not places:
        return Paired(places, counts, None, "they have no prompt in common, or other system prompts")
    old = _at(verdicts_of(before), [place for place, _ in places])
    new = _at(verdicts_of(after), [place for _, place in places])
    # A group may have another name in larger data: use that of the second for both.
    return Paired(places, counts, (dataclasses.replace(old, groups=new.groups), new))


def against_first(settings: Sequence[Sequence[Paired]], comparisons: int) -> list[Difference]:
    """Return the difference of each setting from the first one, by `statistics.differences_from_first`.

    settings: for each other setting and seed, the first setting's evaluation paired with its own. Raises ValueError if
    a pair is not compared, or has no problem with a score on both sides.
    """
    from rlhf.tuning.evaluation.statistics import differences_from_first
    from rlhf.tuning.evaluation.verdicts import Difference

    runs, counts = [], []
    for pairs in settings:
        judged = [pair.judged for pair in pairs if pair.judged is not None]
        runs.append([(old.correct_PS, new.correct_PS, new.groups) for old, new in judged])
        counts.append(sum(new.problems for _, new in judged))
    ends = differences_from_first(runs, comparisons) if runs else []
    return [Difference(*end, count) for end, count in zip(ends, counts, strict=True)]


def _tokenizer(evaluation: Artifact) -> str | None:
    """Return the digest of the tokenizer and its template."""
    return evaluation.manifest["key_parts"].get("inputs", {}).get("tokenizer")


def _changed(before: Artifact, after: Artifact) -> list[str]:
    """Return the differences of two evaluations, with both values: settings, code and packages of judges."""
    manifests = [evaluation.manifest for evaluation in (before, after)]
    try:
        # Older settings get their defaults.
        configs = [config_content(Config.model_validate(manifest["config"])) for manifest in manifests]
    except ValidationError:
        configs = [manifest["config"] for manifest in manifests]
    settings = [{n: v for n, v in config.items() if n not in NO_VERDICT} for config in configs]
    sources = [manifest["key_parts"].get("sources") or {} for manifest in manifests]
    return [*differences(settings[0], settings[1]), *differences(sources[0], sources[1])]


def _at(judged: Judged, places: list[int]) -> Judged:
    """Return the verdicts of some places, renumbered in this order."""
    at = {place: i for i, place in enumerate(judged.places)}
    return dataclasses.replace(judged.at([at[place] for place in places]), places=list(range(len(places))))
