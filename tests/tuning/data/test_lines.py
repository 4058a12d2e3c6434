"""Files that unpack to more than memory holds are refused by their record that is too large; others are read whole."""

import io
import json
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from rlhf.tuning.data import lines
from rlhf.tuning.data.lines import json_values, text_lines, whole_lines

LISTS = [
    "[]", " [ ] ", "[1]", '[{"a": 1}, {"b": [1, 2]}]\n', '{\n "a": 1\n}', "[1, 23, 456]", "[[[]], null, true]",
    '["]"]',
]  # fmt: skip


@pytest.mark.parametrize("text", LISTS)
@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_a_list_is_what_json_says_however_it_is_read(monkeypatch, text, size):
    monkeypatch.setattr(lines, "READ", size)
    whole = json.loads(text)
    assert list(json_values(io.BytesIO(b"\xef\xbb\xbf" + text.encode()))) == (
        whole if isinstance(whole, list) else [whole]
    )


@pytest.mark.parametrize("text", ["", "[", "[1", "[1,", "[1,]", "[1 2]", "[1] 2", "{", '["a', "[1]]", "nul", "\udcff"])
def test_what_is_no_list_is_refused(text):
    with pytest.raises(ValueError):
        list(json_values(io.BytesIO(text.encode(errors="surrogateescape"))))


def test_a_record_has_a_longest_size(monkeypatch):
    monkeypatch.setattr(lines, "LONGEST", 100)
    fits, long = b"a" * 99 + b"\n", b"a" * 101 + b"\n"
    assert b"".join(whole_lines(io.BytesIO(fits * 5), 30)) == fits * 5
    with pytest.raises(ValueError, match="line 3 is longer than 100 bytes"):
        list(whole_lines(io.BytesIO(fits * 2 + long), 30))
    with pytest.raises(ValueError, match="line 2 is longer than 100 characters"):
        list(text_lines(io.StringIO(fits.decode() + long.decode())))
    monkeypatch.setattr(lines, "READ", 10)
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


@pytest.mark.parametrize(
    ("name", "head", "line"),
    [
        ("bomb.jsonl.zst", b"", b"a" * (1 << 20)),
        ("bomb.json.zst", b'["', b"a" * (1 << 20)),
        pytest.param("bomb.csv.zst", b'prompt\n"', b"a" * (1 << 20), marks=pytest.mark.slow),
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
