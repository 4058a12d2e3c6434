"""The bytes of an engine are those that it makes, and its program's those of the compiler."""

import dataclasses

import pytest

from rlhf.tuning.axes import Axes
from rlhf.tuning.fit import needs as needs_of
from rlhf.tuning.fit.machines import machine
from rlhf.tuning.fit.needs import peak
from rlhf.tuning.fit.sampling import Sampled
from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.rollout.engine.limits import FREE_SHARE, Limits
from rlhf.tuning.rollout.engine.paged.attention import page_bytes
from rlhf.tuning.rollout.engine.replicas import engine_at
from rlhf.tuning.rollout.requests import RefusedRequest, Request
from rlhf.tuning.settings import ComputeSettings
from rlhf.tuning.shapes import bucket
from tests.aot.shapes import public

MODEL = tiny(512)
HEADS_OF_64 = dataclasses.replace(
    public("llama-3-8b"), num_layers=16, hidden_size=2048, intermediate_size=8192, head_dim=64
)
"""Llama-3.2-1B."""
FULL = 10 * page_bytes(MODEL, 64, "float32", None)
"""Room for ten pages."""
EXACT = ComputeSettings(dtype="float32")
LIMITS = Limits(slots=8, context=128, steps=8, chunks=(64,))


def sampled(model=MODEL, samples=64, limits=LIMITS, compute=EXACT, **options):
    return Sampled(model, samples, limits, compute, options)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["slots", "paged"])
@pytest.mark.parametrize(
    ("samples", "most", "room"),
    [
        (64, 8, FULL),
        (5, 32, 2**30),
        (64, 8, 2**30),
        (5, 32, FULL),
    ],
    ids=["many-full", "few-free", "many-free", "few-full"],
)
def test_an_engine_has_the_sequences_and_bytes_that_are_said(cache, room, samples, most):
    """Also where few samples leave some of its slots empty, and where a context is no power of two."""
    context = bucket(64 + 100, 64)
    limits = dataclasses.replace(LIMITS, cache_bytes=room, slots=most, context=context)
    found = sampled(samples=samples, limits=limits, cache=cache).needs(machine("cpu"))
    engine = engine_at(None, MODEL, "float32", limits, cache=cache)
    engine.load(random_params(MODEL, 0))
    for i in range(samples):
        engine.submit(Request([1 + i] * 64, max_tokens=100, counter=i))
    engine.step()
    assert engine.cache_bytes == found.parts["cache"]
    assert engine.weights.nbytes == found.parts["sampling weights"]
    assert min(samples, engine.slots_for(context)) == min(samples, found.shape["slots"])


@pytest.mark.slow
def test_layers_that_are_compiled_one_by_one_add_as_much_each(monkeypatch):
    """Two and four of six layers give the peak of all six."""
    on, model = machine("cpu"), dataclasses.replace(MODEL, num_layers=6)
    found = sampled(model, cache="paged").needs(on)
    assert found.layers == 6
    said = peak(found, on)
    monkeypatch.setattr(needs_of, "MORE", 6)
    assert found.held < said == pytest.approx(peak(found, on), rel=0.001)


def on_tpu(model, **options):
    limits = Limits(slots=1024, context=2048, cache_share=FREE_SHARE, chunks=(128, 1024))
    return sampled(model, 4096, limits, ComputeSettings(), **options).needs(machine("v5e-1"))


def test_a_tpu_has_pages_whose_heads_are_128_wide_unless_slots_are_asked_for():
    """So a model with heads of 64 has half as many sequences at once in pages."""
    auto, slots = on_tpu(HEADS_OF_64), on_tpu(HEADS_OF_64, cache="slots")
    assert auto.shape["slots"] == pytest.approx(slots.shape["slots"] / 2, rel=0.05)
    assert auto.parts["cache"] == pytest.approx(slots.parts["cache"], rel=0.02)
    page = page_bytes(HEADS_OF_64, 64, "bfloat16", "tpu")
    # One page holds nothing.
    assert auto.shape["slots"] == (auto.parts["cache"] - page) // (page * 2048 // 64)


def test_pages_are_cut_over_the_devices_that_heads_are_cut_over():
    limits = Limits(slots=64, context=2048, cache_bytes=2**32, chunks=(1024,))
    one, four = (
        sampled(public("llama-3-8b"), 64, limits, ComputeSettings(mesh=Axes(1, 1, n))).needs(machine(f"v6e-{n}"))
        for n in (1, 4)
    )
    assert one.shape["slots"] == four.shape["slots"] and four.parts["cache"] == one.parts["cache"] / 4
    assert four.parts["sampling weights"] == pytest.approx(one.parts["sampling weights"] / 4, rel=0.001)


def test_without_room_there_is_one_sequence_on_a_tpu_and_a_refusal_on_a_cpu():
    large = on_tpu(public("qwen3-32b"))
    assert large.shape["slots"] >= 1 and large.held > machine("v5e-1").limit
    with pytest.raises(RefusedRequest):
        sampled(limits=dataclasses.replace(LIMITS, cache_bytes=1)).needs(machine("cpu"))


@pytest.mark.parametrize(("name", "tensor", "per_host"), [("v5e-16", 8, 4), ("v5p-64", 8, 4), ("h100x16", 16, 8)])
def test_an_engine_over_several_hosts_is_refused_with_the_servers_that_can(name, tensor, per_host):
    asked = sampled(public("qwen3-32b"), 8, LIMITS, ComputeSettings(mesh=Axes(-1, 1, tensor)))
    with pytest.raises(ValueError, match=f"a host of {name} has {per_host}; servers of vLLM"):
        asked.needs(machine(name))


@pytest.mark.parametrize(("name", "per_host"), [("v5e-8", 8), ("v6e-4", 4), ("h100x4", 4), ("h100x8", 8), ("cpu", 1)])
def test_a_machine_of_one_host_has_all_devices_there(name, per_host):
    assert machine(name).per_host == per_host
