"""Prepared examples as batches: Grain over decoded Parquet shards.

    shards -> Examples -> an order for each epoch -> mixture by weight -> rows -> this host's part of each batch

Every host goes through the same global sequence of rows and keeps its part of each batch, so a position is a few
numbers that are the same on all hosts, and is restored exactly with another number of them. What that costs: each host
packs the rows of all (about a million tokens a second).

Suffixes: B rows of a batch, L tokens of a row.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tuning.data.remote import open_input

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Reading:
    """How examples become batches."""

    batch_rows: int
    """Rows of a batch, of all hosts together."""
    row_tokens: int
    """Tokens of a row; no example may have more."""
    packing: Literal["none", "first-fit", "best-fit"] = "best-fit"
    """Several examples a row, or one."""
    bins: int = 64
    """Rows that are filled at the same time: more of them leave less padding."""
    epochs: int | None = 1
    """Rounds over all examples, each in another order; None: without end."""
    seed: int = 0
    """Of the order."""


class Examples:
    """Random access to the examples of Parquet shards with `prompt_ids`, `completion_ids` and maybe `completion_mask`.

    Shards are decoded once, a row group at a time, into plain arrays: a shuffled read of a row of Parquet decodes its
    whole group. With `folder` the arrays lie in files there, mapped and without names, so that memory stays free and
    nothing is left to go stale.
    """

    def __init__(self, paths: Sequence[str | Path], folder: Path | None = None) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            names = [os.path.join(scratch, name) for name in ("tokens", "mask")]
            lengths, self.checksum = [np.zeros(1, np.int64)], 0
            with open(names[0], "wb") as tokens, open(names[1], "wb") as masks:
                for batch in _row_groups(paths):
                    ids, mask, sizes = _flat(batch)
                    self.checksum = zlib.crc32(mask.data, zlib.crc32(ids.data, self.checksum))
                    ids.tofile(tokens)
                    mask.tofile(masks)
                    lengths.append(sizes)
            self.offsets = np.cumsum(np.concatenate(lengths))
            load = np.fromfile if folder is None or not self.offsets[-1] else np.memmap
            self.tokens, self.mask = load(names[0], np.int32), load(names[1], np.uint8)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        """`tokens` [n] int32, prompt and completion, and `mask` [n] uint8, 1 for those that are trained."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        return {"tokens": np.asarray(self.tokens[span]), "mask": np.asarray(self.mask[span])}

    def __repr__(self) -> str:
        return f"Examples({len(self)}, {self.checksum:08x})"

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return int(np.diff(self.offsets).max(initial=0))


def _row_groups(paths: Sequence[str | Path]) -> Iterator[Any]:
    for path in paths:
        with open_input(str(path)) as stream:
            file = pq.ParquetFile(stream)
            names = {"prompt_ids", "completion_ids", "completion_mask"} & set(file.schema_arrow.names)
            for number in range(file.num_row_groups):
                yield file.read_row_group(number, columns=sorted(names))


