"""Shards made by a runner are those of this machine, each is made once, and a runner that loses rows is noticed."""

import json
import resource
import signal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.pvalue import TaggedOutput

from tests.tuning.data import run as by_hand
from tuning.data import by_shard, gather, merge, pipeline
from tuning.data.blocks import Plan
from tuning.data.digests import Digests
from tuning.data.receipts import write_receipt
from tuning.data.remote import SourceError
from tuning.data.runners import Runner
from tuning.models.byte_tokenizer import byte_tokenizer
from tuning.models.tokenizer import save_tokenizer

OUTPUTS = ("sft", "prompts", "heldout", "preference")
SHARDS = 3


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Pieces of twelve blocks, in three groups: the plan, the sums of each block's files, and the bytes of its rows."""
    save_tokenizer(byte_tokenizer(), tmp_path / "tokenizer")
    plan = Plan(
        tokenizer=str(tmp_path / "tokenizer"), splits=("sft", "prompts", "heldout"), heldout_fraction=0.2,
        sft_fraction=0.5, shards=SHARDS,
    )  # fmt: skip
    # Every tenth record is there twice, in other blocks.
    records = [{"prompt": f"p{i % 90}", "completion": "c" * (i % 90 % 9 + 1)} for i in range(100)]
    size = len(json.dumps(records[0])) * 9
    by_hand.run(plan, tmp_path, *records, block_bytes=size)
    receipts = pipeline.receipts(str(tmp_path / "pieces"))
    blocks = {name: r["sums"] for name, r in receipts.items()}
    sizes = {name: r["bytes"] for name, r in receipts.items()}
    monkeypatch.setattr(by_shard, "GROUP_BYTES", sum(sizes.values()) // 2 - max(sizes.values()))
    monkeypatch.setattr(by_shard, "CELL_BYTES", 0)
    assert len(blocks) > 10
    return plan, blocks, sizes


def planned(tmp_path, made, **more):
    _, blocks, sizes = made
    folder = str(tmp_path / "pieces")
    return by_shard.planned(folder, f"{folder}-merged", blocks, sizes, OUTPUTS, SHARDS, **more)


def fetched(tmp_path, shards, receipts):
    """The bytes of each shard, copied from where the runner left it, and its rows."""
    found = {}
    for key, receipt in receipts.items():
        rows = by_shard.fetch(shards, key, receipt, tmp_path / "out" / by_shard.name_of(*key))
        found[key] = (tmp_path / "out" / by_shard.name_of(*key)).read_bytes(), rows
    return found


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("leaving", [0, 7])
def test_shards_of_a_runner_are_those_of_this_machine(tmp_path, made, seed, leaving):
    plan, _, _ = made
    pieces = by_hand.pieces(plan, tmp_path)
    contents = sorted({text for s in range(SHARDS) for text in pieces.read("ledger", s)["key"].to_pylist()})
    gone = Digests.of([pa.array(contents[:leaving])]) if leaving else None
    shards, groups = planned(tmp_path, made, seed=seed, gone=gone and gone.column)
    assert len(groups) == 3
    found = fetched(tmp_path, shards, by_shard.run(shards, groups, Runner()))
    assert set(found) == {(output, shard) for output in OUTPUTS for shard in range(SHARDS)}
    for (output, shard), (data, rows) in found.items():
        path = tmp_path / "here.parquet"
        assert merge.write_output(pieces, output, shard, path, gone, seed) == rows
        assert data == path.read_bytes(), (output, shard)
    counts = {output: sum(rows for (name, _), (_, rows) in found.items() if name == output) for output in OUTPUTS}
    # An output without a row has its files too.
    assert counts.pop("preference") == 0 and min(counts.values()) > 0


def test_shards_with_a_receipt_are_not_made_again(tmp_path, made):
    shards, groups = planned(tmp_path, made)
    first = by_shard.run(shards, groups, Runner())
    folder = tmp_path / "pieces-merged" / shards.into.rpartition("/")[2]

    def times():
        return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}

    before, content = times(), fetched(tmp_path, shards, first)
    assert by_shard.run(shards, groups, Runner()) == first and times() == before
    # One was killed before its receipt, one while it was written, and one has a receipt that a disk has changed.
    (folder / "sft-00001.json").unlink()
    (folder / "prompts-00000.json").unlink()
    (folder / "prompts-00000.parquet").write_bytes(b"half")
    (folder / "heldout-00002.json").write_text((folder / "heldout-00002.json").read_text().replace(": ", ": 1", 1))
    assert len(by_shard.finished(shards)) == len(first) - 3
    assert by_shard.run(shards, groups, Runner()) == first
    changed = {name.partition(".")[0] for name, time in times().items() if before[name] != time}
    assert changed == {"sft-00001", "prompts-00000", "heldout-00002"}
    assert fetched(tmp_path, shards, first) == content


