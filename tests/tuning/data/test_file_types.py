"""Every value of a file has one declared type: another encoding, quoting, split or type is refused by name."""

import datetime
import decimal
import gzip
import json
import time
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf.tuning.data import files
from rlhf.tuning.data.records import RecordError, parse_line
from rlhf.tuning.data.remote import SourceError
from tests.tuning.data.run import parts_of


@pytest.fixture
def read(tmp_path):
    def read(source):
        return [json.loads(line) for p in parts_of(source, tmp_path / "spool") for _, line in files.read_part(p)]

    return read


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_bytes_are_utf8_text_and_other_types_have_one_json_form(read, tmp_path, suffix):
    day = datetime.datetime(2026, 3, 1, 12, 30)
    scores = {"x": pa.float32(), "y": pa.map_(pa.string(), pa.list_(pa.float32(), 1))}
    table = pa.table(
        {
            "prompt": pa.array([b"5 + 1 =", "größer".encode()], pa.binary()),
            "parts": pa.array([[{"text": b"a"}], [{"text": b"b"}]]),
            "when": pa.array([day, day]),
            "price": pa.array([decimal.Decimal("0.0000001"), decimal.Decimal("5.0000000")]),
            "name": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([uuid.UUID(int=1).bytes] * 2, pa.binary(16))),
            "tags": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
            "answer": pa.array([0.1, 1e10], pa.float32()),
            "scores": pa.array([[{"x": 0.1, "y": [("z", [0.2])]}], []], pa.list_(pa.struct(scores))),
            "half": pa.array(np.asarray([0.1, 65504], np.float16)),
            "halves": pa.array([[np.float16(3.3)], None], pa.large_list(pa.float16())),
            "level": pa.array([0.3, None], pa.float32()).dictionary_encode(),
            "whole": pa.array(np.asarray([123456789, 1e23], np.float32)),
            "tensor": pa.ExtensionArray.from_storage(
                pa.fixed_shape_tensor(pa.float32(), [1]), pa.array([[0.1], [0.2]], pa.list_(pa.float32(), 1))
            ),
        }
    )
    path = tmp_path / f"data{suffix}"
    if suffix == ".parquet":
        pq.write_table(table.drop_columns(["name", "tensor"]), path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    first, second = read(path)
    assert first["prompt"] == "5 + 1 =" and second["prompt"] == "größer" and first["parts"] == [{"text": "a"}]
    assert first["when"] == "2026-03-01 12:30:00"
    assert (first["price"], second["price"]) == ("0.0000001", "5.0000000")
    assert first["tags"] == {"k": 1} and second["tags"] == {}
    assert (first["answer"], second["answer"]) == (0.1, 1e10)
    assert (first["scores"], second["scores"]) == ([{"x": 0.1, "y": {"z": [0.2]}}], [])
    assert (first["half"], second["half"], first["halves"], second["halves"]) == (0.1, 65504, [3.3], None)
    assert (first["whole"], second["whole"]) == (123456792, 1e23)
    assert (first["level"], second["level"]) == (0.3, None)
    assert suffix == ".parquet" or (first["name"], first["tensor"]) == (str(uuid.UUID(int=1)), [0.1])


def test_fields_of_other_rows_are_absent_from_tools_and_calls(read, tmp_path):
    def chat(name, **arguments):
        call = {"function": {"name": name, "arguments": arguments}}
        properties = {one: {"type": "integer", "enum": [1, None]} for one in arguments}
        tool = {"function": {"name": name, "parameters": {"properties": properties}}}
        return {"messages": [{"role": "user", "content": name}, {"tool_calls": [call]}], "tools": [tool]}

    rows = [chat("add", a=1, b=2), chat("weather", city=3)]
    pq.write_table(pa.Table.from_pylist([row | {"metadata": {"level": None}} for row in rows]), tmp_path / "d.parquet")
    # A field of the record itself, or of its metadata, is null where the file says so.
    assert read(tmp_path / "d.parquet") == [row | {"metadata": {"level": None}} for row in rows]


def test_bytes_that_are_no_text_are_a_dead_letter_with_file_record_and_field(read, tmp_path):
    pq.write_table(pa.table({"prompt": [b"\xff\xfe6"], "completion": [b"6"]}), tmp_path / "data.parquet")
    (row,) = read(tmp_path / "data.parquet")
    with pytest.raises(RecordError, match=r"data\.parquet, record 1, field `prompt`: expected text in UTF-8, got"):
        parse_line(json.dumps(row), "data.parquet", 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        # 61 rows into a file of 101, a mark opens a cell and nothing closes it.
        ("a.tsv", "prompt\tcompletion\n" + "1 + 1 =\t2\n" * 60 + '"Inches\t yes\n' + "60 + 1 =\t61\n" * 40, "line 62"),
        ("a.csv", 'prompt,completion\n1,2\n"3,4\n5,6\n', "line 3"),
        ("a.csv", 'prompt,completion\n1,2\n"3" or so,4\n5,6\n', "line 3"),
    ],
)
def test_a_quotation_mark_that_nothing_closes_is_refused_with_its_line(read, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(SourceError, match=rf"{name} cannot be read as .*{message} has an unpaired quotation mark"):
        read(tmp_path / name)


def test_capital_suffixes_and_names_with_glob_characters_are_files_as_others(read, tmp_path):
    (tmp_path / "DATA.JSONL.GZ").write_bytes(gzip.compress(b'{"a": 1}\n'))
    assert read(tmp_path / "DATA.JSONL.GZ") == [{"a": 1}]
    (tmp_path / "data[v1] (2).jsonl").write_bytes(b'{"a": 2}\n')
    assert read(tmp_path / "data[v1] (2).jsonl") == [{"a": 2}]
    assert read(tmp_path / "*.jsonl") == [{"a": 2}]
    (tmp_path / "set [1]?").mkdir()
    (tmp_path / "set [1]?" / "a.jsonl").write_bytes(b'{"a": 3}\n')
    assert read(tmp_path / "set [1]?") == [{"a": 3}]
    with pytest.raises(SourceError, match=r"no file matches the pattern; write \[\[\] for a bracket"):
        read(tmp_path / "set [1]?" / "*.jsonl")
    assert read(tmp_path / "set [[]1]?" / "*.jsonl") == [{"a": 3}]


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"), "test, train"),
        (("train.jsonl", "dev.jsonl"), "train, validation"),
        (("train/a.jsonl", "validation/a.jsonl", "Test/a.jsonl"), "test, train, validation"),
        (("sets/a_eval.jsonl", "sets/training_2.jsonl"), "test, train"),
        (("latest.jsonl", "train.jsonl", "contrast.jsonl"), None),
        (("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "extra.jsonl"), None),
        (("test/a.jsonl", "test/b.jsonl"), None),
    ],
)
def test_a_folder_or_glob_of_several_splits_is_refused_by_their_names(read, tmp_path, names, splits):
    repository = tmp_path / "train" / "repo"
    for name in names:
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")
    (repository / "dataset_infos.json").write_text('{"default": {"splits": {}}}')
    for source in (repository, f"{repository}/**/*.jsonl"):
        if splits is None:
            assert read(source) == [{}] * len(names)
            continue
        with pytest.raises(SourceError, match=f"holds the splits {splits}: name one"):
            files.expand(str(source))
    assert read(f"{repository}/{names[0]}"[:-1] + "*") == [{}]


def test_a_hub_folder_with_several_configurations_is_refused_by_their_names(read, tmp_path):
    card = "---\nconfigs:\n- config_name: main\n  data_files: main/*\n- config_name: socratic\n---\n# Data\n"
    (tmp_path / "README.md").write_text(card)
    for name in ("main", "socratic"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train-0.jsonl").write_text("{}\n")
    with pytest.raises(SourceError, match=r"holds the configurations main, socratic: name one"):
        files.expand(str(tmp_path))
    assert read(tmp_path / "main") == [{}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "header",
    [
        "a0: &a0 [x, x, x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30))
        + "configs:\n- config_name: *a29\n- config_name: one",
        "m0: &m0 {x: 1}\n"
        + "".join(f"m{i}: &m{i}\n  <<: [{', '.join([f'*m{i - 1}'] * 10)}]\n" for i in range(1, 30)),
        "a: " + "[" * 3000,
        "- configs",
        "configs: {config_name: a}",
        "? [configs]\n: 1",
    ],
)  # fmt: skip
def test_a_card_that_is_strange_describes_nothing(read, tmp_path, header):
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\n")
    (tmp_path / "a.jsonl").write_text("{}\n")
    start = time.process_time()
    assert read(tmp_path) == [{}]
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("state.json", "[]", r"(?s)state\.json is not of .datasets.: .*valid dictionary|object"),
        ("state.json", "{}", r"(?s)state\.json is not of .*_data_files\n.*Field required"),
        ("state.json", "[" * 5000, r"state\.json is not of "),
        ("state.json", '{"_data_files": [{"filename": "../b.arrow"}]}', r"lists '\.\./b\.arrow', which is not in"),
        ("dataset_dict.json", '{"splits": [".."]}', r"lists the split '\.\.', and has no folder of that name"),
    ],
)
def test_a_saved_folder_is_read_inside_itself_alone(tmp_path, name, text, said):
    (tmp_path / "b.arrow").write_bytes(b"")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_text(text)
    with pytest.raises(SourceError, match=said):
        files.expand(str(tmp_path / "a"))
