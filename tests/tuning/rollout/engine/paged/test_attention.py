"""Attention over pages against the formula that comes with JAX's kernel, and where that kernel may be used."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from rlhf.tuning.models.decoder import AttentionSpec
from rlhf.tuning.rollout.engine.paged import attention
from rlhf.tuning.rollout.engine.paged.attention import Ragged, attend_ragged, gathered, kernel_for, stored_head, write
from rlhf.tuning.rollout.engine.paged.pages import NOWHERE, Pages, block_name
from tests.tuning.tiny import CONFIG

pytestmark = pytest.mark.slow

PAGE, WIDTH, COUNT = 16, 5, 24


def batch(heads, group, size, lengths, queries, padding=3):
    """(queries, pages with keys and values, ragged batch) of sequences of these lengths; one more is padding."""
    rng = np.random.default_rng(0)
    rows, used = len(lengths) + 1, len(lengths)
    pages = jnp.asarray(rng.normal(size=(COUNT, PAGE, 2 * heads, size)), jnp.float32)
    table = rng.permutation(np.arange(1, COUNT))[: used * WIDTH].reshape(used, WIDTH)
    starts = np.concatenate([[0], np.cumsum([*queries, 0])])
    count = starts[-1] + padding
    ragged = Ragged(
        np.zeros(count, np.int32),
        np.asarray([*lengths, 0], np.int32),
        np.concatenate([table, np.zeros((1, WIDTH))]).astype(np.int32),
        starts.astype(np.int32),
        np.asarray([used], np.int32),
    )
    q = jnp.asarray(rng.normal(size=(count, heads * group, size)), jnp.float32)
    assert len(ragged.length_R) == rows
    return q, pages, jax.tree.map(jnp.asarray, ragged)


@pytest.mark.parametrize(
    ("heads", "group", "size", "window", "softcap", "queries"),
    [
        (2, 3, 64, None, None, (1, 70, 3, 16)),
        (1, 4, 128, 7, None, (1, 70, 3, 16)),
        (2, 1, 128, 20, 3.0, (1, 70, 3, 16)),
        (2, 2, 64, 9, 2.0, (1, 1, 1, 1)),
    ],
)
def test_it_is_the_formula_of_the_kernel(heads, group, size, window, softcap, queries):
    q, pages, ragged = batch(heads, group, size, (33, 70, 3, 80), queries)
    spec = AttentionSpec(size**-0.5, softcap, window, jnp.zeros(()))
    single = max(queries) == 1
    found = jax.jit(lambda q, pages: attend_ragged(q, pages, ragged, spec, single=single, kernel=None))(q, pages)
    wanted = ref_ragged_paged_attention(
        q, pages, *ragged[1:], sm_scale=spec.scale, sliding_window=window, soft_cap=softcap
    )
    np.testing.assert_allclose(found[: sum(queries)], wanted, atol=2e-6)


@pytest.mark.parametrize(
    ("heads", "group", "softcap", "queries", "keys", "window"),
    [
        (2, 3, None, (1, 1, 1, 1), 128, None),
        # A part for each page, and more parts than pages; one sequence has no query.
        (1, 4, 3.0, (1, 70, 0, 1), 16, None),
        # From within a page, from a page's first token and from the sequence's; of a block of two pages, and a part.
        (1, 2, None, (1, 1, 1, 1), 32, 16),
        (1, 2, 2.0, (1, 70, 0, 1), 16, 33),
        (1, 2, None, (1, 1, 1, 1), 128, 100),
    ],
)
def test_the_kernel_for_gpus_is_what_is_gathered(heads, group, softcap, queries, keys, window, monkeypatch):
    """In Pallas' interpreter: there is no such device here."""
    monkeypatch.setattr(attention, "TRITON_KEYS", keys)
    single = max(queries) == 1
    q, pages, ragged = batch(heads, group, 32, (33, 70, 9, 80), queries)
    spec = AttentionSpec(32**-0.5, softcap, window, jnp.zeros(()))
    by_head = pages.transpose(2, 0, 1, 3)
    found = jax.jit(lambda q, pages: attend_ragged(q, pages, ragged, spec, single=single, kernel="gpu"))(q, by_head)
    wanted = gathered(q, pages, ragged, spec, single=single)
    np.testing.assert_allclose(found[: sum(queries)], wanted[: sum(queries)], atol=2e-6)


