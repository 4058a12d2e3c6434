"""Totals of scores are the oracle's: each completion's own, whatever failed, whichever prompt came twice."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.stages.score import stage as score
from rlhf.tuning.rewards.samples import Outcome
from rlhf.tuning.rewards.totals import Part, shaped, totals
from tests.oracle.plain import rewards, tables
from tests.oracle.product import Product
from tests.oracle.support import COMMONLY
from tests.oracle.tables import Drawn, completion

SPOKEN = f"{__package__}.functions:spoken"
PARTS = {
    "weight": st.sampled_from([1.0, -0.5]),
    "squash": st.sampled_from(["none", "sigmoid"]),
    "clip": st.sampled_from([None, [-0.5, 0.6]]),
    "normalise": st.sampled_from(["none", "group", "batch"]),
    "on_failure": st.sampled_from(["drop", "zero"]),
}
# Statistics of totals are float32: a spread of their rounding would be another number here.
EIGHTHS = st.integers(-24, 24).map(lambda n: n / 8)
OUTCOMES = st.one_of(st.just((None, None)), st.just((None, "failed")), st.tuples(EIGHTHS, st.just(None)))


@st.composite
def scored(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, list[rewards.Outcome]], list[int]]:
    """Rewards by name, the outcomes of each, and the place of each completion."""
    # One number of completions: groups of another are another program.
    places = draw(st.lists(st.integers(0, 3), min_size=7, max_size=7))
    parts = {name: {"function": "exact_match"} | draw(st.fixed_dictionaries(PARTS)) for name in ("a", "b")}
    columns = {name: draw(st.lists(OUTCOMES, min_size=len(places), max_size=len(places))) for name in parts}
    return parts, columns, places


@settings(max_examples=40, **COMMONLY)
@given(drawn=scored())
def test_totals(drawn: tuple[dict[str, Any], dict[str, list[rewards.Outcome]], list[int]]) -> None:
    parts, columns, places = drawn
    config = score.Config.model_validate({"rewards": parts})
    own = [Part(name, **config.rewards[name].part) for name in parts]
    outcomes = [[Outcome(None if v is None else shaped(v, p), why) for v, why in columns[p.name]] for p in own]
    found = [None if math.isnan(x) else x for x in totals(outcomes, own, places)[0].tolist()]
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
    work = product.scratch("work")
    first = product.run(score, config, {"rollouts": rollouts}, work=work)[0]
    # Once more, from the journal of finished calls.
    made, metrics, full = product.run(score, config, {"rollouts": rollouts}, work=work)
    assert made.digest == first.digest
    found = tables.joined(tables.read(rollouts.local("rollouts/")), tables.read(made.local("scores/")))
    outcomes = [(None, None), (math.nan, None), (None, "word")]
    spoken = [outcomes[("none", "nan", "word").index(t)] if t.isalpha() else (float(t), None) for t in texts]
    wanted = rewards.totals(full["rewards"], {"spoken": spoken}, [d.place for d in drawn])
    for row, total in zip(found, wanted, strict=True):
        assert row["total"] == (None if total is None else pytest.approx(total, rel=1e-5, abs=1e-6))
    assert metrics["failed"] == 2 / len(texts)
