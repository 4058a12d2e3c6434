"""Totals of scores are the oracle's: each completion's own, whatever failed, whichever prompt came twice."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.score import stage as score
from tests.oracle.plain import rewards, tables
from tests.oracle.product import Product
from tests.oracle.tables import Drawn, completion
from tests.oracle.test_properties import COMMONLY
from tuning.rewards.samples import Outcome

SPOKEN = f"{__package__}.functions:spoken"
PARTS = {
    "weight": st.sampled_from([1.0, -0.5]),
    "squash": st.sampled_from(["none", "sigmoid"]),
    "clip": st.sampled_from([None, [-0.5, 0.6]]),
    "normalise": st.sampled_from(["none", "group", "batch"]),
    "on_failure": st.sampled_from(["drop", "zero"]),
}
OUTCOMES = st.one_of(
    st.just((None, None)), st.just((None, "failed")), st.tuples(st.floats(-3, 3, width=32), st.just(None))
)


@st.composite
def scored(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, list[rewards.Outcome]], list[int]]:
    """Rewards by name, the outcomes of each, and the place of each completion."""
    places = [place for place in range(draw(st.integers(1, 4))) for _ in range(draw(st.integers(1, 4)))]
    parts = {name: draw(st.fixed_dictionaries(PARTS)) for name in ("a", "b")}
    columns = {name: draw(st.lists(OUTCOMES, min_size=len(places), max_size=len(places))) for name in parts}
    return parts, columns, places


@settings(max_examples=60, **COMMONLY)
@given(drawn=scored())
def test_totals(drawn: tuple[dict[str, Any], dict[str, list[rewards.Outcome]], list[int]]) -> None:
    parts, columns, places = drawn
    # Two places of one prompt, and rows that are not in the order of places.
    rows = [completion(Drawn(0, place, i, 3, 0.0), "", 0) for i, place in enumerate(places)]
    config = score.Config.model_validate({"rewards": parts})
    outcomes = {name: [Outcome(*o) for o in column] for name, column in columns.items()}
    found = [row.total for row in score.with_totals(config, rows, outcomes)]
    wanted = rewards.totals({n: config.rewards[n].model_dump() for n in parts}, columns, places)
    for x, y in zip(found, wanted, strict=True):
        assert (x is None) == (y is None)
        # Totals are float32, and so are the statistics of a normalised reward.
        assert x is None or x == pytest.approx(y, rel=1e-5, abs=1e-5)


def test_each_completion_has_its_own_score(product: Product) -> None:
    texts = ["0.5", "none", "nan", "word", "1.5", "0.25", "-2", "0.125"]
    drawn = [Drawn(i % 2, i // 2, i % 2, 3, None) for i in range(len(texts))]
    rows = [completion(d, "", 0) for d in drawn]
    rows = [type(r)(**vars(r) | {"text": text, "prompt_id": "p"}) for r, text in zip(rows, texts, strict=True)]
    config = {"rewards": {"spoken": {"function": SPOKEN, "weight": 2.0, "normalise": "group"}}, "workers": 1}
    config |= {"shard_completions": 2, "max_failed_fraction": 0.5}
    rollouts = product.rollouts(rows)
    made, metrics, full = product.run(score, config, {"rollouts": rollouts})
    found = tables.joined(tables.read(rollouts.local("rollouts/")), tables.read(made.local("scores/")))
    outcomes = [(None, None), (math.nan, None), (None, "word")]
    spoken = [outcomes[("none", "nan", "word").index(t)] if t.isalpha() else (float(t), None) for t in texts]
    wanted = rewards.totals(full["rewards"], {"spoken": spoken}, [d.place for d in drawn])
    assert [row["total"] for row in found] == pytest.approx(wanted, rel=1e-5)
    assert metrics["failed"] == 2 / len(texts)
