"""Every vector of the field's implementations against the project's losses and advantages.

`RLHF_VECTORS` names another folder of vectors. A file, op, parameter, input or expected value that the runner does not
know fails. Cases tagged `peer_quirk` record a defect of the implementation they come from and are counted apart.
"""

import pytest

from . import ops_advantages, ops_policy, ops_preference, ops_tokens  # noqa: F401  (they register the ops)
from .harness import FOLDER, OPS, Case, load

FAMILIES = {family for family, _ in OPS}
CASES = load()


def test_folder_has_known_files() -> None:
    files = {path.stem for path in FOLDER.glob("*.json")}
    assert files, f"no vectors in {FOLDER}"
    assert files <= FAMILIES, f"unknown files: {sorted(files - FAMILIES)}"


def test_ids_are_unique() -> None:
    assert len({case.id for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: Case) -> None:
    key = case.family, case.op
    assert key in OPS, f"{case.id}: unknown op"
    if "peer_quirk" in case.tags:
        pytest.skip("peer_quirk: a defect of the implementation the case comes from")
    case.check(OPS[key](case))
