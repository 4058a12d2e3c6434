"""What workers of a cluster compare is what a key of this stage counts."""

from rlhf.stages.contract.fingerprint import reached
from rlhf.tuning.data import versions


def test_every_module_that_workers_reach_counts():
    found = set(versions.here())
    assert found - {"Python", *versions.LIBRARIES} == set(reached(*versions.ROOTS).files)
    assert {"rlhf.tuning.data.drafts", "rlhf.tuning.models.tokenizer", "rlhf.tuning.rewards.answers"} < found
    assert not [name for name in found if "losses" in name]
