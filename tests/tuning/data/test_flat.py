"""Arrays of tokens: what the shards say, mapped as they are; the same bytes and lengths however rows are divided."""

import tracemalloc

import grain.python as grain
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf.tuning.data import flat, statistics
from rlhf.tuning.data.flat import FlatError, completions_of, load_flat, write_arrays, write_flat
from rlhf.tuning.data.reading import Steps, map_examples
from rlhf.tuning.data.schema import SCHEMAS, table_of, write_parquet
from rlhf.tuning.data.shuffle import shuffled
from tests.support import can_mount, in_small_disk
from tests.tuning.data.run import examples_of, shards


def rows(output, count=50, most=300, seed=0):
    """Rows of an output with random ids below `most`; of `sft` every third has a mask."""
    rng = np.random.default_rng(seed)

    def ids():
        return rng.integers(0, most, rng.integers(1, 9)).tolist()

    found = []
    for number in range(count):
        row = {"prompt_ids": ids()} | {f"{name}_ids": ids() for name in completions_of(output)}
        if output.endswith("sft") and number % 3 == 2:
            row["completion_mask"] = rng.integers(0, 2, len(row["completion_ids"])).tolist()
        found.append(row)
    return found


OUTPUTS = sorted(output for output in SCHEMAS if completions_of(output))


def test_outputs_with_completions_have_arrays_and_prompts_alone_have_none(tmp_path):
    heldout = [f"heldout_{name}" for name in ("labelled", "preference", "sft")]
    assert [*heldout, "labelled", "preference", "sft"] == OUTPUTS
    (tmp_path / "prompts").mkdir()
    shards(tmp_path / "prompts", [{"prompt_ids": [1]}], "prompts")
    write_arrays(tmp_path / "prompts")
    assert not (tmp_path / "prompts" / flat.FOLDER).exists()


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("most", [300, 100_000])
def test_mapped_examples_are_those_of_the_shards(tmp_path, output, most):
    folder, made = tmp_path / output, rows(output, most=most)
    folder.mkdir()
    shards(folder, made, output, files=3)
    write_arrays(folder)
    found = map_examples(folder / flat.FOLDER, completions_of(output))
    assert isinstance(found.tokens, np.memmap) and found.tokens.dtype == (np.uint16 if most == 300 else np.int32)
    assert (found.mask is not None) == output.endswith("sft")
    for i, (group, row) in enumerate(zip(found, made, strict=True)):
        assert group.prompt == row["prompt_ids"]
        assert group.completions == [row[f"{name}_ids"] for name in completions_of(output)]
        assert list(group.ids) == [i * len(group.completions) + c for c in range(len(group.completions))]
        if output.endswith("sft"):
            assert group.masks == [row.get("completion_mask") or [1] * len(row["completion_ids"])]
    assert len(found) == len(made)
    assert found.prompt_bytes() == [np.asarray(row["prompt_ids"], np.int32).tobytes() for row in made]


@pytest.mark.parametrize("late", [{"completion_mask": [0, 1]}, {"completion_ids": [70_000, 2]}])
def test_a_mask_or_a_large_id_that_comes_late_changes_what_was_written_before(tmp_path, late):
    """They are in the last shard alone."""
    made = [{"prompt_ids": [1, 2, 3], "completion_ids": [4, 5]} for _ in range(40)]
    made[-1] |= late
    write_flat(shards(tmp_path, made, files=20), ["completion"], tmp_path / "made")
    found = map_examples(tmp_path / "made")
    assert [(g.prompt, g.completions) for g in found] == [(r["prompt_ids"], [r["completion_ids"]]) for r in made]
    masks = [[r.get("completion_mask", [1, 1])] for r in made] if "completion_mask" in late else [None] * 40
    assert [g.masks for g in found] == masks
    names = ["offsets.npy", "tokens.npy"]
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == sorted(
        [*names, *["mask.npy"] * (found.mask is not None)]
    )


