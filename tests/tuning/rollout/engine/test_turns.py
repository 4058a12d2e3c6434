"""Slots that are kept between the turns of an episode."""

import dataclasses

import numpy as np
import pytest

from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.rollout.engine import programs
from rlhf.tuning.rollout.engine.cpu import attention, products
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.requests import RefusedRequest, Request, Sampling
from tests.tuning.rollout.engine.support import EOS, PARAMS, lowered, trainer_logps
from tests.tuning.tiny import CONFIG

LIMITS = Limits(slots=4, context=96)


def prompt(number, tokens=20):
    return np.random.default_rng(number).integers(0, 97, tokens).tolist()


def engine():
    made = Engine(CONFIG, limits=LIMITS)
    made.load(PARAMS)
    return made


def ended(engine, *numbers):
    found = {}
    while not set(numbers) <= set(found):
        found |= {u.number: u.completion for u in engine.step() if u.completion is not None}
    return [found[n] for n in numbers]


def turn(ids, number=0, **more):
    return Request(ids, 8, Sampling(1.0), tuple(EOS), seed=5, counter=number, **more)


def held(engine):
    return {slot.kept: len(slot.held) for slot in engine._pool.slots if slot.kept is not None}


@pytest.mark.slow
def test_a_turn_goes_on_in_the_slot_of_the_last_one_and_only_its_observation_is_prefilled():
    under_test = engine()
    first = under_test.submit(turn(prompt(0), keep=True))
    [said] = ended(under_test, first)
    observation = prompt(9, 5)
    ids = prompt(0) + said.tokens + observation
    [slot] = [s for s in under_test._pool.slots if s.kept == first]
    others = [under_test.submit(turn(prompt(n), n)) for n in range(1, 6)]
    ended(under_test, *others)
    assert held(under_test) == {first: len(prompt(0) + said.tokens) - 1}, "others have taken or moved the kept slot"
    before = list(slot.held)
    second = under_test.submit(turn(ids, 1, after=first, keep=True))
    under_test._pool.admit(under_test._waiting)
    assert slot.run is not None and slot.run.number == second and slot.held == before == ids[: len(before)]
    [answer] = ended(under_test, second)
    np.testing.assert_allclose(answer.logps, trainer_logps(ids, answer.tokens, 1.0), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["kernels", "no kernels", "sliding window"])
def test_turns_of_many_episodes_are_prefilled_together(kernel, monkeypatch):
    config = CONFIG
    if kernel == "no kernels":
        monkeypatch.setattr(attention, "suits", lambda *_: False)
        monkeypatch.setattr(products, "suits", lambda *_: False)
    if kernel == "sliding window":
        config = dataclasses.replace(CONFIG, sliding_window=7)
    under_test = Engine(config, limits=Limits(slots=8, context=96, chunks=(64, 192)))
    under_test.load(PARAMS)
    # Not the same length, and one longer than what `insert` moves at a time.
    firsts = [prompt(n, 12 + 3 * n) for n in range(6)] + [prompt(6, 4)]
    kept = [under_test.submit(turn(ids, n, keep=True)) for n, ids in enumerate(firsts)]
    said = ended(under_test, *kept)
    calls = []
    monkeypatch.setattr(programs, "prefill", lambda *a, _f=programs.prefill, **k: calls.append(k) or _f(*a, **k))
    seconds = [
        ids + completion.tokens + prompt(90 + n, 5 + n if n < 6 else 70)
        for n, (ids, completion) in enumerate(zip(firsts, said, strict=True))
    ]
    numbers = [under_test.submit(turn(ids, n, after=kept[n])) for n, ids in enumerate(seconds)]
    answers = ended(under_test, *numbers)
    assert len(calls) == 1, "one chunk has room for all of them"
    for ids, answer in zip(seconds, answers, strict=True):
        expected = trainer_logps(ids, answer.tokens, 1.0, decoder_graph(config))
        np.testing.assert_allclose(answer.logps, expected, atol=2e-5)


@pytest.mark.slow
def test_turns_that_go_on_together_take_no_memory_for_slots_that_do_not(monkeypatch):
    monkeypatch.setattr(attention, "suits", lambda *_: False)
    monkeypatch.setattr(products, "suits", lambda *_: False)

    def temporary(slots):
        under_test = Engine(CONFIG, limits=Limits(slots=slots, context=448))
        prefill = lowered(under_test, slots, 448, 64, ["many"])["prefill many"]
        return prefill.compile().memory_analysis().temp_size_in_bytes

    assert temporary(64) < 1.1 * temporary(16) + 2**16


def test_episodes_that_begin_alike_share_the_prefill_of_their_first_context(monkeypatch):
    under_test = engine()
    prefilled = []
    monkeypatch.setattr(
        programs, "prefill", lambda *a, _f=programs.prefill, **k: prefilled.append(a[3].group_C) or _f(*a, **k)
    )
    numbers = [under_test.submit(turn(prompt(0), n, keep=True)) for n in range(4)]
    said = ended(under_test, *numbers)
    assert [int((group > 0).sum()) for group in prefilled] == [len(prompt(0)) - 1]
    for completion in said:
        np.testing.assert_allclose(completion.logps, trainer_logps(prompt(0), completion.tokens), atol=1e-5)


def test_kept_slots_are_no_slots_for_others_until_they_are_released():
    under_test = engine()
    kept = [under_test.submit(turn(prompt(n), n, keep=True)) for n in range(4)]
    ended(under_test, *kept)
    waiting = under_test.submit(turn(prompt(7), 7))
    assert under_test.step() == [] and not under_test.idle
    under_test.release(kept[2])
    [completion] = ended(under_test, waiting)
    assert completion.tokens and set(held(under_test)) == {kept[0], kept[1], kept[3]}
    # A turn of one of them passes what waits for a slot.
    late = under_test.submit(turn(prompt(8), 8))
    ids = [*prompt(0), 1, 2, 3]
    assert ended(under_test, under_test.submit(turn(ids, 9, after=kept[0])), late)


def test_other_weights_leave_nothing_of_a_kept_slot():
    under_test = engine()
    [said] = ended(under_test, first := under_test.submit(turn(prompt(0), keep=True)))
    under_test.load(PARAMS)
    ids = prompt(0) + said.tokens + prompt(9, 5)
    [answer] = ended(under_test, under_test.submit(turn(ids, 1, after=first)))
    np.testing.assert_allclose(answer.logps, trainer_logps(ids, answer.tokens, 1.0), atol=1e-5)


def test_a_turn_that_is_cancelled_before_it_is_seated_gives_up_the_slot_that_was_kept_for_it():
    under_test = engine()
    [said] = ended(under_test, first := under_test.submit(turn(prompt(0), keep=True)))
    ids = prompt(0) + said.tokens + prompt(9, 5)
    second = under_test.submit(turn(ids, 1, after=first, keep=True))
    # What a player does with an episode that is out of time: it knows the newest request alone.
    under_test.cancel(second)
    under_test.release(second)
    [update] = under_test.step()
    assert (update.number, update.completion.stop) == (second, "cancelled")
    assert under_test.idle and under_test._pool.taken == 0
    others = [under_test.submit(turn(prompt(n), n)) for n in range(1, 5)]
    assert len(ended(under_test, *others)) == LIMITS.slots


def test_slots_that_the_memory_does_not_have_are_refused_with_what_they_take():
    small = Engine(CONFIG, limits=Limits(slots=4, context=96, cache_bytes=20_000))
    with pytest.raises(RefusedRequest, match=r"keys and values of 90 tokens take .* MiB, the cache may have 0.0 MiB"):
        small.slots_for(90)
