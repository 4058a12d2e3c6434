"""A fast update agrees with what sampled: its forward pass is exact where the sampler was."""

import pytest

from rlhf.tuning.precision import using
from tests.stages.update.support import Rounds, settings


@pytest.mark.slow
def test_the_forward_pass_of_a_fast_update_rounds_where_its_rollouts_did(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf.tuning.precision.multiplies_bfloat16", lambda: True)
    rounds = Rounds(tmp_path)

    def mismatch(own, of_rollouts):
        config = settings(0, None, compute={"dtype": own}, prompts_per_step=4, kl_coef=0.0)
        inputs = rounds.tables(rounds.base, 0, dtype=of_rollouts) | {"policy": rounds.base, "tokenizer": rounds.base}
        with using(own):
            return rounds.run(config, inputs, {})[1]["mismatch_kl"]

    exact, rounded = mismatch("fast", "auto"), mismatch("fast", "fast")
    assert rounded != exact == pytest.approx(rounded, rel=0.02)
    rounds.folder = tmp_path / "again"
    assert mismatch("float32", "auto") == exact
