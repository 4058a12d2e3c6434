"""Keys and values in pages: the same samples as from slots, whatever memory there is and whoever shares it."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.paged import engine as paged_engine
from rlhf.tuning.rollout.engine.paged.attention import page_bytes
from rlhf.tuning.rollout.engine.paged.engine import PagedEngine
from rlhf.tuning.rollout.engine.replicas import engine_at
from rlhf.tuning.rollout.requests import RefusedRequest, Request, Sampling
from tests.tuning.rollout.engine.support import PARAMS, requests_of, trainer_logps
from tests.tuning.tiny import CONFIG

PAGE = 16
LIMITS = Limits(slots=4, context=64, steps=4, chunks=(32,), page_tokens=PAGE)
PLENTY = 100


def paged(pages=PLENTY, config=CONFIG, params=PARAMS, limits=LIMITS, **options):
    """An engine with memory for so many pages, one of which holds nothing."""
    room = pages * page_bytes(config, limits.page_tokens, "float32", None)
    engine = PagedEngine(config, limits=dataclasses.replace(limits, cache_bytes=room), **options)
    engine.load(params)
    return engine


def slots(config=CONFIG, params=PARAMS, **options):
    """An engine with slots."""
    engine = Engine(config, limits=LIMITS, **options)
    engine.load(params)
    return engine


def ended(engine, requests, arriving=8):
    """Completions of requests that come some at each step, and how many runs have lost their pages."""
    waiting, number, found, lost = list(enumerate(requests)), {}, {}, 0
    while waiting or not engine.idle:
        for i, request in waiting[:arriving]:
            number[engine.submit(request)] = i
        del waiting[:arriving]
        before = {id(run) for run in engine._waiting}
        for update in engine.step():
            if update.completion is not None:
                found.setdefault(number[update.number], {})[update.sample] = update.completion
        lost += sum(id(run) not in before and bool(run.tokens) for run in engine._waiting)
    return [[found[i][s] for s in range(r.samples)] for i, r in enumerate(requests)], lost


def assert_same(found, wanted):
    for mine, its in zip(found, wanted, strict=True):
        assert [(c.tokens, c.stop) for c in mine] == [(c.tokens, c.stop) for c in its]
        for one, other in zip(mine, its, strict=True):
            np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)


@functools.cache
def expected(config=CONFIG):
    """What slots give for the mixed requests."""
    requests = requests_of(20)
    completions = dict(slots(config).run(requests))
    return requests, [completions[i] for i in range(len(requests))]


@pytest.mark.slow
@pytest.mark.parametrize("pages", [PLENTY, 5])
def test_mixed_requests_get_from_pages_what_they_get_from_slots(pages):
    """Four pages are for one sequence of the longest: others wait."""
    requests, wanted = expected()
    engine = paged(pages)
    found, _ = ended(engine, requests)
    assert_same(found, wanted)
    assert engine.cache_bytes <= pages * page_bytes(CONFIG, PAGE, "float32", None)
    # Nothing is held by nobody, and programs are few.
    assert engine._seats._pages.held == 0
    assert len(engine.programs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 7, 24])
def test_the_kernel_for_gpus_gives_the_same_samples(window, monkeypatch):
    """In Pallas' interpreter, prompts and completions mixed, with pages for some at a time."""
    config = dataclasses.replace(CONFIG, sliding_window=window)
    requests, wanted = expected(config)
    monkeypatch.setattr(paged_engine, "kernel_for", lambda *_: "gpu")
    engine = paged(9, config)
    found, _ = ended(engine, requests)
    assert engine._seats.cache[0].keys() == {"by_head"}
    assert_same(found, wanted)


@pytest.mark.slow
def test_a_run_that_loses_its_pages_goes_on_with_the_same_tokens():
    """Four sequences that grow to four pages each, where there are seven."""
    rng = np.random.default_rng(5)
    kinds = [Sampling(), Sampling(0.0), Sampling(1.5), Sampling(0.7, 0.9, 5)]
    requests = [Request(rng.integers(0, 97, 10).tolist(), 50, kind, counter=i) for i, kind in enumerate(kinds)]
    wanted, nothing = ended(paged(), requests)
    engine = paged(8)
    found, lost = ended(engine, requests)
    assert lost > 0 == nothing
    assert_same(found, wanted)
    assert {len(completion.tokens) for (completion,) in found} == {50}
    assert engine._seats._pages.held == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        {"head_dim": 64, "num_heads": 4, "num_kv_heads": 1},
        {"head_dim": 128, "sliding_window": 7},
        {"attention_softcap": 2.0, "final_softcap": 3.0, "num_kv_heads": 4, "qk_norm": True},
    ],
    ids=["one head of keys, 64", "window, 128", "softcap, queries' own keys"],
)
def test_every_kind_of_attention_gives_what_slots_give(kind):
    config = dataclasses.replace(CONFIG, **kind)
    params = random_params(config, 5)
    engine = paged(config=config, params=params)
    requests = requests_of(5, seed=3, sampling=Sampling(), samples=2, max_tokens=16)
    found, _ = ended(engine, requests)
    wanted = dict(slots(config, params).run(requests))
    assert_same(found, [wanted[i] for i in range(len(requests))])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [None, "gpu"])
def test_int8_keys_and_values_give_what_slots_give(kernel, monkeypatch):
    monkeypatch.setattr(Engine, "cpu_kernels", False)
    monkeypatch.setattr(paged_engine, "kernel_for", lambda *_: kernel)
    requests = requests_of(4)
    wanted = dict(slots(kv_cache_dtype="int8").run(requests))
    engine = paged(9, kv_cache_dtype="int8")
    found, _ = ended(engine, requests)
    assert {x.dtype for x in jax.tree.leaves(engine._seats.cache)} == {np.dtype("int8"), np.dtype("float32")}
    assert_same(found, [wanted[i] for i in range(len(requests))])


