"""Shards of the merge's pipeline are those of this machine, and damaged pieces are named."""

import pyarrow as pa
import pytest

from rlhf.tuning.data import gather, merge, merge_pipeline, pipeline
from rlhf.tuning.data.blocks import Plan
from rlhf.tuning.data.digests import Digests
from rlhf.tuning.data.receipts import counted, write_receipt
from rlhf.tuning.data.remote import SourceError
from rlhf.tuning.data.runners import Runner
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.tokenizer import save_tokenizer
from tests.tuning.data import run as by_hand

SHARDS = [(output, shard) for output in ("sft", "prompts", "heldout", "preference") for shard in range(3)]


@pytest.fixture
def made(tmp_path):
    """Pieces of several blocks: the plan, and the sums of each block's files."""
    save_tokenizer(byte_tokenizer(), tmp_path / "tokenizer")
    splits = ("sft", "prompts", "heldout")
    plan = Plan(str(tmp_path / "tokenizer"), splits, heldout_fraction=0.2, sft_fraction=0.5, shards=3)
    # Ten records are there twice, in other blocks.
    records = [{"prompt": f"p{i % 90}", "completion": "c" * (i % 90 % 9 + 1)} for i in range(100)]
    by_hand.run(plan, tmp_path, *records, block_bytes=400)
    blocks = {name: r["sums"] for name, r in pipeline.receipts(str(tmp_path / "pieces")).items()}
    assert len(blocks) > 5
    return plan, blocks


@pytest.mark.parametrize(("seed", "leaving"), [(None, 0), (3, 7)])
def test_shards_of_the_pipeline_are_those_of_this_machine(tmp_path, made, seed, leaving):
    plan, blocks = made
    pieces = by_hand.pieces(plan, tmp_path)
    contents = sorted({text for s in range(3) for text in pieces.read("ledger", s)["key"].to_pylist()})
    gone = Digests.of([pa.array(contents[:leaving])]) if leaving else None
    merge_of = merge_pipeline.Merge(str(tmp_path / "pieces"), str(tmp_path / "merged"), seed)
    # The last blocks are brought twice, as a runner may.
    twice = {f"{name} again": files for name, files in blocks.items()}
    seen = []
    merge_pipeline.run(merge_of, blocks | twice, SHARDS, Runner(), gone, seen.append)
    rows = {}
    for output, shard in SHARDS:
        count = merge_pipeline.fetch(merge_of, (output, shard), tmp_path / "fetched")
        assert merge.write_output(pieces, output, shard, tmp_path / "here", gone, seed) == count
        assert (tmp_path / "fetched").read_bytes() == (tmp_path / "here").read_bytes(), (output, shard)
        rows[output] = rows.get(output, 0) + count
    # An output without a row has its files too.
    assert rows.pop("preference") == 0 and min(rows.values()) > 0


def test_a_count_that_does_not_change_is_no_progress(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf.tuning.data.receipts.COUNT_SECONDS", (0.01, 0.01))
    seen = []

    def wait_for(count):
        while seen[-1:] != [count]:
            pass

    with counted(str(tmp_path), seen.append, ".parquet"):
        for count in (1, 2):
            (tmp_path / f"{count}.parquet").touch()
            (tmp_path / f"{count}.json").touch()
            wait_for(count)
    assert seen == [1, 2]


@pytest.mark.parametrize("below", ["file://", ""])
@pytest.mark.parametrize("kind", ["sft", "ledger"])
@pytest.mark.parametrize("content", ["none", "half", "other", "bit"])
def test_a_piece_that_is_lost_or_damaged_is_named_and_its_block_made_again(tmp_path, made, content, kind, below):
    _, blocks = made
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
