"""Every vector of the field's implementations against the project's losses and advantages.

`RLHF_VECTORS` names another folder of vectors. A file, op, parameter, input or expected value that the runner does not
know fails. Cases tagged `peer_quirk` record a defect of the implementation they come from and are counted apart.

`make test` runs the first cases of each implementation's function: of each tag, of each set of expected values, and a
few with other parameters or another batch. `make test-slow` runs the others.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from . import ops_advantages, ops_policy, ops_preference, ops_tokens  # noqa: F401  (they register the ops)
from .harness import FOLDER, OPS, Case, load

FAMILIES = {family for family, _ in OPS}
CASES = load()
INPUT, FEW = "input", 3


def kinds(case: Case) -> Iterator[tuple[Any, ...]]:
    """What a case may be the first to show of its function; an input where that is what differs."""
    yield "expected", *sorted(name for name, value in case.raw["expected"].items() if value is not None)
    yield from (("tag", tag) for tag in case.tags)
    yield INPUT, "parameters", json.dumps(case.raw["params"], sort_keys=True)
    yield INPUT, "batch", case.raw.get("batch"), *sorted(case.own)


def marked(cases: list[Case]) -> Iterator[Any]:
    """The cases; slow are those that show nothing new, or nothing but other inputs after a few of their function."""
    seen: defaultdict[str, set[tuple[Any, ...]]] = defaultdict(set)
    quick: Counter[str] = Counter()
    for case in cases:
        function = case.id.rpartition("/")[0]
        new = set(kinds(case)) - seen[function]
        runs = any(kind[0] != INPUT for kind in new) or (bool(new) and quick[function] < FEW)
        yield pytest.param(case, id=case.id, marks=[] if runs else [pytest.mark.slow])
        seen[function] |= new
        quick[function] += runs


def test_folder_has_known_files() -> None:
    files = {path.stem for path in FOLDER.glob("*.json")}
    assert files, f"no vectors in {FOLDER}"
    assert files <= FAMILIES, f"unknown files: {sorted(files - FAMILIES)}"


def test_ids_are_unique() -> None:
    assert len({case.id for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", marked(CASES))
def test_case(case: Case) -> None:
    key = case.family, case.op
    assert key in OPS, f"{case.id}: unknown op"
    if "peer_quirk" in case.tags:
        pytest.skip("peer_quirk: a defect of the implementation the case comes from")
    case.check(OPS[key](case))
