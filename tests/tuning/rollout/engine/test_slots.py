"""What the search for cached prefixes looks at, and what long prompts cost the host."""

import tracemalloc

import numpy as np
import pytest

from tests.tuning.tiny import CONFIG, PARAMS
from tuning.columns import Numbers
from tuning.rollout.engine.engine import Engine
from tuning.rollout.engine.limits import Limits
from tuning.rollout.engine.slots import Run, Slot, longest_prefix
from tuning.rollout.requests import RefusedRequest, Request

PROMPT = list(range(20))


def run(tokens, begun=0):
    return Run(1, 0, Request(tokens, 4, begun=begun), np.zeros(2, np.uint32))


class Counting(list):
    """Tokens of a slot; counts those that are looked at."""

    looked = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        self.looked += len(found)
        return found


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


def test_the_prefix_of_a_begun_completion_is_looked_for_in_its_prompt_alone():
    slots = [Slot(held=Counting([*PROMPT, *[90 + i] * 400])) for i in range(8)]
    source, common = longest_prefix(slots, run([*PROMPT, *[50] * 400], begun=400))
    assert source is slots[0] and common == len(PROMPT)
    assert sum(slot.held.looked for slot in slots) == len(PROMPT)
    # Its prompt alone is no complete prefix: with few tokens there is nothing to copy.
    assert longest_prefix([Slot(held=[1, 2, 3])], run([1, 2, 9, 9, 9], begun=3)) == (None, 0)
    assert longest_prefix([Slot(held=[1, 2, 3])], run([1, 2, 3]))[1] == 2


def test_completions_that_have_begun_do_not_wait_for_one_another():
    assert run([1, 2, 3]).shares_prompt(run([1, 2, 3]))
    assert not run([1, 2, 3], begun=1).shares_prompt(run([1, 2, 3], begun=1))
    one = run([1, 2, 3], begun=1)
    assert one.shares_prompt(Run(1, 1, one.request, one.key))


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
