"""Servers as an engine whose requests come and go one by one, as turns of episodes do."""

import contextlib
import dataclasses

import pytest

from rlhf.tuning.rollout.servers.protocol import ServerRefused
from rlhf.tuning.rollout.servers.streaming import Turns
from tests.stages.sampling.support import GREEDY, same


def ended(turns, *numbers):
    found = {}
    while not set(numbers) <= found.keys():
        found |= {u.number: u.completion for u in turns.step()}
    return [found[n] for n in numbers]


@pytest.mark.slow
def test_turns_are_those_of_the_native_engine_in_any_order(fleet, native):
    turns = Turns(fleet(), 3)
    assert turns.idle and turns.slots_for(10_000) == 3
    numbers = [turns.submit(dataclasses.replace(r, samples=1, keep=True)) for r in GREEDY]
    dropped = turns.submit(dataclasses.replace(GREEDY[0], samples=1))
    turns.cancel(dropped)
    found = ended(turns, *reversed(numbers))[::-1]
    same([[c] for c in found], native["first"])
    assert turns.idle and turns.step() == []
    turns.release(numbers[0])


def test_what_a_server_raises_ends_the_step(fleet):
    turns = Turns(fleet(), 1)
    turns.submit(dataclasses.replace(GREEDY[0], samples=1, prompt=[10**6]))
    with pytest.raises(ServerRefused, match="1000000"):
        for _ in range(1000):
            turns.step()


def test_what_a_server_raises_for_a_cancelled_request_reaches_nobody(fleet, native):
    with contextlib.closing(Turns(fleet(), 1)) as turns:
        # One at a time: the answer of the second comes behind the error of the first.
        refused = turns.submit(dataclasses.replace(GREEDY[0], samples=1, prompt=[10**6]))
        number = turns.submit(dataclasses.replace(GREEDY[0], samples=1))
        turns.cancel(refused)
        same([ended(turns, number)], native["first"][:1])
        turns.submit(dataclasses.replace(GREEDY[0], samples=1))
    assert turns.idle and turns.step() == []
    with pytest.raises(RuntimeError, match="shutdown"):
        turns.submit(dataclasses.replace(GREEDY[0], samples=1))
