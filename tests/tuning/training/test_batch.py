"""Packed rows: what a shared prompt saves must not change a number (R11)."""

import dataclasses

import jax
import numpy as np
import pytest

from rlhf.tuning.compile_target import compiling_for
from rlhf.tuning.device import Compute, choices
from rlhf.tuning.models.decoder import decoder_graph, scalar_graph
from rlhf.tuning.models.huggingface import scalar_head_params
from rlhf.tuning.shapes import bucket
from rlhf.tuning.training.batch import (
    SLOTS,
    Bounds,
    Group,
    Layout,
    choose_rows,
    count_micro_batches,
    first_fit,
    micro_batches,
    numbered,
    plan_blocks,
    plan_rows,
    split_group,
)
from rlhf.tuning.training.forward import logps_and_entropy, scores
from tests.tuning.tiny import CONFIG, PARAMS, ragged_groups


@jax.jit
def tempered_logps(batch):
    return logps_and_entropy(decoder_graph(CONFIG), PARAMS, batch, 0.7, Compute())[0]


def logps_by_completion(groups: list[Group], layout: Layout, shards: int = 1) -> dict[int, np.ndarray]:
    found = {}
    for batch in micro_batches(groups, layout=layout, completion_tokens=8, shards=shards):
        logps = tempered_logps(batch.arrays())
        for slot, number in enumerate(batch.ids_C):
            if number >= 0:
                found[int(number)] = np.asarray(logps[slot])[batch.mask_CT[slot] > 0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(64, 2),
        Layout(128, 1),
        Layout(64, 8),
        Layout(64, 8, "apart"),
        Layout(64, 8, "side by side"),
        Layout(64, 3, slots=4),
        Layout(64, 3, "apart", slots=2),
    ],
)
def test_packed_logprobs_equal_those_of_each_completion_alone(layout):
    groups = ragged_groups()
    packed = logps_by_completion(groups, layout)
    for group in groups:
        for completion, number in zip(group.completions, group.ids, strict=True):
            alone = logps_by_completion([Group(group.prompt, [completion], [0])], Layout(64, 1))[0]
            np.testing.assert_allclose(packed[number], alone, atol=1e-5)


@pytest.mark.slow
def test_packed_gradient_equals_the_sum_of_unshared_gradients():
    groups = ragged_groups(1)
    graph = decoder_graph(CONFIG)

    def total(params, batches):
        return sum(logps_and_entropy(graph, params, b.arrays(), 1.0, Compute())[0].sum() for b in batches)

    shared = micro_batches(groups, layout=Layout(128, 2), completion_tokens=8)
    apart = [Group(g.prompt, [c], [i]) for g in groups for c, i in zip(g.completions, g.ids, strict=True)]
    unshared = micro_batches(apart, layout=Layout(128, 2), completion_tokens=8)
    a, b = (jax.jit(jax.grad(lambda p, x=x: total(p, x)))(PARAMS) for x in (shared, unshared))
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5)


@pytest.fixture(scope="module")
def params():
    return scalar_head_params(CONFIG, PARAMS, jax.random.normal(jax.random.key(0), (CONFIG.hidden_size,)))


def packed_scores(params, chosen: list[Group]) -> dict[int, np.ndarray]:
    (batch,) = micro_batches(chosen, layout=Layout(256, 4), completion_tokens=8)
    found = np.asarray(scores(scalar_graph(CONFIG), params, batch.arrays(), Compute()))
    return {int(i): found[s] for s, i in enumerate(batch.ids_C) if i >= 0}


@pytest.mark.slow
def test_a_score_does_not_depend_on_its_neighbours(params):
    groups = ragged_groups(2)
    together, alone = packed_scores(params, groups), packed_scores(params, [groups[3]])
    assert alone.keys() <= together.keys()
    for number, value in alone.items():
        np.testing.assert_allclose(value, together[number], atol=1e-5)


@pytest.mark.slow
def test_a_completion_without_tokens_is_scored_at_the_end_of_its_prompt(params):
    prompt = [5, 6, 7]
    alone = packed_scores(params, [Group(prompt, [[], [1]], [0, 1])])[0]
    for before in ([9, 8], [20, 21, 22]):
        assert packed_scores(params, [Group(prompt, [before, []], [0, 1])])[1] == pytest.approx(alone, abs=1e-5)


def test_no_completion_is_lost_or_doubled_and_padding_is_masked():
    groups = ragged_groups(4, count=20)
    batches = micro_batches(groups, layout=Layout(64, 2), completion_tokens=8)
    seen = sorted(int(i) for b in batches for i in b.ids_C if i >= 0)
    assert seen == sorted(i for g in groups for i in g.ids)
    lengths = {i: len(c) for g in groups for c, i in zip(g.completions, g.ids, strict=True)}
    for b in batches:
        for slot, number in enumerate(b.ids_C):
            assert b.mask_CT[slot].sum() == (lengths[int(number)] if number >= 0 else 0)


