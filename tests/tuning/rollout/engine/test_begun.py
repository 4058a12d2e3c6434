"""A completion that goes on in a later request draws what it would have drawn in one (R15)."""

import jax
import numpy as np
import pytest

from tests.tuning.rollout.engine.support import PARAMS
from tests.tuning.tiny import CONFIG
from tuning.axes import Axes
from tuning.mesh import make_mesh
from tuning.rollout.engine.engine import Engine
from tuning.rollout.engine.limits import Limits
from tuning.rollout.engine.paged.engine import PagedEngine
from tuning.rollout.engine.replicas import Replicas
from tuning.rollout.requests import RefusedRequest, Request, Sampling

PROMPTS = [np.random.default_rng(i).integers(0, 97, 3 + 9 * i).tolist() for i in range(3)]
MOST, SAMPLES = 11, 3
STOPS = tuple(range(7, 20))


def asked(prompt, most, **more):
    return Request(prompt, most, Sampling(1.0), STOPS, seed=4, **more)


def replicas(config, limits):
    return Replicas(config, limits=limits, mesh=make_mesh(Axes(1, 1, 1), jax.local_devices()[:1]))


@pytest.mark.parametrize("kind", [Engine, PagedEngine, replicas])
def test_a_completion_in_pieces_is_the_one_that_was_sampled_at_once(kind):
    engine = kind(CONFIG, limits=Limits(slots=4))
    engine.load(PARAMS)
    whole = dict(engine.run([asked(p, MOST, counter=i, samples=SAMPLES) for i, p in enumerate(PROMPTS)]))
    names = [(i, s) for i in range(len(PROMPTS)) for s in range(SAMPLES)]
    found = {name: ([], [], "length") for name in names}
    for _ in range(3):
        # Those that are under way, in another order than they began: neighbours and slots are others.
        left = [n for n in names[::-1] if found[n][2] == "length" and len(found[n][0]) < MOST]
        requests = [
            asked(
                PROMPTS[i] + found[i, s][0],
                min(4, MOST - len(found[i, s][0])),
                counter=i,
                first_sample=s,
                begun=len(found[i, s][0]),
            )
            for i, s in left
        ]
        for at, (completion,) in engine.run(requests):
            tokens, logps, _ = found[left[at]]
            found[left[at]] = tokens + completion.tokens, logps + completion.logps, completion.stop
    for i, s in names:
        tokens, logps, stop = found[i, s]
        assert (tokens, stop) == (whole[i][s].tokens, whole[i][s].stop)
        np.testing.assert_allclose(logps, whole[i][s].logps, atol=1e-5)
    # Without its place in the random stream a piece would begin with the draws of the first tokens.
    ends = {len(tokens) for tokens, _, _ in found.values()}
    assert max(ends) == MOST and min(ends) < MOST


def test_a_piece_that_says_what_cannot_be_is_refused():
    for more in ({"begun": 3}, {"begun": -1}, {"first_sample": -1}):
        with pytest.raises(RefusedRequest, match="request p: begun is"):
            asked([1, 2, 3], 4, name="p", **more)
    with pytest.raises(RefusedRequest, match="find_stop does not see the 1 tokens"):
        asked([1, 2, 3], 4, name="p", begun=1, find_stop=lambda tokens: None)
