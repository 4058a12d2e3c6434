"""The FLOPs that speeds are told in, against a count by hand and against the compiler's."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from rlhf.tuning.device import Compute, peak_memory_bytes
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.training.batch import Group, Layout, micro_batches
from rlhf.tuning.training.forward import logps_and_entropy
from rlhf.tuning.training.speed import Meter, forward_flops, measured_peak
from tests.tuning.tiny import CONFIG

GROUPS = [Group([1] * 11, [[2] * 5, [3] * 9], [0, 1]), Group([4], [[5] * 3], [2], [[1, 0, 1]])]
KERNELS = 2 * (64 * 64 + 64 * 32) + 3 * 64 * 128


def seen(window):
    """Pairs of positions, one by one."""
    count = 0
    for group in GROUPS:
        p = len(group.prompt)
        positions = [*range(p), *(p + i for c in group.completions for i in range(len(c)))]
        count += sum(min(position + 1, window) for position in positions)
    return count


@pytest.mark.parametrize("sliding", [(), (True, False)])
def test_the_count_is_that_of_pairs_that_see_each_other(sliding):
    config = dataclasses.replace(CONFIG, sliding_window=4 if sliding else None, sliding_layers=sliding)
    pairs = seen(10**6) + seen(4 if sliding else 10**6)
    body = 2 * KERNELS * (25 + 4) + 2 * 4 * 16 * pairs
    assert forward_flops(config, GROUPS, head=False) == 2 * body
    assert forward_flops(config, GROUPS) == 2 * (body + 64 * 97 * (14 + 2))


def test_the_count_agrees_with_the_compiler():
    # One layer, since the compiler counts the body of a loop once; full rows, so there is nothing but the model.
    config = dataclasses.replace(CONFIG, num_layers=1, vocab_size=512, sliding_window=None)
    groups = [Group([1], [[2] * 63], [i]) for i in range(8)]
    (batch,) = micro_batches(groups, layout=Layout(64, 8), completion_tokens=63)
    graph = decoder_graph(config)
    params = jax.eval_shape(lambda: random_params(config, 0))
    arrays = jax.tree.map(jnp.asarray, batch.arrays())
    program = jax.jit(lambda p, b: logps_and_entropy(graph, p, b, 1.0, Compute())[0])
    told = program.lower(params, arrays).compile().cost_analysis()["flops"]
    # It also counts the elementwise work, and all of attention where half is masked.
    assert forward_flops(config, groups) == pytest.approx(told, rel=0.25)


def test_steps_that_compile_are_left_out_of_the_whole():
    meter = Meter("float32")
    for seconds in (100.0, 2.0, 50.0, 2.0):
        meter._last -= seconds
        told = meter.step(1000, measured_peak("float32"))
        assert told["tokens_per_second"] == pytest.approx(1000 / seconds, rel=0.02)
        assert told["seconds"] == pytest.approx(seconds, rel=0.02)
    assert meter.whole()["tokens_per_second"] == pytest.approx(500, rel=0.02)
    assert meter.whole()["mfu"] == pytest.approx(0.5, rel=0.02)
    assert 100 < meter.whole()["peak_memory_mb"] <= peak_memory_bytes() / 2**20 + 1
    assert Meter("float32").rates() == {}


def test_no_step_is_faster_than_the_peak_that_was_measured_beside_other_work():
    meter = Meter("float32")
    for share in (0.5, 2.0, 1.0):
        meter._last -= 2.0
        told = meter.step(1000, share * 2.0 * measured_peak("float32"))
    assert told["mfu"] == pytest.approx(0.5, rel=0.02) and meter.rates()["mfu"] <= 1


def test_a_measurement_between_two_steps_is_no_part_of_the_next():
    meter = Meter("float32")
    meter._last -= 100.0
    meter.skip()
    meter._last -= 2.0
    assert meter.step(1000, 1.0)["seconds"] == pytest.approx(2.0, rel=0.02)


def test_the_peak_is_a_rate_that_a_device_can_have():
    assert 1e9 < measured_peak("float32") < 1e16
    assert measured_peak("float32") is measured_peak("float32")