def test_a_group_too_long_for_a_row_is_split_by_completion_and_keeps_its_prompt():
    group = Group([1] * 10, [[2] * 8, [3] * 8, [4] * 8], [5, 6, 7])
    pieces = split_group(group, 28)
    assert [p.ids for p in pieces] == [[5, 6], [7]]
    assert all(list(p.prompt) == [1] * 10 for p in pieces)
    with pytest.raises(ValueError, match="prompt of 10 and completion of 8 tokens exceed rows of 16"):
        split_group(group, 16)


@pytest.mark.parametrize("seed", range(20))
def test_each_thing_is_in_the_first_place_that_has_room_for_it(seed):
    rng = np.random.default_rng(seed)
    room = int(rng.integers(1, 60))
    sizes = rng.integers(0, room + 1, rng.integers(0, 80)).tolist()
    places, free = [], []
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = next((i for i, left in enumerate(free) if left >= sizes[number]), len(free))
        if place == len(free):
            places.append([])
            free.append(room)
        places[place].append(number)
        free[place] -= sizes[number]
    assert first_fit(sizes, room) == places


def test_what_no_place_has_room_for_is_told():
    with pytest.raises(ValueError, match="11 tokens that belong together do not fit into a row of 10"):
        first_fit([3, 11], 10)


def test_a_place_is_found_without_a_look_at_all_of_them():
    class Size(int):
        looks = 0

        def __gt__(self, other):
            Size.looks += 1
            return super().__gt__(other)

    sizes = [Size(n) for n in np.random.default_rng(0).integers(30, 129, 4096)]
    assert len(first_fit(sizes, 512)) > 400
    assert 0 < Size.looks <= 4096 * 13


@pytest.mark.parametrize("value", [1, 8, 9, 12, 13, 100, 1000])
def test_buckets_hold_their_value_and_waste_at_most_a_third(value):
    size = bucket(value)
    assert size >= value and (size == 8 or value > size * 2 / 3 - 1)


def test_masked_tokens_are_read_and_not_counted():
    group = Group([1, 2], [[3, 4, 5], [6, 7]], [0, 1], [[1, 0, 1], [0, 1]])
    batch = micro_batches([group], layout=Layout(64, 1), completion_tokens=8)[0]
    assert batch.tokens_BL[0, :7].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.mask_CT[:2, :4].tolist() == [[1, 0, 1, 0], [0, 1, 0, 0]]
    assert [p.masks for p in split_group(group, 5)] == [[[1, 0, 1]], [[0, 1]]]
    logps = logps_by_completion([group], Layout(64, 1))
    unmasked = logps_by_completion([Group([1, 2], group.completions, [0, 1])], Layout(64, 1))
    np.testing.assert_array_equal(logps[0], unmasked[0][[0, 2]])


