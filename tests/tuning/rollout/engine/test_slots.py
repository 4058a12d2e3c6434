"""What waiting runs and long prompts cost the host."""

import tracemalloc

import numpy as np
import pytest

from rlhf.tuning.columns import Numbers
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.requests import RefusedRequest, Request
from tests.tuning.tiny import CONFIG, PARAMS


class Seen(Request):
    """Counts how often its size is asked for."""

    asked = 0

    @property
    def total_tokens(self):
        Seen.asked += 1
        return super().total_tokens


def test_a_step_does_not_look_at_all_runs_that_wait():
    engine = Engine(CONFIG, limits=Limits(slots=4, context=96))
    engine.load(PARAMS)
    for number in range(300):
        engine.submit(Seen([1, 2, 3], 8, counter=number))
    Seen.asked = 0
    while engine.runs > 280:
        engine.step()
    assert Seen.asked == 0


def test_tokens_that_a_model_does_not_have_are_refused_without_an_object_for_each():
    engine = Engine(CONFIG, limits=Limits(slots=1))
    for prompt, unknown in (([1, 97, 2], 97), (Numbers(np.asarray([5, -1], np.int32)), -1)):
        with pytest.raises(RefusedRequest, match=f"request p: token {unknown} is not one of the model's 97"):
            engine.submit(Request(prompt, 1, name="p"))
    count = CONFIG.max_positions - 1
    request = Request(Numbers(np.ones(count, np.int32)), 1)
    tracemalloc.start()
    engine._pool.check(request)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 7 * count
