"""Continuous batching: what runs beside a request, before it or after it cannot be seen in what it gets."""

import dataclasses
import tracemalloc

import jax
import numpy as np
import pytest

from rlhf.tuning.columns import Numbers
from rlhf.tuning.device import choose
from rlhf.tuning.precision import ROUNDED
from rlhf.tuning.rollout.engine import programs
from rlhf.tuning.rollout.engine.cache import token_bytes
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.requests import RefusedRequest, Request, Sampling, stop_strings
from rlhf.tuning.training.completions import token_logps
from tests.tuning.rollout.engine.support import PARAMS, requests_of, trainer_logps
from tests.tuning.tiny import CONFIG

LIMITS = Limits(slots=6, context=128, steps=4, chunks=(8, 16))


def loaded(limits=LIMITS, **options):
    engine = Engine(CONFIG, limits=limits, **options)
    engine.load(PARAMS)
    return engine


def tokens_of(completions):
    return [(c.tokens, c.stop) for c in completions]


@pytest.mark.slow
def test_a_hundred_mixed_requests_get_what_each_gets_alone():
    requests = requests_of(100)
    together, alone = loaded(), loaded(Limits(slots=3, context=128, steps=8))
    arriving, number, found = list(np.random.default_rng(1).permutation(100)), {}, {}
    rng = np.random.default_rng(2)
    while arriving or not together.idle:
        for _ in range(min(int(rng.integers(0, 8)), len(arriving))):
            i = int(arriving.pop())
            number[together.submit(requests[i])] = i
        for update in together.step():
            if update.completion is not None:
                found.setdefault(number[update.number], {})[update.sample] = update.completion
    for i, request in enumerate(requests):
        ((_, expected),) = alone.run([request])
        assert tokens_of(found[i][s] for s in range(request.samples)) == tokens_of(expected)
        for s, completion in enumerate(expected):
            np.testing.assert_allclose(found[i][s].logps, completion.logps, atol=1e-4)


@pytest.mark.slow
def test_shapes_come_from_two_ladders_whatever_is_asked_for():
    before = programs.decode._cache_size(), programs.prefill._cache_size()
    engine = loaded(Limits(slots=8, context=300, steps=2, chunks=(8, 16)))
    list(engine.run(requests_of(20, seed=1)))
    list(engine.run(requests_of(30, seed=2, sampling=Sampling(0.37, 0.77, 11, 0.02), stop_ids=(1, 2, 3, 4))))
    list(engine.run([Request([1] * 280, 20)]))
    slots, tokens = ("slots=1", "slots=4", "slots=8"), ("tokens=160", "tokens=320")
    decodes = {f"decode {a} {b}" for a in slots for b in tokens}
    starts = ("after prefixes", "after a prefix", "from the start")
    chunks = ("chunk=8", "chunk=16")
    prefills = {f"prefill {a} {b} {c} {d}" for a in slots for b in tokens for c in chunks for d in starts}
    used = set(engine.programs)
    assert used <= decodes | prefills
    assert {"decode slots=8 tokens=160", "decode slots=1 tokens=320"} <= used
    assert programs.decode._cache_size() - before[0] <= len(used & decodes)
    assert programs.prefill._cache_size() - before[1] <= len(used & prefills)


def finished(engine):
    found = []
    while not engine.idle:
        found += [u.completion for u in engine.step() if u.completion]
    return found


@pytest.mark.slow
def test_a_request_longer_than_the_slots_waits_for_those_that_run_where_memory_is_short():
    room = 960 * token_bytes(CONFIG, "float32")
    engine = loaded(Limits(slots=10, steps=4, chunks=(16,), cache_bytes=room))
    short = [Request([1, 2, 3], 40, counter=i) for i in range(10)]
    list(engine.run(short))
    for request in short:
        engine.submit(request)
    engine.step()
    engine.submit(Request([1] * 150, 12))
    lengths, held = [], []
    while not engine.idle:
        lengths += [len(u.completion.tokens) for u in engine.step() if u.completion]
        held.append(engine.cache_bytes)
    assert sorted(lengths) == [12, *[40] * 10]
    assert max(held) <= room


