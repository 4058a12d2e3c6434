"""Every vector of the field's implementations against the project's losses and advantages.

`RLHF_VECTORS` names another folder of vectors. A file, op, parameter, input or expected value that the runner does not
know fails. Cases tagged `peer_quirk` record a defect of the implementation they come from and are counted apart.

`make test` runs a case where it is the first of its implementation's function with these parameters, with this batch,
with these tags, or that expects these values; `make test-slow` runs the others, which are the same with other numbers.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from . import ops_advantages, ops_policy, ops_preference, ops_tokens  # noqa: F401  (they register the ops)
from .harness import FOLDER, OPS, Case, load

FAMILIES = {family for family, _ in OPS}
CASES = load()


def kinds(case: Case) -> Iterator[tuple[Any, ...]]:
    """What a case may be the first to show."""
    function = case.id.rpartition("/")[0]
    yield function, "parameters", json.dumps(case.raw["params"], sort_keys=True)
    yield function, "batch", case.raw.get("batch"), *sorted(case.own)
    yield function, "expected", *sorted(name for name, value in case.raw["expected"].items() if value is not None)
    for tag in case.tags:
        yield function, "tag", tag


def marked(cases: list[Case]) -> Iterator[Any]:
    """The cases, those slow that show nothing for the first time."""
    seen: set[tuple[Any, ...]] = set()
    for case in cases:
        shown = set(kinds(case))
        yield pytest.param(case, id=case.id, marks=[pytest.mark.slow] if shown <= seen else [])
        seen |= shown


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
