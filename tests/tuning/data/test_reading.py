"""Batches of prepared examples: nothing lost, nothing mixed up, and the position exact with any number of hosts."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuning.data.reading import Batches, Examples, Reading
from tuning.data.schema import SCHEMAS, table_of, write_parquet


def shards(folder, examples, files=2):
    """Writes (prompt, completion, mask) as an output of the stage; returns the paths."""
    rows = [
        {"id": str(i), "prompt_ids": p, "completion_ids": c, "completion_mask": m}
        for i, (p, c, m) in enumerate(examples)
    ]
    paths = []
    for number in range(files):
        paths.append(folder / f"part-{number:05d}-of-{files:05d}.parquet")
        write_parquet(paths[-1], [table_of(rows[number::files], SCHEMAS["sft"])], SCHEMAS["sft"])
    return paths


def made(count, start=0, longest=12):
    """Examples that can be told from each other by their first token."""
    rng = np.random.default_rng(start)
    return [
        ([start + i, *[1] * int(rng.integers(0, longest - 1))], [2] * int(rng.integers(1, longest)), None)
        for i in range(count)
    ]


def taken_apart(batches):
    """The (tokens, mask) of each example, row by row; positions must start again with each."""
    for batch in batches:
        for tokens, mask, segments, positions in zip(
            batch["tokens"], batch["mask"], batch["segment_ids"], batch["positions"], strict=True
        ):
            assert not tokens[segments == 0].any() and not mask[segments == 0].any()
            for segment in range(1, segments.max(initial=0) + 1):
                where = np.flatnonzero(segments == segment)
                assert np.array_equal(where, np.arange(where[0], where[-1] + 1))
                assert np.array_equal(positions[where], np.arange(len(where)))
                yield tuple(tokens[where].tolist()), tuple(mask[where].tolist())


def wanted(examples):
    return Counter((tuple([*p, *c]), (*[0] * len(p), *(m or [1] * len(c)))) for p, c, m in examples)


IDS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(IDS, IDS, st.booleans()), min_size=1, max_size=40),
    st.sampled_from(["none", "first-fit", "best-fit"]),
    st.integers(1, 5),
)
def test_every_example_comes_once_an_epoch_whole_and_alone_in_its_segment(tmp_path, drawn, packing, rows):
    examples = [(p, c, [i % 2 for i in range(len(c))] if masked else None) for p, c, masked in drawn]
    read = Examples(shards(tmp_path, examples))
    batches = list(Batches([read], Reading(rows, 16, packing, bins=3, epochs=2)))
    assert {batch["tokens"].shape for batch in batches} == {(rows, 16)}
    found = Counter(taken_apart(batches))
    assert found == Counter({key: 2 * count for key, count in wanted(examples).items()})


def test_epochs_differ_in_order_and_a_seed_gives_one_order(tmp_path):
    read = Examples(shards(tmp_path, made(50)))

    def order(seed, epochs=2):
        return [t[0] for t, _ in taken_apart(Batches([read], Reading(1, 24, "none", epochs=epochs, seed=seed)))]

    first = order(0)
    assert sorted(first[:50]) == sorted(first[50:]) == list(range(50))
    assert first[:50] != first[50:] and first == order(0) != order(1)
    assert order(0, epochs=1) == first[:50] != sorted(first[:50])


@pytest.mark.parametrize("packing", ["none", "first-fit", "best-fit"])
@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_a_position_is_exact_with_another_number_of_hosts(tmp_path, packing, at):
    reads = [Examples(shards(tmp_path / str(i), made(60, 100 * i))) for i in range(2)]
    reading = Reading(batch_rows=4, row_tokens=32, packing=packing, bins=6, epochs=2)

    def hosts(count):
        return [Batches(reads, reading, [3, 1], host, count) for host in range(count)]

    def joined(parts):
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    whole = list(hosts(1)[0])
    before = hosts(2)
    for expected in whole[:at]:
        found = joined([next(batches) for batches in before])
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    states = [json.dumps(batches.state()) for batches in before]
    assert states[0] == states[1] and len(states[0]) < 600
    for count in (1, 4):
        after = hosts(count)
        for batches in after:
            batches.restore(json.loads(states[0]))
        rest = [joined(parts) for parts in zip(*after, strict=True)]
        assert len(rest) == len(whole) - at
        for found, expected in zip(rest, whole[at:], strict=True):
            assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_position_goes_through_a_checkpoint(tmp_path):
    from tuning.training.checkpoint import Checkpoints

    read = Examples(shards(tmp_path, made(40)), folder=tmp_path)
    batches = Batches([read], Reading(2, 32, epochs=None))
    list(itertools.islice(batches, 7))
    saved = Checkpoints(tmp_path / "checkpoints")
    saved.save(7, {"w": np.zeros(2)}, {"data": batches.state()})
    saved.close()
    restored = Checkpoints(tmp_path / "checkpoints").restore({"w": np.zeros(2)})
    again = Batches([read], Reading(2, 32, epochs=None), host=1, hosts=2)
    again.restore(restored[1]["data"])
    assert np.array_equal(next(again)["tokens"], next(batches)["tokens"][1:])


def test_weights_are_kept_and_a_small_source_is_repeated(tmp_path):
    large, small = (Examples(shards(tmp_path / str(n), made(n, 1000 * (n == 10)))) for n in (200, 10))
    found = [t[0] for t, _ in taken_apart(Batches([large, small], Reading(8, 32), weights=[0.75, 0.25]))]
    assert len(found) == 210 and abs(sum(t >= 1000 for t in found) - 52) <= 1
    # Repeated evenly: each of the ten five or six times.
    assert set(Counter(t for t in found if t >= 1000).values()) == {5, 6}


def test_mapped_files_hold_the_same_and_leave_nothing_behind(tmp_path):
    paths = shards(tmp_path / "data", made(300))
    (tmp_path / "work").mkdir()
    mapped, held = Examples(paths, folder=tmp_path / "work"), Examples(paths)
    assert isinstance(mapped.tokens, np.memmap) and not list((tmp_path / "work").iterdir())
    assert repr(mapped) == repr(held)
    assert all(np.array_equal(mapped[i]["tokens"], held[i]["tokens"]) for i in range(300))


def test_what_does_not_fit_is_refused(tmp_path):
    read = Examples(shards(tmp_path, made(10)))
    other = Examples(shards(tmp_path / "other", made(10, start=50)))
    for arguments, words in [
        (([read], Reading(4, 8)), "raise row_tokens"),
        (([read], Reading(4, 32), None, 0, 3), "no equal part"),
        (([read], Reading(4, 32), [1.0, 2.0]), "for each of 1"),
        (([read], Reading(4, 32), [0.0]), "positive"),
        (([read, Examples(shards(tmp_path / "none", []))], Reading(4, 32)), "no examples"),
    ]:
        with pytest.raises(ValueError, match=words):
            Batches(*arguments)
    state = Batches([read], Reading(4, 32)).state()
    with pytest.raises(ValueError, match="other examples"):
        Batches([other], Reading(4, 32)).restore(state)
    with pytest.raises(ValueError, match="other reading"):
        Batches([read], Reading(4, 32, seed=1)).restore(state)


def test_packing_is_dense(tmp_path):
    read = Examples(shards(tmp_path, made(3000, longest=60)))
    fills = {}
    for packing in ("none", "first-fit", "best-fit"):
        segments = np.concatenate([b["segment_ids"] for b in Batches([read], Reading(16, 256, packing))])
        fills[packing] = float((segments > 0).mean())
    assert fills["none"] < 0.3 and fills["best-fit"] >= fills["first-fit"] - 0.02 and fills["best-fit"] > 0.93, fills


def test_a_model_sees_no_other_example_of_a_row(tmp_path):
    """Hidden states of a packed row are those of each example alone."""
    import jax.numpy as jnp
    from flax import nnx

    from tuning.models.attention import packed_attention
    from tuning.models.config import tiny
    from tuning.models.decoder import Decoder

    read = Examples(shards(tmp_path, made(12)))
    model = Decoder(tiny(128), rngs=nnx.Rngs(0))

    def hidden(packing):
        found = {}
        for batch in Batches([read], Reading(12, 48, packing, bins=2)):
            segments = jnp.asarray(batch["segment_ids"])
            attention = packed_attention(segments, jnp.zeros_like(segments))
            out, _ = model(jnp.asarray(batch["tokens"]), jnp.asarray(batch["positions"]), attention)
            for row, ids in enumerate(batch["segment_ids"]):
                for segment in range(1, ids.max() + 1):
                    where = ids == segment
                    found[int(batch["tokens"][row][where][0])] = np.asarray(out)[row][where]
        return found

    packed, alone = hidden("best-fit"), hidden("none")
    assert packed.keys() == alone.keys() and len(packed) == 12
    for first, expected in alone.items():
        np.testing.assert_allclose(packed[first], expected, atol=1e-5)
