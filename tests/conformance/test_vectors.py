"""Every vector of the field's implementations against the project's losses and advantages.

`RLHF_VECTORS` names another folder of vectors. A file, op, parameter, input or expected value that the runner does not
know fails. Cases tagged `peer_quirk` record a defect of the implementation they come from and are counted apart.
"""

import pytest

from . import ops_advantages, ops_policy, ops_preference, ops_tokens  # noqa: F401  (they register the ops)
from .harness import FOLDER, OPS, Case, load

# What the project does not compute through a loss, with the reason.
NOT_OFFERED = {
    ("sft", "pack_dataset"): "bin layout of TRL's packing; the project's own packing has its own tests",
    ("sft", "packed_collate"): "dictionary layout of TRL's collators; the project passes segment ids",
}
FAMILIES = {family for family, _ in OPS} | {family for family, _ in NOT_OFFERED}
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
    assert key in OPS or key in NOT_OFFERED, f"{case.id}: unknown op"
    if "peer_quirk" in case.tags:
        pytest.skip("peer_quirk: a defect of the implementation the case comes from")
    if key in NOT_OFFERED:
        pytest.skip(f"not offered: {NOT_OFFERED[key]}")
    case.check(OPS[key](case))
