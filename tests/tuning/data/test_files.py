"""Every kind of file gives its records in order, in parts of any size; what is broken or too large is named."""

import bz2
import functools
import gzip
import http.server
import io
import json
import resource
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf.tuning.data import files
from rlhf.tuning.data.files import json_values, text_lines, whole_lines
from rlhf.tuning.data.remote import SourceError
from tests.tuning.data.run import parts_of

ROWS = [{"prompt": f"quéstion {i}\r", "answer": None if i % 2 else str(i)} for i in range(40)]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


@pytest.fixture
def read(tmp_path):
    def read(source, part_bytes=1 << 20):
        parts = parts_of(source, tmp_path / "spool", part_bytes)
        assert [p.position for p in parts] == [sum(p.count for p in parts[:i]) for i in range(len(parts))]
        return [(p.label, number, json.loads(line)) for p in parts for number, line in files.read_part(p)]

    return read


def arrow(path, table, file=False, rows=7):
    new = pa.ipc.new_file if file else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def write_all(folder):
    table = pa.Table.from_pylist(ROWS)
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(LINES[:90]) + gzip.compress(LINES[90:]))
    (folder / "c.jsonl.zst").write_bytes(pa.compress(LINES, "zstd", asbytes=True))
    (folder / "d.jsonl.bz2").write_bytes(bz2.compress(LINES))
    (folder / "e.json").write_text(json.dumps(ROWS, indent=1))
    pq.write_table(table, folder / "f.parquet", row_group_size=9)
    arrow(folder / "g.arrow", table)
    arrow(folder / "h.arrow", table, file=True)


@pytest.mark.slow
@pytest.mark.parametrize("part_bytes", [1, 100, 1 << 20])
def test_files_of_all_kinds_in_order(read, tmp_path, part_bytes):
    folder = tmp_path / "data"
    folder.mkdir()
    write_all(folder)
    (folder / ".hidden.jsonl").write_text("{}\n")
    found = read(folder, part_bytes)
    names = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
    assert len(names) == 8
    expected = [{k: v for k, v in row.items() if v is not None} for row in ROWS]
    for name in names:
        mine = [(n, {k: v for k, v in raw.items() if v is not None}) for label, n, raw in found if label == name]
        assert mine == list(enumerate(expected, start=1)), name
    assert read(f"{folder}/[ag].*", part_bytes) == [item for item in found if item[0] in ("a.jsonl", "g.arrow")]
    assert read(f"file://{folder}/a.jsonl", part_bytes) == found[:40]


def test_lines_with_blanks_returns_and_no_end(read, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n"x"\r\n   \n"y"')
    for part_bytes in (1, 2, 5, 100):
        assert read(tmp_path / "a.jsonl", part_bytes) == [("a.jsonl", 2, "x"), ("a.jsonl", 4, "y")]
    (tmp_path / "b.jsonl").write_bytes(b"")
    assert read(tmp_path / "b.jsonl") == []
    # A .json file is a list, lines, or one object over several lines.
    (tmp_path / "c.json").write_text(json.dumps({"a": [1]}, indent=4))
    (tmp_path / "d.json").write_text('{"a": 1}\n{"a": 2}\n')
    assert read(tmp_path / "c.json") == [("c.json", 1, {"a": [1]})]
    assert read(tmp_path / "d.json") == [("d.json", 1, {"a": 1}), ("d.json", 2, {"a": 2})]


def test_csv_cells_are_text_and_a_ragged_row_is_no_record(read, tmp_path):
    (tmp_path / "a.csv").write_text('\ufeffprompt,label\n"two\nlines, ""quoted""",true\n\nx\n\U0001f600,\n')
    assert [raw for _, _, raw in read(tmp_path / "a.csv")] == [
        {"prompt": 'two\nlines, "quoted"', "label": "true"},
        ["x"],
        {"prompt": "\U0001f600", "label": ""},
    ]
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(b"prompt\tanswer\na, b\t1\n"))
    assert [raw for _, _, raw in read(tmp_path / "b.tsv.gz")] == [{"prompt": "a, b", "answer": "1"}]
    (tmp_path / "c.csv").write_text("prompt,prompt\n1,2\n")
    with pytest.raises(SourceError, match=r"c\.csv cannot be read as \.csv: the first line names a column twice"):
        read(tmp_path / "c.csv")


def test_folders_that_datasets_saved(read, tmp_path):
    table = pa.Table.from_pylist(ROWS)
    for split in ("train", "test"):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        arrow(folder / "data-00000-of-00001.arrow", table.slice(0 if split == "train" else 30))
        arrow(folder / "cache-1.arrow", table)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_indices_data_files": None}
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(SourceError, match="holds the splits train, test: name one, as .*/saved/train"):
        read(tmp_path / "saved")
    assert len(read(tmp_path / "saved" / "train")) == 40 and len(read(tmp_path / "saved" / "test")) == 10


