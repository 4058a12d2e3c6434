"""Arrays of tokens: what the shards say, mapped as they are; the same bytes and lengths however rows are divided."""

import tracemalloc

import numpy as np
import pytest

from rlhf.tuning.data import flat, statistics
from rlhf.tuning.data.flat import FlatError, completions_of, load_flat, write_arrays, write_flat
from rlhf.tuning.data.reading import map_examples
from rlhf.tuning.data.schema import SCHEMAS, table_of, write_parquet
from tests.support import can_mount, in_small_disk
from tests.tuning.data.run import shards


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