def test_pages_by_head_have_the_same_keys_and_values_and_drop_padding():
    k, v = jax.random.normal(jax.random.key(0), (2, 3, 2, 8))
    place = jnp.asarray([1, PAGE + 5, 2 * PAGE])
    padding, other = (jnp.zeros((3, PAGE, 4, 8)).at[0].set(7.0) for _ in range(2))
    wanted = write({"kv": other}, k, v, place)["kv"].at[0].set(padding[0])
    found = write({"by_head": padding.transpose(2, 0, 1, 3)}, k, v, place, "gpu")["by_head"]
    np.testing.assert_array_equal(found, wanted.transpose(2, 0, 1, 3))


def test_keys_and_values_of_a_head_are_neighbours_and_small_heads_are_padded():
    k, v = jnp.full((2, 2, 5), 2.0), jnp.full((2, 2, 5), 3.0)
    pages = write({"kv": jnp.ones((3, 4, 4, 8))}, k, v, jnp.asarray([4 + 1, 8 + 3]))["kv"]
    assert pages[1, 1].tolist() == [[2.0] * 5 + [0.0] * 3, [3.0] * 5 + [0.0] * 3] * 2
    assert (pages[2, 3] == pages[1, 1]).all() and float(jnp.sum(pages != 1)) == 2 * 4 * 8


@pytest.mark.parametrize(
    ("heads", "size", "kv", "dtype", "parts", "takes"),
    [
        (8, 256, "bfloat16", "bfloat16", 1, False),
        (8, 128, "bfloat16", "bfloat16", 1, True),
        (8, 64, "bfloat16", "bfloat16", 1, True),
        (8, 64, "bfloat16", "bfloat16", 4, True),
        (2, 64, "bfloat16", "bfloat16", 4, False),
        (5, 64, "bfloat16", "bfloat16", 1, False),
        (4, 64, "float32", "float32", 1, True),
        (3, 64, "float32", "float32", 1, False),
        (8, 64, "int8", "bfloat16", 1, False),
        (8, 64, "float32", "bfloat16", 1, False),
    ],
)
def test_the_kernel_takes_what_it_checks(heads, size, kv, dtype, parts, takes):
    config = dataclasses.replace(CONFIG, num_heads=2 * heads, num_kv_heads=heads, head_dim=size)
    kernel = kernel_for("tpu", config, kv, dtype, parts)
    assert (kernel == "tpu") == takes
    assert stored_head(config, kernel) == (128 if takes else size)
    assert kernel_for("cpu", config, kv, dtype, parts) is None


@pytest.mark.parametrize(
    ("size", "kv", "parts", "window", "takes"),
    [
        (128, "bfloat16", 1, None, True),
        (256, "bfloat16", 2, None, True),
        (96, "bfloat16", 1, None, False),
        (128, "float32", 1, None, False),
        (128, "int8", 1, 64, True),
        (128, "bfloat16", 4, None, False),
        (128, "bfloat16", 1, 64, True),
    ],
)
def test_the_kernel_for_gpus_takes_what_triton_can_cut(size, kv, parts, window, takes):
    config = dataclasses.replace(CONFIG, num_heads=8, num_kv_heads=2, head_dim=size, sliding_window=window)
    dtype = "bfloat16" if kv == "int8" else kv
    assert (kernel_for("gpu", config, kv, dtype, parts) == "gpu") == takes


def test_pages_are_taken_shared_found_and_forgotten():
    pages = Pages(4)
    first, second = pages.take(), pages.take()
    assert NOWHERE not in (first, second) and pages.available == 1
    name = block_name(b"", [1, 2])
    pages.name(first, name)
    pages.name(second, block_name(name, [3, 4]))
    # The second block has another name where it stands elsewhere.
    assert pages.share(block_name(b"", [3, 4])) is None
    assert pages.share(name) == first
    pages.drop([first, second])
    assert pages.held == 1, "the first page has one more holder"
    pages.drop([first])
    assert pages.share(name) == first and pages.held == 1
    third, fourth = pages.take(), pages.take()
    assert {first, third, fourth} == {1, 2, 3} and pages.take() is None
    assert pages.share(block_name(name, [3, 4])) is None, "its page was taken"
    pages.drop([first])
    pages.forget()
    assert pages.share(name) is None and pages.available == 1


def test_of_what_nobody_holds_the_end_of_the_oldest_is_taken_first():
    pages = Pages(5)
    names = [b""]
    held = [pages.take() for _ in range(4)]
    for page in held:
        names.append(block_name(names[-1], [page]))
        pages.name(page, names[-1])
    pages.drop(held[:2])
    pages.drop(held[2:])
    assert [pages.take() for _ in range(4)] == [held[1], held[0], held[3], held[2]]
