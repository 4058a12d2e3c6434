"""A reward model asks of a pair the gap that its margin says."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlhf.stages import reward
from tests.stages.training.support import data, perform, rows_of, settings


@pytest.mark.slow
def test_margins_ask_for_a_gap(base, memory, tmp_path):
    rows = [r | {"margin": 2.0} for r in rows_of("preference", 8)]
    inputs = {
        "base": base,
        "data": data(tmp_path / "data", preference=rows, heldout_preference=rows[:2]),
        "tokenizer": base,
    }
    first = {}
    for weight in (0.0, 1.0):
        config = settings(reward, margin_weight=weight, heldout_fraction=0.0, centering=0.0)
        metrics, made = perform(reward, config, tmp_path / str(weight), memory, **inputs)
        first[weight] = json.loads((made.path / "logs" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
        # The head starts at zero: every gap is 0, and a tie is half right.
        assert metrics["heldout_accuracy_before"] == 0.5
    assert first[0.0] == pytest.approx(np.log(2), rel=1e-5)
    assert first[1.0] == pytest.approx(np.log1p(np.exp(2.0)), rel=1e-5)