def _flat(table: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens and masks of the rows, one after another, and how many each row has."""
    prompt, completion = (_lists(table, f"{name}_ids") for name in ("prompt", "completion"))
    sizes = prompt[1] + completion[1]
    total, starts = int(sizes.sum()), np.cumsum(sizes) - sizes
    # A token's place: where its row starts, and its place in the row.
    in_prompt = np.repeat(starts - (np.cumsum(prompt[1]) - prompt[1]), prompt[1]) + np.arange(len(prompt[0]))
    first = np.cumsum(completion[1]) - completion[1]
    in_completion = np.repeat(starts + prompt[1] - first, completion[1]) + np.arange(len(completion[0]))
    ids, mask = np.zeros(total, np.int32), np.zeros(total, np.uint8)
    ids[in_prompt], ids[in_completion], mask[in_completion] = prompt[0], completion[0], 1
    if "completion_mask" in table.column_names:
        given = table["completion_mask"].combine_chunks()
        chosen = np.repeat(pc.is_valid(given).to_numpy(zero_copy_only=False), completion[1])
        mask[in_completion[chosen]] = pc.list_flatten(given).to_numpy().astype(np.uint8)
    return ids, mask, sizes


def _lists(table: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    column = table[name].combine_chunks()
    return pc.list_flatten(column).to_numpy(), pc.list_value_length(column).to_numpy().astype(np.int64)


def _sequence(sources: Sequence[Examples], weights: Sequence[float] | None, reading: Reading) -> Any:
    """Grain's dataset of the examples in the order in which they are read."""
    import grain.python as grain

    seeds = np.random.SeedSequence([abs(reading.seed), len(sources)]).generate_state(len(sources)) >> 1
    orders = [grain.MapDataset.source(s) for s in sources]
    if weights is None:
        whole = orders[0] if len(orders) == 1 else grain.MapDataset.concatenate(orders)
        return whole.seed(int(seeds[0])).shuffle().repeat(reading.epochs)
    # Each source starts again, in another order, as often as its weight asks for.
    parts = [order.seed(int(seed)).shuffle().repeat(None) for order, seed in zip(orders, seeds, strict=True)]
    mixed = grain.MapDataset.mix(parts, list(weights))
    return mixed if reading.epochs is None else mixed[: reading.epochs * sum(map(len, sources))]


class Batches:
    """An iterator over this host's part of each batch, whose position can be saved and restored.

    A batch is a dict of arrays [B of this host, L]: `tokens` int32, `mask` (1 for trained tokens), `segment_ids` (1, 2,
    ... for the examples of a row, 0 for padding) and `positions`, which start again with each example. Attention and
    losses take the segments, so that no example sees another. The last batch is filled up with rows of padding.

    Args:
        sources: where examples come from. weights: the share of each; None: as many as there are. An epoch has as many
            examples as the sources together; a source that a weight asks more of is repeated.
        host, hosts: which part of a batch this process takes.
    Raises:
        ValueError: settings that do not fit each other or the examples.
    """

    def __init__(
        self,
        sources: Sequence[Examples],
        reading: Reading,
        weights: Sequence[float] | None = None,
        host: int = 0,
        hosts: int = 1,
    ) -> None:
        if reading.batch_rows % hosts or not 0 <= host < hosts:
            raise ValueError(f"host {host} of {hosts} has no equal part of {reading.batch_rows} rows")
        if weights is not None and (
            len(weights) != len(sources) or not all(math.isfinite(weight) and weight > 0 for weight in weights)
        ):
            raise ValueError(f"weights {list(weights)} are not a positive number for each of {len(sources)} sources")
        if empty := [i for i, source in enumerate(sources) if not len(source)]:
            raise ValueError(f"source {empty[0]} has no examples")
        longest = max((source.longest for source in sources), default=0)
        if longest > reading.row_tokens or not sources:
            raise ValueError(f"the longest example has {longest} tokens, a row {reading.row_tokens}: raise row_tokens")
        rows = reading.batch_rows // hosts
        self.reading, self._mine = reading, slice(host * rows, (host + 1) * rows)
        # A position means nothing in another sequence. The number of hosts is left out: the sequence has none.
        self._identity = {
            "examples": [repr(source) for source in sources],
            "weights": None if weights is None else [float(weight) for weight in weights],
            "reading": dataclasses.asdict(reading),
        }
        self._rows = iter(_rows_of(_sequence(sources, weights, reading), reading))

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self._rows)
        names = {"tokens": "tokens", "mask": "mask", "segment_ids": "tokens_segment_ids"}
        names["positions"] = "tokens_positions"
        missing = self.reading.batch_rows - len(batch["tokens"])
        return {name: np.pad(batch[key], ((0, missing), (0, 0)))[self._mine] for name, key in names.items()}

    def state(self) -> State:
        """The position, as JSON; the same on all hosts."""
        return {"position": self._rows.get_state(), "of": self._identity}

    def restore(self, state: State) -> None:
        """Go on from a position, saved with any number of hosts. Raises ValueError if it is one of other batches."""
        for name, value in self._identity.items():
            if state["of"][name] != value:
                raise ValueError(f"the position belongs to other {name}: {state['of'][name]}, not {value}")
        self._rows.set_state(state["position"])


def _rows_of(sequence: Any, reading: Reading) -> Any:
    """Grain's dataset of batches of rows."""
    import grain.python as grain
    from grain import experimental

    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    if reading.packing == "none":
        padded = sequence.map(lambda example: _alone(example, reading.row_tokens))
        rows = padded.to_iter_dataset(options)
    else:
        pack = {"first-fit": experimental.FirstFitPackIterDataset, "best-fit": experimental.BestFitPackIterDataset}
        rows = pack[reading.packing](
            sequence.to_iter_dataset(options),
            length_struct={"tokens": reading.row_tokens, "mask": reading.row_tokens},
            num_packing_bins=reading.bins,
            seed=abs(reading.seed) % 2**31,
        )
    return rows.batch(reading.batch_rows, drop_remainder=False)


def _alone(example: dict[str, np.ndarray], row_tokens: int) -> dict[str, np.ndarray]:
    """A row of one example."""
    count = len(example["tokens"])
    row = {name: np.pad(values, (0, row_tokens - count)) for name, values in example.items()}
    used = np.arange(row_tokens, dtype=np.int32)
    row["tokens_segment_ids"] = (used < count).astype(np.int32)
    return row | {"tokens_positions": np.where(used < count, used, 0).astype(np.int32)}