def test_other_blocks_contents_of_blocks_orders_or_contents_that_leave_are_other_shards(tmp_path, made):
    plan, blocks, sizes = made
    one = planned(tmp_path, made)[0].into
    fewer = (plan, dict(list(blocks.items())[:-1]), sizes)
    first, *rest = blocks
    changed = (plan, {first: dict.fromkeys(blocks[first], "other"), **{name: blocks[name] for name in rest}}, sizes)
    others = [planned(tmp_path, of) for of in (fewer, changed)]
    others += [planned(tmp_path, made, seed=1), planned(tmp_path, made, gone=pa.array(["a"]))]
    assert len({one, *(shards.into for shards, _ in others)}) == 5
    assert planned(tmp_path, made)[0].into == one


def test_each_piece_is_read_once_whatever_the_number_of_shards(tmp_path, made, monkeypatch):
    shards, groups = planned(tmp_path, made)
    opened, original = [], pa.memory_map

    def counting(path, *args):
        opened.append(path)
        return original(path, *args)

    monkeypatch.setattr(pa, "memory_map", counting)
    by_shard.run(shards, groups, Runner())
    assert len(opened) == len(set(opened)) == sum(len(gather.files_of(made[1], output)) for output in OUTPUTS)


def test_a_group_sends_an_element_for_each_shard_of_which_it_has_rows_and_one_of_counts(tmp_path, made):
    shards, groups = planned(tmp_path, made)
    for group in groups:
        cut = by_shard.Cut(shards, {output: range(SHARDS) for output in OUTPUTS})
        cut.setup()
        *cells, counts = cut.process(group)
        assert len({key for key, _ in cells}) == len(cells) == np.count_nonzero(counts.value[1][:-1])
        assert not [key for key, _ in cells if key[0] == "preference"]
        # The schema of `sft` alone has more bytes than a row or two.
        assert min(len(cell[2]) for _, cell in cells) < 2_000


