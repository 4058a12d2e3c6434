"""The table `segments` of partial rollouts: which policy sampled which tokens of a completion. Imports no JAX."""

from __future__ import annotations

import dataclasses

from tuning.rows import Index, Number, Row, Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentRow(Row):
    """The tokens that a completion got in one round, all from one policy.

    Those of a completion, in the order of `number`, make up its tokens. It is named as in the tables of the round that
    lists it: a completion that is carried into a next round has another place there.
    """

    place: Number
    sample: Index
    number: Index
    """Among the segments of its completion, from 0."""
    tokens: Number
    """How many there are."""
    policy: Text
    """Digest of the policy that sampled them."""
    round: Number
    """The round in which they were sampled."""
    version: Number
    """Updates of the run before that policy: to the update of round k they have a lag of k - version."""
    began: Number
    """The round in which the completion began."""
    began_at: Number
    """Its place there: with `sample` and the seed of its row all that its randomness depends on (R15)."""