def test_memory_and_http(read, tmp_path):
    write_all(tmp_path)
    with fsspec.open("memory://files-test/a.jsonl", "wb") as file:
        file.write(LINES)
    assert [raw for _, _, raw in read("memory://files-test/*.jsonl", 100)] == ROWS

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        for name in ("a.jsonl", "b.jsonl.gz", "f.parquet"):
            assert [raw for _, _, raw in read(f"http://127.0.0.1:{server.server_port}/{name}", 100)] == ROWS
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(LINES)[:-20]),
        ("a.jsonl.gz", LINES),
        ("a.jsonl.zst", pa.compress(LINES, "zstd", asbytes=True)[:-7]),
        ("a.json", json.dumps(ROWS).encode()[:-3]),
        ("a.parquet", LINES),
        ("a.arrow", LINES),
    ],
)
def test_a_file_that_cannot_be_read_is_named(read, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=f"{name} cannot be read as "):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "f.parquet"])
def test_a_file_that_changes_between_cutting_and_reading_is_noticed(tmp_path, name):
    write_all(tmp_path)
    [file] = files.expand(str(tmp_path / name))
    part, *_ = files.parts_of(file, 200, str(tmp_path))
    (tmp_path / "a.jsonl").write_bytes(LINES.replace(b"0", b"1"))
    more = pa.Table.from_pylist(ROWS[:5] + ROWS)
    pq.write_table(more, tmp_path / "f.parquet")
    with pytest.raises(SourceError, match="changed while it was read"):
        list(files.read_part(part))


LISTS = [
    "[]", " [ ] ", "[1]", '[{"a": 1}, {"b": [1, 2]}]\n', '{\n "a": 1\n}', "[1, 23, 456]", "[[[]], null, true]",
    '["]"]',
]  # fmt: skip


@pytest.mark.parametrize("text", LISTS)
@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_a_list_is_what_json_says_however_it_is_read(monkeypatch, text, size):
    monkeypatch.setattr(files, "READ", size)
    whole = json.loads(text)
    assert list(json_values(io.BytesIO(b"\xef\xbb\xbf" + text.encode()))) == (
        whole if isinstance(whole, list) else [whole]
    )


@pytest.mark.parametrize("text", ["", "[", "[1", "[1,", "[1,]", "[1 2]", "[1] 2", "{", '["a', "[1]]", "nul", "\udcff"])
def test_what_is_no_list_is_refused(text):
    with pytest.raises(ValueError):
        list(json_values(io.BytesIO(text.encode(errors="surrogateescape"))))


def test_a_record_has_a_longest_size(monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 100)
    fits, long = b"a" * 99 + b"\n", b"a" * 101 + b"\n"
    assert b"".join(whole_lines(io.BytesIO(fits * 5), 30)) == fits * 5
    with pytest.raises(ValueError, match="line 3 is longer than 100 bytes"):
        list(whole_lines(io.BytesIO(fits * 2 + long), 30))
    with pytest.raises(ValueError, match="line 2 is longer than 100 characters"):
        list(text_lines(io.StringIO(fits.decode() + long.decode())))
    monkeypatch.setattr(files, "READ", 10)
    with pytest.raises(ValueError, match="element 2 of its list is invalid, or longer than 100 bytes"):
        list(json_values(io.BytesIO(b'["a", "' + b"a" * 1000 + b'"]')))


READ = """
import sys
from rlhf.tuning.data.files import DataFile, parts_of
try:
    parts = list(parts_of(DataFile(sys.argv[1], "bomb"), 1 << 20, sys.argv[2]))
except Exception as error:
    print(type(error).__name__, error)
else:
    print("read", sum(part.records for part in parts))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head", "line"),
    [
        ("bomb.jsonl.zst", b"", b"a" * (1 << 20)),
        ("bomb.json.zst", b'["', b"a" * (1 << 20)),
        ("bomb.csv.zst", b'prompt\n"', b"a" * (1 << 20)),
    ],
)
def test_gigabytes_without_an_end_are_refused_in_bounded_memory(tmp_path, name, head, line):
    """Two gigabytes in a file of kilobytes, read with one and a half of address space."""
    path = tmp_path / name
    with pa.CompressedOutputStream(str(path), "zstd") as out:
        out.write(head)
        for _ in range(2048):
            out.write(line)
    assert path.stat().st_size < 2**21

    def bounded():
        resource.setrlimit(resource.RLIMIT_DATA, (1500 << 20, 1500 << 20))

    command = [sys.executable, "-c", READ, str(path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], preexec_fn=bounded)
    assert done.stdout.startswith("SourceError"), done.stdout + done.stderr
    assert name in done.stdout and "longer than 67108864" in done.stdout