def test_contents_that_leave_are_read_once_by_a_worker_and_groups_take_nothing_for_them(tmp_path, made):
    texts = [value.tobytes().hex() for value in np.random.default_rng(0).integers(0, 256, (300_000, 32), np.uint8)]
    shards, groups = planned(tmp_path, made, gone=Digests.of([pa.array(texts)]).column)
    cut = by_shard.Cut(shards, {output: range(SHARDS) for output in OUTPUTS})
    cut.setup()
    next((tmp_path / "pieces-merged").rglob("gone.arrow")).unlink()
    pool = pa.proxy_memory_pool(before := pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        sent = [sum(isinstance(element, TaggedOutput) for element in cut.process(group)) for group in groups]
    finally:
        pa.set_memory_pool(before)
    assert sent == [1, 1, 1] and pool.max_memory() < 32 * len(texts) / 4


def test_groups_have_rows_of_some_size_whatever_the_size_and_number_of_blocks(tmp_path, monkeypatch):
    def sizes(blocks, each, shards):
        names = [f"{number:05d}" for number in range(blocks)]
        of = {name: {f"{name}.sft.arrow": "", f"{name}.ledger.arrow": ""} for name in names}
        each_of = dict.fromkeys(names, each)
        groups = by_shard.planned(str(tmp_path), str(tmp_path), of, each_of, ["sft"], shards)[1]
        assert [number for number, _ in groups] == list(range(len(groups)))
        assert [name for _, files in groups for name in files] == [f"{name}.sft.arrow" for name in names]
        return {len(files) for _, files in groups[:-1]}

    assert sizes(100_000, 2**20, 1000) == {by_shard.GROUP_BYTES >> 20}
    # One block is larger than a group.
    assert sizes(10, 2**28, 1000) == {1}
    assert sizes(100_000, 2**20, 2**14) == {by_shard.CELL_BYTES * 2**14 >> 20}
    assert sizes(100_000, 2**20, 2**20) == {by_shard.MOST_BYTES >> 20}


def test_progress_counts_shards(tmp_path, made, monkeypatch):
    monkeypatch.setattr("tuning.data.receipts.COUNT_SECONDS", (0.01, 0.01))
    shards, groups = planned(tmp_path, made)
    seen = []
    by_shard.run(shards, groups, Runner(), progress=seen.append)
    assert seen == sorted(seen) and 0 < max(seen) <= len(OUTPUTS) * SHARDS


@pytest.mark.parametrize("lost", ["all of a group", "a cell", "a shard"])
def test_a_runner_that_loses_elements_is_noticed(tmp_path, made, monkeypatch, lost):
    shards, groups = planned(tmp_path, made)
    if lost == "all of a group":
        groups_given = groups[:-1]
        told = "2 groups of blocks have been divided, expected 3"
    elif lost == "a cell":
        groups_given, cut = groups, by_shard.Cut.process

        def some(self, group):
            return (e for e in cut(self, group) if group[0] != 1 or isinstance(e, TaggedOutput) or e[0] != ("sft", 2))

        monkeypatch.setattr(by_shard.Cut, "process", some)
        told = r"sft-00002: \d+ rows have arrived, expected \d+"
    else:
        groups_given, finish = groups, by_shard.Finish.process

        def most(self, element, sums):
            return finish(self, element, sums) if element[0] != ("sft", 2) else iter(())

        monkeypatch.setattr(by_shard.Finish, "process", most)
        told = "1 shards have no receipt in .*, such as sft-00002"
    with pytest.raises(Exception, match=told):
        by_shard.run(shards, groups_given, Runner())
    monkeypatch.undo()
    assert len(by_shard.run(shards, groups, Runner())) == len(OUTPUTS) * SHARDS


def test_a_runner_that_repeats_elements_changes_nothing(tmp_path, made, monkeypatch):
    shards, groups = planned(tmp_path, made)
    expected = by_shard.run(shards, groups, Runner())
    by_shard.remove_receipt(shards.into, "sft-00000")
    assert by_shard.run(shards, [*groups, groups[1]], Runner()) == expected


def test_a_shard_that_was_changed_is_named_and_made_again(tmp_path, made, monkeypatch):
    shards, groups = planned(tmp_path, made)
    receipts = by_shard.run(shards, groups, Runner())
    path = tmp_path / "pieces-merged" / shards.into.rpartition("/")[2] / "sft-00001.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + b"x" + whole[-8:])
    monkeypatch.setattr("tuning.data.remote.FIRST_WAIT_SECONDS", 0.0)
    out = tmp_path / "out.parquet"
    with pytest.raises(
        SourceError, match=r"sft-00001.parquet cannot be fetched .*differs from its checksum.*made again"
    ):
        by_shard.fetch(shards, ("sft", 1), receipts["sft", 1], out)
    assert not out.exists() and ("sft", 1) not in by_shard.finished(shards)
    by_shard.fetch(shards, ("sft", 1), by_shard.run(shards, groups, Runner())["sft", 1], out)
    assert out.read_bytes() == whole and pq.read_table(out).num_rows == receipts["sft", 1]["rows"]


def test_a_disk_that_is_full_here_says_nothing_of_the_shard(tmp_path, made, monkeypatch):
    shards, groups = planned(tmp_path, made)
    receipts = by_shard.run(shards, groups, Runner())
    monkeypatch.setattr("tuning.data.remote.FIRST_WAIT_SECONDS", 0.0)
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(SourceError, match="File too large") as found:
            by_shard.fetch(shards, ("sft", 1), receipts["sft", 1], tmp_path / "out.parquet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "made again" not in str(found.value) and by_shard.finished(shards) == receipts


@pytest.mark.parametrize("below", ["file://", ""])
@pytest.mark.parametrize("kind", ["sft", "ledger"])
@pytest.mark.parametrize("content", ["none", "half", "other", "bit"])
def test_a_piece_that_is_lost_or_damaged_is_named_and_its_block_made_again(tmp_path, made, content, kind, below):
    _, blocks, _ = made
    folder = f"{below}{tmp_path}/pieces"
    first, second, *_ = gather.files_of(blocks, kind)
    piece, block = tmp_path / "pieces" / first, first.split(".")[0]
    whole, table = piece.read_bytes(), gather.ipc_table(piece)
    contents = {"half": [whole[:40]], "other": [(tmp_path / "pieces" / second).read_bytes()], "none": [None]}
    # Anywhere: in frames of LZ4, in what says where they are, and in rows.
    contents["bit"] = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(9, len(whole), 199)]
    for damaged in contents[content]:
        piece.unlink(missing_ok=True)
        if damaged:
            piece.write_bytes(damaged)
        with pytest.raises(SourceError, match=rf"{first} is (gone|damaged).* read again by the next run"):
            list(gather.tables(folder, gather.files_of(blocks, kind)))
        assert set(pipeline.receipts(folder, check=False)) == set(blocks) - {block}
        write_receipt(str(tmp_path / "pieces"), block, {"sums": blocks[block]})
    piece.write_bytes(whole)
    assert next(gather.tables(folder, gather.files_of(blocks, kind))).equals(table)


def test_a_worker_that_meets_a_damaged_piece_names_it(tmp_path, made):
    _, blocks, sizes = made
    folder = f"file://{tmp_path}/pieces"
    name = next(iter(gather.files_of(blocks, "sft")))
    piece = tmp_path / "pieces" / name
    piece.write_bytes(piece.read_bytes()[:-9] + b"x" * 9)
    shards, groups = by_shard.planned(folder, f"{folder}-merged", blocks, sizes, ["sft"], SHARDS)
    with pytest.raises(Exception, match=rf"{name} is damaged .*differs from its checksum.* read again by the next run"):
        by_shard.run(shards, groups, Runner())
    assert set(pipeline.receipts(folder)) == set(blocks) - {name.split(".")[0]}