def test_bytes_depend_on_the_rows_alone(tmp_path):
    made = rows("sft", 60)
    found = set()
    for files in (1, 2, 30):
        folder = tmp_path / str(files) / "sft"
        folder.mkdir(parents=True)
        shards(folder, made, files=files)
        write_arrays(folder)
        found.add(tuple(path.read_bytes() for path in sorted((folder / flat.FOLDER).iterdir())))
    assert len(found) == 1


def test_mapping_holds_nothing_whatever_the_number_of_rows(tmp_path):
    table = table_of([{"prompt_ids": [1, 2], "completion_ids": [3]}] * 1000, SCHEMAS["sft"])
    write_parquet(tmp_path / "sft" / "part-00000.parquet", [table] * 100, SCHEMAS["sft"])
    write_arrays(tmp_path / "sft")
    tracemalloc.start()
    try:
        found = map_examples(tmp_path / "sft" / flat.FOLDER)
        assert len(found) == 100_000 and found[99_999].prompt == [1, 2]
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_no_rows_are_no_examples(tmp_path):
    write_flat(shards(tmp_path, [], files=1), ["completion"], tmp_path / "made")
    assert len(map_examples(tmp_path / "made")) == 0


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("tokens", None, r"has \['offsets'\], expected tokens and offsets"),
        ("tokens", np.zeros(3, np.int32), r"offsets.npy: 5 offsets up to 6, expected .* up to the 3 tokens"),
        ("tokens", np.zeros(6, np.int64), r"tokens.npy has 1 axes of int64, expected one of uint16 or int32"),
        ("mask", np.zeros(5, np.uint8), r"mask.npy: 5 entries for 6 tokens"),
        ("offsets", np.arange(0, 7, 2), r"offsets.npy: 4 offsets up to 6, expected one more than a multiple of 2"),
        ("offsets", b"half", r"offsets.npy is not an array of int64"),
        ("offsets", np.asarray([0, 4, 2, 1, 6]), r"offsets.npy: offsets do not ascend from 0"),
        ("offsets", np.asarray([1, 1, 2, 4, 6]), r"offsets.npy: offsets do not ascend from 0"),
    ],
)
def test_arrays_that_do_not_belong_together_are_named(tmp_path, name, content, told):
    for stem, array in {"tokens": np.zeros(6, np.int32), "offsets": np.asarray([0, 1, 2, 4, 6])}.items():
        np.save(tmp_path / f"{stem}.npy", array)
    assert len(load_flat(tmp_path, 2)[0]) == 6
    path = tmp_path / f"{name}.npy"
    path.unlink(missing_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(FlatError, match=f"{told}.*prepare it again"):
        load_flat(tmp_path, 2)


def test_a_bit_that_is_lost_in_a_header_or_in_offsets_is_found_or_changes_nothing(tmp_path):
    write_flat(shards(tmp_path, rows("sft", 5), files=1), ["completion"], tmp_path / "made")
    kept = [array.tolist() for array in load_flat(tmp_path / "made", 2)[:2]]
    for path in sorted((tmp_path / "made").iterdir()):
        data = path.read_bytes()
        last = len(data) if path.stem == "offsets" else 128
        for place in range(0, last * 8, 7):
            damaged = bytearray(data)
            damaged[place // 8] ^= 1 << place % 8
            path.write_bytes(damaged)
            try:
                found = load_flat(tmp_path / "made", 2)
            except FlatError:
                continue
            # No sum in the file can detect a small change of a boundary.
            assert np.all(np.diff(found[2], axis=-1) >= 0)
            assert [array.tolist() for array in found[:2]] == kept
        path.write_bytes(data)


def test_what_is_half_written_is_no_data(tmp_path):
    [whole] = shards(tmp_path, rows("sft", 5), files=1)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1")
    with pytest.raises(Exception, match="Parquet"):
        write_flat([whole, broken], ["completion"], tmp_path / "made")
    with pytest.raises(FlatError, match="prepare it again"):
        map_examples(tmp_path / "made")


def test_an_id_below_0_is_refused(tmp_path):
    made = [{"prompt_ids": [1], "completion_ids": [-1]}]
    with pytest.raises(FlatError, match="a token id is -1, expected ids from 0 on"):
        write_flat(shards(tmp_path, made, files=1), ["completion"], tmp_path / "made")


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("count", [0, 50])
def test_files_are_those_that_numpy_saves(tmp_path, output, count):
    folder = tmp_path / output
    folder.mkdir()
    shards(folder, rows(output, count), output)
    write_arrays(folder)
    written = sorted((folder / flat.FOLDER).iterdir())
    assert {path.suffix for path in written} == {".npy"}
    for path in written:
        np.save(tmp_path / "saved.npy", np.load(path))
        assert path.read_bytes() == (tmp_path / "saved.npy").read_bytes(), path


FILLS = """
import sys
from pathlib import Path
from rlhf.stages.store.disk import disk_fault
from rlhf.tuning.data.flat import write_flat
from rlhf.tuning.data.schema import SCHEMAS, table_of, write_parquet
folder = Path(sys.argv[1])
rows = [{"prompt_ids": [1] * 1000, "completion_ids": [2] * 1000} for _ in range(ROWS)]
write_parquet(folder / "a.parquet", [table_of(rows, SCHEMAS["sft"])], SCHEMAS["sft"])
try:
    write_flat([folder / "a.parquet"], ["completion"], folder / "flat")
except OSError as error:
    print(disk_fault(error, folder).strerror)
"""
"""Arrays of 2000 tokens a row, on the disk of their shard."""


@pytest.mark.skipif(not can_mount(), reason="this machine gives no namespace of mounts")
@pytest.mark.parametrize("rows", [1000, 320])
def test_a_disk_that_fills_meanwhile_is_named(tmp_path, rows):
    # 1000 rows have no room as they are read, 320 (3.2 MB) only as their ids are written
    # again with two bytes each (1.3 MB).
    assert "MB left" in in_small_disk(tmp_path, 4, FILLS.replace("ROWS", str(rows)))


@pytest.mark.parametrize("seed", range(3))
def test_lengths_of_several_files_are_told_as_numpy_tells_them(tmp_path, seed):
    rng = np.random.default_rng(seed)
    files = [rng.integers(0, rng.integers(1, 300), rng.integers(1, 80)) for _ in range(3)]
    for number, lengths in enumerate([*files, []]):
        rows = [{"prompt_ids": [1] * n, "completion_ids": [1], "prompt": "p", "completion": "c"} for n in lengths]
        write_parquet(tmp_path / "sft" / f"part-{number}.parquet", [table_of(rows, SCHEMAS["sft"])], SCHEMAS["sft"])
    write_arrays(tmp_path / "sft")
    lengths = np.concatenate(files)
    middle, high = np.percentile(lengths, [50, 95])
    told = {"mean": round(lengths.mean(), 3), "p50": middle, "p95": high, "max": lengths.max()}
    assert statistics.token_lengths(tmp_path, "sft")["prompt_ids"] == told


IDS = st.lists(st.integers(0, 50_000), min_size=1, max_size=8)
WIDE = {"max_examples": 40, "deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(**WIDE)
@given(st.lists(st.tuples(IDS, IDS, st.booleans()), max_size=20))
def test_examples_are_what_was_written(tmp_path, drawn):
    masks = [[i % 2 for i in range(len(c))] if masked else None for _, c, masked in drawn]
    paths = shards(
        tmp_path,
        [
            {"prompt_ids": p, "completion_ids": c, "completion_mask": m}
            for (p, c, _), m in zip(drawn, masks, strict=True)
        ],
    )
    found = examples_of(paths)
    assert isinstance(found.tokens, np.memmap) and len(found) == len(drawn)
    for i, (group, (prompt, completion, _), mask) in enumerate(zip(found, drawn, masks, strict=True)):
        assert (group.prompt, group.completions, list(group.ids)) == (prompt, [completion], [i])
        trained = [1] * len(completion) if mask is None else mask
        assert group.trained == sum(trained)
        assert group.masks == (None if all(m is None for m in masks) else [trained])
    assert found.sizes_N.tolist() == [len(p) + len(c) for p, c, _ in drawn]
    assert found.longest == max((len(c) for _, c, _ in drawn), default=0)


@settings(**WIDE)
@given(st.lists(st.tuples(IDS, IDS, IDS), min_size=2, max_size=20))
def test_pairs_stand_together_and_can_be_taken_apart(tmp_path, drawn):
    rows = [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r in drawn]
    found = examples_of(shards(tmp_path, rows, "preference"), ("chosen", "rejected"))
    assert [(g.prompt, g.completions, list(g.ids)) for g in found] == [
        (p, [c, r], [2 * i, 2 * i + 1]) for i, (p, c, r) in enumerate(drawn)
    ]
    alone = [(g.prompt, *g.completions, *g.ids) for g in found.apart()]
    assert alone[::2] == [(p, c, 2 * i) for i, (p, c, _) in enumerate(drawn)]
    assert alone[1::2] == [(p, r, 2 * i + 1) for i, (p, _, r) in enumerate(drawn)]
    assert found.sizes_N.tolist() == [g.size for g in found]
    part = found[1:]
    assert [list(g.ids) for g in part] == [[2 * i, 2 * i + 1] for i in range(len(drawn) - 1)]
    assert [g.completions for g in part] == [[c, r] for _, c, r in drawn[1:]]
    turned = found.with_completions_of([*range(1, len(drawn)), 0])
    assert [(g.prompt, g.completions[0]) for g in turned] == [
        (p, drawn[(i + 1) % len(drawn)][1]) for i, (p, _, _) in enumerate(drawn)
    ]


@pytest.mark.parametrize("size", [{"examples": 7}, {"tokens": 90}])
def test_every_example_comes_once_an_epoch_in_an_order_of_its_own(size):
    sizes = np.random.default_rng(0).integers(1, 40, 50)

    def epochs(seed):
        steps = Steps(sizes, 2, seed, **size)
        order = [n for step in steps for n in step]
        # No step has examples of two epochs.
        bounds = np.cumsum([len(step) for step in steps])
        assert 50 in bounds and bounds[-1] == 100
        return order[:50], order[50:]

    first, second = epochs(0)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first not in (second, sorted(first), epochs(1)[0]) and epochs(0) == (first, second)


@pytest.mark.slow
@settings(**WIDE)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 100))
def test_a_step_takes_the_examples_that_fit_its_tokens(sizes, most):
    sizes = np.asarray(sizes)
    steps = Steps(sizes, 1, 3, tokens=most)
    for here, after in zip(steps, [*steps[1:], None], strict=True):
        assert 0 < sizes[here].sum() <= most
        assert after is None or sizes[here].sum() + sizes[after[0]] > most


@pytest.mark.parametrize("size", [{"examples": 7}, {"tokens": 90}])
def test_a_step_is_known_by_its_number(size):
    """A resumed run, on however many hosts, asks for the steps that are left and gets the same ones."""
    sizes = np.random.default_rng(0).integers(1, 40, 50)
    steps = Steps(sizes, 3, 5, **size)
    whole = list(steps)
    assert len(whole) == len(steps)
    again = Steps(sizes, 3, 5, **size)
    assert [again[i] for i in reversed(range(len(again)))] == whole[::-1] and again[4:] == whole[4:]
    with pytest.raises(IndexError):
        again[len(whole)]


def test_an_example_larger_than_a_step_is_refused():
    with pytest.raises(ValueError, match="example 2 has 91 tokens, more than a step's 90: raise tokens_per_step"):
        Steps(np.asarray([3, 90, 91]), 1, 0, tokens=90)


@pytest.mark.parametrize("count", [1, 2, 257, 65_536, 65_538])
@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_the_order_is_grains(count, seed):
    order = grain.MapDataset.range(count).shuffle(seed=seed)
    positions = np.random.default_rng(0).permutation(count)[:500]
    assert shuffled(positions, count, seed).tolist() == [order[int(position)] for position in positions]


def test_each_number_comes_once_where_grain_repeats_one():
    assert sorted(shuffled(np.arange(65_537), 65_537, 3).tolist()) == list(range(65_537))