@pytest.mark.slow
@pytest.mark.parametrize("context", [0, CONFIG.max_positions])
def test_memory_for_less_than_the_context_serves_what_fits(context):
    room = 128 * token_bytes(CONFIG, "float32")
    engine = loaded(Limits(slots=2, steps=4, chunks=(16,), context=context, cache_bytes=room))
    assert engine.context == 124
    with pytest.raises(RefusedRequest, match="keys and values of 125 tokens take"):
        engine.submit(Request([1] * 100, 25))
    engine.submit(Request([1] * 100, 24))
    assert [len(c.tokens) for c in finished(engine)] == [24]
    assert engine.cache_bytes <= room


@pytest.mark.slow
def test_a_stream_gets_its_first_token_at_once():
    engine = loaded(Limits(slots=2, context=64, steps=8))
    with pytest.raises(RefusedRequest):
        list(engine.run([Request([1] * 60, 20)]))
    engine.submit(Request([1, 2, 3], 20))
    assert [len(u.tokens) for u in engine.step()] == [1]
    assert [len(u.tokens) for u in engine.step()] == [8]
    engine.submit(Request([4, 5], 20))
    assert sorted(len(u.tokens) for u in engine.step()) == [1, 1]


@pytest.mark.slow
def test_updates_are_the_completion_in_pieces():
    engine = loaded()
    request = requests_of(1, max_tokens=20, samples=2)[0]
    engine.submit(request)
    pieces, ends = {0: [], 1: []}, {}
    while not engine.idle:
        for update in engine.step():
            assert len(update.tokens) == len(update.logps) <= LIMITS.steps
            pieces[update.sample] += update.tokens
            if update.completion:
                ends[update.sample] = update.completion
    assert pieces == {s: c.tokens for s, c in ends.items()}


@pytest.mark.slow
def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it():
    request = requests_of(1, seed=4, max_tokens=20, samples=1, stop_ids=())[0]
    ((_, (whole,)),) = loaded().run([request])
    wanted = f"<{whole.tokens[6]}>"
    first = whole.tokens.index(whole.tokens[6])

    def decode(ids):
        return "".join(f"<{i}>" for i in ids)

    stopping = Request(
        request.prompt, 20, request.sampling, seed=9, find_stop=stop_strings(decode, ["nothing", wanted])
    )
    ((_, (cut,)),) = loaded().run([stopping])
    assert (cut.tokens, cut.stop) == (whole.tokens[: first + 1], "string")
    assert cut.logps == pytest.approx(whole.logps[: first + 1], abs=1e-5)


@pytest.mark.slow
def test_a_refused_request_is_named_and_the_others_go_on():
    engine = loaded()
    good = requests_of(2)
    engine.submit(good[0])
    with pytest.raises(
        RefusedRequest, match="request long.jsonl:7: a prompt of 110 tokens and 30 new ones exceed this"
    ):
        engine.submit(Request([1] * 110, 30, name="long.jsonl:7"))
    with pytest.raises(RefusedRequest, match="exceed the model's 512 positions"):
        loaded(Limits()).submit(Request([1] * 510, 30))
    engine.submit(good[1])
    assert len(finished(engine)) == sum(r.samples for r in good)


@pytest.mark.slow
def test_a_thousand_requests_stay_within_the_memory_for_the_cache():
    budget = 600_000
    engine = loaded(Limits(slots=64, context=128, steps=4, cache_bytes=budget))
    for request in requests_of(1000, seed=5, max_tokens=3, samples=1):
        engine.submit(request)
    ends, most = 0, 0
    while not engine.idle:
        ends += sum(u.completion is not None for u in engine.step())
        most = max(most, engine.cache_bytes)
    assert ends == 1000
    assert budget / 2 < most <= budget
    with pytest.raises(RefusedRequest, match="MiB, the cache may have 0.0 MiB"):
        loaded(Limits(cache_bytes=1000)).submit(Request([1], 5))


