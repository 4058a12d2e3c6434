"""Tokens of examples as flat arrays that training maps: a folder next to the Parquet shards.

    tokens.npy      | prompt 0 | completion 0 | prompt 1 | completion 1 | ...     row by row, in the order of the shards
    mask.npy        | 1 1 1 1  | 0 0 1 1 1 1  | 1 1 1 1  | 1 1 1 1 1 1  | ...     only where a row has a mask
    offsets.npy     0          4              10         14             20        where each text begins; the last end

Their bytes follow from the rows alone. Writing holds a row group and the lengths of all texts; mapping holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhf.tuning.data.remote import open_input
from rlhf.tuning.data.schema import SCHEMAS

FOLDER = "_flat"
"""Folder of the arrays below that of an output. Readers of Parquet folders skip names that begin with `_`."""
DTYPES = {"tokens": (np.uint16, np.int32), "mask": (np.uint8,), "offsets": (np.int64,)}
"""Types of each array; tokens of a small vocabulary take two bytes."""
_BLOCK = 1 << 23
"""Bytes that are converted at a time."""
_CHECKED = 1 << 12
"""Offsets that are checked together."""


class FlatError(ValueError):
    """Arrays that are damaged or do not belong together; the message names the file and the remedy."""


def completions_of(output: str) -> tuple[str, ...]:
    """Return the names of the completions of a row of an output, such as `chosen`; rows of prompts have none."""
    names = (name.removesuffix("_ids") for name in SCHEMAS[output] if name.endswith("_ids"))
    return tuple(name for name in names if name != "prompt")


def write_arrays(folder: Path) -> None:
    """Write the arrays of an output, given the folder of its shards; prompts have none."""
    if completions := completions_of(folder.name):
        write_flat(sorted(folder.glob("*.parquet")), completions, folder / FOLDER)


def write_flat(paths: Sequence[str | Path], completions: Sequence[str], folder: Path) -> None:
    """Write the arrays of the rows of Parquet shards into `folder`.

    Rows have `prompt_ids`, a column `NAME_ids` for each of `completions`, and maybe `NAME_mask`. Without any mask there
    is no array of it; if only some rows have one, all tokens of the others are trained. Raises FlatError for a
    negative id.
    """
    names = ["prompt", *completions]
    folder.mkdir(parents=True, exist_ok=True)
    sizes, largest, masked = [np.zeros(1, np.int64)], 0, False
    with (folder / "tokens").open("wb") as tokens, (folder / "mask").open("wb") as masks:
        for group in _row_groups(paths, names):
            ids, mask, lengths, has_mask = _flat(group, names)
            if ids.min(initial=0) < 0:
                raise FlatError(
                    f"{folder}: a token id is {int(ids.min())}, expected ids from 0 on: prepare the data again"
                )
            # Not `tofile`, whose error does not say that a disk is full.
            tokens.write(ids.data)
            masks.write(mask.data)
            sizes.append(lengths)
            largest, masked = max(largest, int(ids.max(initial=0))), masked or has_mask
    (folder / "offsets").write_bytes(np.cumsum(np.concatenate(sizes)).data)
    _convert(folder / "offsets", np.int64, np.int64)
    _convert(folder / "tokens", np.int32, np.uint16 if largest < 1 << 16 else np.int32)
    if masked:
        _convert(folder / "mask", np.uint8, np.uint8)
    for name in ("offsets", "tokens", "mask"):
        (folder / name).unlink()


def _convert(path: Path, before: type, after: type) -> None:
    """Write the values of a file without header as an array of another type next to it."""
    count = path.stat().st_size // np.dtype(before).itemsize
    header = {"descr": np.dtype(after).str, "fortran_order": False, "shape": (count,)}
    # Not mapped: on a full disk a write to a mapped file ends the process.
    with path.open("rb") as source, path.with_suffix(".npy").open("wb") as array:
        np.lib.format.write_array_header_1_0(array, header)
        while block := source.read(_BLOCK):
            array.write(np.frombuffer(block, before).astype(after).data)


def load_flat(folder: Path, texts: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """The tokens, the mask or None, and the spans of the texts in them, [rows, texts, 2], which take no memory.

    texts: of each row, its prompt among them.
    Raises FlatError where the arrays are of another kind or do not belong together.
    """
    found = {name: _load(folder / f"{name}.npy") for name in DTYPES if (folder / f"{name}.npy").exists()}
    tokens, mask, offsets = (found.get(name) for name in DTYPES)
    if tokens is None or offsets is None:
        raise FlatError(f"{folder} has {sorted(found)}, expected tokens and offsets: {_ADVICE}")
    if not len(offsets) or (len(offsets) - 1) % texts or offsets[-1] != len(tokens):
        raise FlatError(
            f"{folder / 'offsets.npy'}: {len(offsets)} offsets up to {offsets[-1] if len(offsets) else None}, expected "
            f"one more than a multiple of {texts}, up to the {len(tokens)} tokens: {_ADVICE}"
        )
    for start in range(0, len(offsets), _CHECKED):
        # One more, so that pieces meet.
        piece = offsets[start : start + _CHECKED + 1]
        if (start == 0 and piece[0] != 0) or np.any(np.diff(piece) < 0):
            raise FlatError(f"{folder / 'offsets.npy'}: offsets do not ascend from 0: {_ADVICE}")
    if mask is not None and len(mask) != len(tokens):
        raise FlatError(f"{folder / 'mask.npy'}: {len(mask)} entries for {len(tokens)} tokens: {_ADVICE}")
    # A text ends where the next one begins, so a span is two neighbours.
    count = (len(offsets) - 1) // texts
    shape, strides = (count, texts, 2), (8 * texts, 8, 8)
    return tokens, mask, np.lib.stride_tricks.as_strided(offsets, shape, strides, writeable=False)


_ADVICE = "the data is damaged or of another version; prepare it again"


def _load(path: Path) -> np.ndarray:
    """Return an array of one axis, of a type that belongs to its name."""
    wanted = " or ".join(kind.__name__ for kind in DTYPES[path.stem])
    try:
        array: np.ndarray = np.load(path, "r")
    except Exception as error:  # the parser of a damaged header may raise anything
        raise FlatError(f"{path} is not an array of {wanted} ({error}): {_ADVICE}") from error
    if array.dtype not in DTYPES[path.stem] or array.ndim != 1:
        raise FlatError(f"{path} has {array.ndim} axes of {array.dtype}, expected one of {wanted}: {_ADVICE}")
    return array


def _row_groups(paths: Sequence[str | Path], names: Sequence[str]) -> Iterator[Any]:
    columns = {f"{name}_ids" for name in names} | {f"{name}_mask" for name in names}
    for path in paths:
        with open_input(str(path)) as stream:
            file = pq.ParquetFile(stream)
            present = sorted(columns & set(file.schema_arrow.names))
            for number in range(file.num_row_groups):
                yield file.read_row_group(number, columns=present)


def _flat(table: Any, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """Return tokens, mask and lengths, row by row and in it column by column; and whether there is a mask."""
    columns = [_lists(table, f"{name}_ids") for name in names]
    sizes = np.stack([count for _, count in columns], axis=1)
    starts = (np.cumsum(sizes) - sizes.reshape(-1)).reshape(sizes.shape)
    ids, mask, has_mask = np.zeros(int(sizes.sum()), np.int32), np.ones(int(sizes.sum()), np.uint8), False
    for i, (name, (values, count)) in enumerate(zip(names, columns, strict=True)):
        # From the order of a column's flat values to the order of rows: list r moves from its offset in the column,
        # cumsum(count)[r] - count[r], to starts[r, i].
        at = np.repeat(starts[:, i] - (np.cumsum(count) - count), count) + np.arange(len(values))
        ids[at] = values
        if f"{name}_mask" in table.column_names:
            column = table[f"{name}_mask"].combine_chunks()
            # A null mask means that all tokens are trained; such rows keep their ones.
            chosen = np.repeat(pc.is_valid(column).to_numpy(zero_copy_only=False), count)
            mask[at[chosen]] = pc.list_flatten(column).to_numpy().astype(np.uint8)
            has_mask |= bool(chosen.any())
    return ids, mask, sizes.reshape(-1), has_mask


def _lists(table: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    column = table[name].combine_chunks()
    return pc.list_flatten(column).to_numpy(), pc.list_value_length(column).to_numpy().astype(np.int64)