def test_a_shard_has_the_rows_of_its_completions():
    """So no index reaches from one device to another, and log-probabilities are those of one device."""
    groups = ragged_groups(count=12)
    for batch in micro_batches(groups, layout=Layout(64, 8), completion_tokens=8, shards=4):
        rows, completions = (len(x) // 4 for x in (batch.tokens_BL, batch.at_CT))
        assert batch.at_CT.max() < rows * 64 and batch.where_M.shape[0] == 4
        assert batch.where_M.max() <= completions * 8
        for shard in range(4):
            mine = slice(shard * completions, (shard + 1) * completions)
            tokens = batch.tokens_BL[shard * rows : (shard + 1) * rows].reshape(-1)
            last = batch.ids_C[mine] >= 0
            lengths = (batch.mask_CT[mine] > 0).sum(axis=1)
            ends = batch.targets_CT[mine][np.arange(completions), np.maximum(lengths - 1, 0)]
            np.testing.assert_array_equal(tokens[batch.last_C[mine]][last], ends[last])
    sharded, whole = (logps_by_completion(groups, Layout(64, 8), shards) for shards in (4, 1))
    assert sharded.keys() == whole.keys()
    for number, logps in whole.items():
        np.testing.assert_allclose(sharded[number], logps, atol=1e-5)


def test_on_a_gpu_long_completions_have_their_prompts_to_themselves():
    """Its kernel skips the tokens of other groups, not those of other branches."""
    short, long, one = ([Group(range(40), [range(n)] * m, range(m))] for n, m in ((100, 3), (1200, 3), (50, 1)))
    with compiling_for("gpu"):
        layout = choose_rows([long], 4096)
        assert (layout.prompts, layout.row_tokens) == ("apart", 1280)
        assert choose_rows([short], 4096).prompts == "shared"
        assert choose_rows([one], 4096).prompts == "apart"
        assert choose_rows([long], 4096, whole=True).prompts == "side by side"


def test_on_a_tpu_long_completions_have_their_prompts_to_themselves():
    """One mask of L x L booleans costs more there than a copy of the prompt; rows fit the kernel's blocks."""
    short, long = ([Group(range(40), [range(n)] * 3, [0, 1, 2])] for n in (100, 1200))
    assert choose_rows([long], 4096).prompts == "shared"
    with compiling_for("tpu"):
        layout = choose_rows([long], 4096)
        assert (layout.prompts, layout.row_tokens) == ("apart", 1536)
        assert choose_rows([short], 4096).prompts == "shared"
        # Nothing is shared where every group has one completion.
        assert choose_rows([[Group(range(40), [range(50)], [0])]], 4096).prompts == "apart"
        together = choose_rows([long], 4096, least=3640, whole=True)
        assert (together.prompts, together.row_tokens) == ("side by side", 4096)
    for chosen in (layout, together):
        batches = micro_batches(long * 2, layout=chosen, completion_tokens=1200)
        assert all(b.branch_BL is None and "branch_BL" not in b.arrays() for b in batches)
        assert sorted(i for b in batches for i in b.ids_C.tolist() if i >= 0) == [0, 0, 1, 1, 2, 2]
    assert [b.ids_C.tolist() for b in batches] == [[0, 1, 2, -1]] * 2


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_pairs_that_are_longer_than_those_that_chose_the_rows_keep_their_order(platform):
    rng = np.random.default_rng(0)

    def tokens(count):
        return rng.integers(1, 90, count).tolist()

    def pair(prompt, *completions):
        return Group(tokens(prompt), [tokens(n) for n in completions], [0, 1])

    early = numbered([pair(300, 400, 500), pair(200, 300, 400)])
    # The rejected completion is the longer one, and the prompt twice with both is longer than a row.
    late = numbered([pair(200, 300, 400), pair(1300, 100, 200), pair(1200, 150, 300)])
    with compiling_for(platform):
        layout = choose_rows([early], 8192, max(g.size for g in late), whole=True)
        batches = micro_batches(late, layout=layout, completion_tokens=512)
    slots = np.concatenate([batch.ids_C[batch.ids_C >= 0] for batch in batches]).reshape(-1, 2)
    assert sorted(map(tuple, slots.tolist())) == [(0, 1), (2, 3), (4, 5)]


def test_parts_of_a_trajectory_share_a_slot_and_a_micro_batch():
    rng = np.random.default_rng(5)
    whole = ragged_groups(3, count=5)
    # Number 50 has four parts that exceed a row together, 51 has two that fit one.
    lengths = {50: [(40, 3), (45, 2), (50, 4), (20, 1)], 51: [(5, 2), (9, 3)]}
    parts, alone = [], {}
    for number, shapes in lengths.items():
        start, of_parts = 0, []
        for prompt, length in shapes:
            context, new = rng.integers(0, 97, prompt).tolist(), rng.integers(0, 97, length).tolist()
            mask = [int(t % 3 != 1) for t in range(length)]
            parts.append(Group(context, [new], [number], [mask], [start]))
            of_parts.append(logps_by_completion([Group(context, [new], [0], [mask])], Layout(64, 1))[0])
            start += length
        alone[number] = np.concatenate(of_parts)
    groups = [parts[4], *whole[:2], *parts[:4], *whole[2:], parts[5]]
    batches = micro_batches(groups, layout=Layout(64, 1), completion_tokens=10)
    seen = sorted(int(i) for b in batches for i in b.ids_C if i >= 0)
    assert seen == sorted([50, 51, *(i for g in whole for i in g.ids)])
    found = {}
    for batch in batches:
        assert batch.tokens_BL.shape == batches[0].tokens_BL.shape and batch.where_M.max() <= batch.mask_CT.size
        logps = np.asarray(tempered_logps(batch.arrays()))
        for slot, number in enumerate(batch.ids_C):
            found[int(number)] = logps[slot][batch.mask_CT[slot] > 0]
            if number == 50:
                # The end of the last part, whose prompt has 20 tokens.
                assert batch.positions_BL.reshape(-1)[batch.last_C[slot]] == 20
    for number, wanted in alone.items():
        np.testing.assert_allclose(found[number], wanted, atol=1e-5)


def test_a_step_that_is_one_micro_batch_may_have_more_rows_than_one_of_several():
    groups = ragged_groups(6, count=40)
    layout = choose_rows([groups], 256, undivided=1536)
    assert layout.rows * layout.row_tokens <= 256 and layout.undivided * layout.row_tokens <= 1536
    (batch,) = micro_batches(groups, layout=layout, completion_tokens=8)
    assert layout.rows < len(batch.tokens_BL) <= layout.undivided and count_micro_batches(groups, layout) == 1
    # One that is too large even so is cut as if there were no such bound.
    several = groups * 4
    beside = dataclasses.replace(layout, undivided=0)
    assert len(plan_rows(several, layout.row_tokens)) > layout.undivided
    for with_it, without in zip(
        *(micro_batches(numbered(several), layout=one, completion_tokens=8) for one in (layout, beside)), strict=True
    ):
        np.testing.assert_array_equal(with_it.tokens_BL, without.tokens_BL)
        assert len(with_it.tokens_BL) <= layout.rows
    for found, expected in zip(*(logps_by_completion(groups, one).values() for one in (layout, beside)), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_rows_of_a_whole_step_have_few_sizes_and_little_padding():
    layout = Layout(64, 16, undivided=32)
    assert {layout.share(n) for n in range(1, 17)} == set(range(1, 17))
    sizes = {n: layout.share(n) for n in range(17, 33)}
    assert set(sizes.values()) == {20, 24, 28, 32} and all(n <= size < n + 4 for n, size in sizes.items())
    assert layout.share(33) == 11 and Layout(64, 16).share(17) == 9
    assert {Layout(64, 2, undivided=5).share(n) for n in (3, 4, 5)} == {3, 4, 5}


@pytest.mark.parametrize("asked", [0, 640])
def test_a_size_that_is_asked_for_is_that_of_every_micro_batch(asked):
    device = choices("cpu", "cpu", 1, 2**34, "float32")
    several, undivided = device.micro_batch(asked, 2)
    assert (several, undivided) == (
        (640, 640) if asked else (2 * device.row_tokens_per_step, 2 * device.row_tokens_undivided)
    )
    assert device.row_tokens_undivided == 2 * device.row_tokens_per_step
    # An adapter's gradients are small: a step in several micro-batches holds no more for them.
    assert len(set(device.micro_batch(0, 2, adapter=True))) == 1


def _made_up(rounds, limit, longest, rng):
    """Steps of 16 prompts with 4 completions each, whose lengths grow from round to round."""
    for number in range(rounds):
        mean = np.log(limit * (0.05 + 0.4 * number / rounds))
        groups = []
        for _ in range(16):
            sizes = np.minimum(longest, rng.lognormal(mean, 0.7, 4).astype(int) + 1)
            prompt, *completions = (np.ones(n, np.int32) for n in (rng.integers(5, 500), *sizes))
            groups.append(Group(prompt, completions, range(4)))
        yield numbered(groups)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize(("limit", "longest"), [(3000, 3000), (3000, 2800), (400, 390)])
def test_rounds_of_any_lengths_have_two_shapes_within_bounds(platform, limit, longest):
    """The data alone gives a new shape in nearly every round, each of which compiles a step and a pass."""
    shapes = set()
    with compiling_for(platform):
        for groups in _made_up(50, limit, longest, np.random.default_rng(limit)):
            layout = choose_rows([groups], 16384, bounds=Bounds(64, 500 + limit))
            batches = micro_batches(groups, layout=layout, completion_tokens=bucket(limit), shards=4)
            shapes |= {tuple(array.shape for array in batch.arrays().values()) for batch in batches}
            assert sorted(i for batch in batches for i in batch.ids_C.tolist() if i >= 0) == list(range(64))
    assert len(shapes) == 2


def test_rows_within_bounds_have_no_more_completions_than_slots():
    groups = numbered([Group([1], [[2]] * 100, range(100)), *ragged_groups(2, count=9)])
    layout = choose_rows([groups], 4096, bounds=Bounds(200))
    assert (layout.row_tokens, layout.rows) == (512, 8)
    blocks = plan_blocks(groups, layout.row_tokens, layout.prompts, layout.slots)
    assert max(sum(len(g.completions) for g in row) for block in blocks for row in block) == SLOTS
    (batch,) = micro_batches(groups, layout=layout, completion_tokens=8)
    assert len(batch.ids_C) == 8 * SLOTS and batch.where_M.size == batch.tokens_BL.size
    with compiling_for("tpu"):
        pair = [Group(range(40), [range(900)] * 2, [0, 1])]
        together = choose_rows([pair], 16384, least=1840, whole=True, bounds=Bounds(64, 1000))
        assert (together.prompts, together.row_tokens) == ("side by side", 2048)
    # A step has no more rows than completions.
    assert choose_rows([groups[1:]], 4096, bounds=Bounds(3)).rows == 3