@pytest.mark.slow
def test_new_weights_are_sampled_at_once_without_a_new_program_and_without_old_caches():
    engine = loaded()
    requests = requests_of(4, seed=6, samples=2)
    list(engine.run(requests))
    before = engine.programs
    changed = jax.tree.map(lambda x: x * 1.3 if x.ndim > 1 else x, PARAMS)
    engine.load(changed)
    fresh = Engine(CONFIG, limits=LIMITS)
    fresh.load(changed)
    assert {i: tokens_of(c) for i, c in engine.run(requests)} == {i: tokens_of(c) for i, c in fresh.run(requests)}
    assert engine.programs == before


def test_a_caller_that_leaves_early_leaves_the_engine_free():
    engine = loaded()
    requests = requests_of(8, seed=7)
    running = engine.run(requests)
    next(running)
    running.close()
    assert engine.idle
    assert len(dict(engine.run(requests))) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "gap"),
    [
        ({"kv_cache_dtype": "int8"}, 0.05),
        ({"kv_cache_dtype": "bfloat16"}, 0.05),
        ({"quantization": "int8"}, 0.1),
        ({"dtype": "bfloat16"}, 0.1),
        ({"dtype": "bfloat16", "quantization": "int8"}, 0.2),
    ],
)
def test_smaller_types_stay_near_the_exact_policy(options, gap):
    """Log-probabilities that the engine records against those of the exact weights, for the tokens it chose."""
    requests = requests_of(6, seed=8, sampling=Sampling(), samples=1, max_tokens=12)
    found = dict(loaded(Limits(slots=1, context=128, steps=4), **options).run(requests))
    for i, request in enumerate(requests):
        (completion,) = found[i]
        gaps = np.abs(np.asarray(completion.logps) - trainer_logps(request.prompt, completion.tokens))
        assert 0 < gaps.mean() < gap


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False])
def test_in_fast_products_the_sampler_rounds_as_the_trainer_does(kernels, monkeypatch):
    """What is left is the order of sums, of which few change how an activation is rounded."""
    requests = requests_of(6, seed=8, sampling=Sampling(), samples=1, max_tokens=12)
    exact, pairs, found = PARAMS, [], {}
    if not kernels:
        monkeypatch.setattr(Engine, "cpu_kernels", False)
    with jax.default_matmul_precision(ROUNDED):
        engine = loaded(Limits(slots=2, context=128, steps=4))
        assert engine.weights.dtype == "bfloat16"
        found = dict(engine.run(requests))
        pairs = [(r.prompt, found[i][0].tokens) for i, r in enumerate(requests)]
        rounded = np.concatenate(token_logps(CONFIG, exact, pairs, 1.0, choose("float32").compute, 512))
    plain = np.concatenate(token_logps(CONFIG, exact, pairs, 1.0, choose("float32").compute, 512))
    sampled = np.concatenate([found[i][0].logps for i in range(len(requests))])
    # Of the other rounding sampler and trainer would be as far apart as both are from exact products.
    assert 0 < np.abs(sampled - rounded).mean() < 0.5 * np.abs(rounded - plain).mean()
    ratio = rounded - sampled
    assert np.mean(np.expm1(ratio) - ratio) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_what_old_weights_cached_is_not_used_with_new_ones(steps):
    """Weights that change during a run: later requests, of the same prompt too, get what a fresh engine gives them."""
    limits = Limits(slots=2, context=128, steps=4)
    engine = loaded(limits)
    (first, second), changed = requests_of(2, seed=9, samples=1), jax.tree.map(lambda x: 1.3 * x, PARAMS)
    # Three samples and two slots: the third waits, and its prompt is in a slot of the old weights.
    first = dataclasses.replace(first, prompt=list(range(2, 42)), max_tokens=16, samples=3)

    def ended(used):
        updates = []
        while not used.idle:
            updates += used.step()
        return {u.sample: u.completion for u in updates if u.completion}

    engine.submit(first)
    for _ in range(steps):
        assert not any(u.completion for u in engine.step())
    engine.load(changed)
    fresh = Engine(CONFIG, limits=limits)
    fresh.load(changed)
    late = ended(engine)[2]
    for request in (first, second):
        fresh.submit(request)
        wanted = ended(fresh)
        assert request is not first or late == wanted[2]
        engine.submit(request)
        assert ended(engine) == wanted


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