def fed_tokens(engine):
    """Makes an engine count the tokens of the prompts that it feeds."""
    counts = []
    pieces = engine._seats.pieces

    def counted(chunk):
        found = pieces(chunk)
        counts.append(sum(count for seat, count in found if seat.pending > 1))
        return found

    engine._seats.pieces = counted
    return counts


@pytest.mark.slow
def test_a_group_shares_the_full_blocks_of_its_prompt():
    prompt = np.random.default_rng(0).integers(0, 97, 3 * PAGE + 5).tolist()
    engine = paged()
    counts = fed_tokens(engine)
    found, _ = ended(engine, [Request(prompt, 8, samples=4, seed=1)])
    assert sum(counts) == len(prompt) + 3 * 5
    for completion in found[0]:
        np.testing.assert_allclose(completion.logps, trainer_logps(prompt, completion.tokens), atol=1e-5)


def test_a_system_prompt_and_the_last_turn_are_found_by_their_blocks():
    rng = np.random.default_rng(1)
    system, first, second = (rng.integers(0, 97, n).tolist() for n in (2 * PAGE, 5, 6))
    engine = paged()
    ((said,),), _ = ended(engine, [Request(system + first, 12, seed=1, keep=True)])
    counts = fed_tokens(engine)
    turn = system + first + said.tokens + second
    ((answer,), (other,)), _ = ended(engine, [Request(turn, 4, seed=2, after=1), Request(system + second, 4, seed=3)])
    cached = (len(turn) - len(second) - 1) // PAGE * PAGE
    assert sum(counts) == len(turn) - cached + len(second)
    np.testing.assert_allclose(answer.logps, trainer_logps(turn, answer.tokens), atol=1e-5)
    np.testing.assert_allclose(other.logps, trainer_logps(system + second, other.tokens), atol=1e-5)


def test_what_old_weights_cached_is_not_used_with_new_ones():
    changed = jax.tree.map(lambda x: 1.3 * x, PARAMS)
    prompt = list(range(2, 2 + 2 * PAGE + 3))
    engine = paged()
    ended(engine, [Request(prompt, 4)])
    engine.submit(Request(prompt, 16, seed=4))
    engine.step()
    engine.load(changed)
    # One run goes on with what it has, whose blocks no other may find.
    number = engine.submit(Request(prompt, 6, seed=5))
    found = {}
    while not engine.idle:
        found |= {u.number: u.completion for u in engine.step() if u.completion}
    ((fresh,),), _ = ended(paged(params=changed), [Request(prompt, 6, seed=5)])
    assert found[number].tokens == fresh.tokens
    np.testing.assert_allclose(found[number].logps, fresh.logps, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["slots", "pages"])
def test_a_cancelled_request_keeps_what_it_has_and_leaves_the_others_alone(cache):
    requests = requests_of(6, seed=3, max_tokens=14, samples=1, stop_ids=())
    alone, _ = ended(paged(), requests)
    # The last one waits.
    engine = paged(9) if cache == "pages" else slots()
    numbers = [engine.submit(r) for r in requests]
    updates = engine.step()
    engine.cancel(numbers[0])
    engine.cancel(numbers[5])
    while not engine.idle:
        updates += engine.step()
    ends = {u.number: u.completion for u in updates if u.completion}
    assert ends[numbers[0]].stop == ends[numbers[5]].stop == "cancelled"
    kept = ends[numbers[0]].tokens
    assert 0 < len(kept) < 14 and kept == alone[0][0].tokens[: len(kept)]
    for i in range(1, 5):
        assert ends[numbers[i]].tokens == alone[i][0].tokens
    assert cache == "slots" or engine._seats._pages.held == 0


@pytest.mark.slow
def test_a_request_beyond_the_memory_is_refused_and_one_that_fills_it_ends():
    engine = paged(5, limits=dataclasses.replace(LIMITS, context=0))
    assert engine.context == 4 * PAGE
    with pytest.raises(RefusedRequest, match="keys and values of 65 tokens take"):
        engine.submit(Request([1] * 40, 25))
    ((completion,),), _ = ended(engine, [Request([1] * 40, 24)])
    assert len(completion.tokens) == 24


@pytest.mark.slow
def test_a_longer_request_than_the_tables_waits_for_those_that_run():
    engine = paged(9, limits=dataclasses.replace(LIMITS, context=0))
    list(engine.run([Request([1, 2, 3], 8)]))
    numbers = [engine.submit(Request([1, 2, 3], 8, counter=1)), engine.submit(Request([1] * 110, 12))]
    order = []
    while not engine.idle:
        order += [u.number for u in engine.step() if u.completion]
    assert order == numbers


def test_prompts_are_scored_beside_the_pages():
    prompt = list(range(3, 30))
    np.testing.assert_allclose(paged(top=2).score(prompt).logps, slots(top=2).score(prompt).logps, atol=1e-5)


def test_settings_choose_the_cache():
    assert type(engine_at(None, CONFIG)) is Engine
    assert isinstance(engine_at(None, CONFIG, cache="paged"), PagedEngine)


def test_an_engine_that_failed_serves_what_comes_next():
    engine = paged()
    engine.submit(Request([1, 2, 3], 8))
    engine.step()
    engine.abandon()
    assert engine.idle
    ((completion,),), _ = ended(engine, [Request([4, 5], 6)])
    np.testing.assert_allclose(completion.logps, trainer_logps([4, 5], completion.tokens), atol=1e-5)
