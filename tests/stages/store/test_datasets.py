"""Named data sets: versions that never change, taken by name when a recipe is read."""

import json
import os

import pytest

from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.stages.store import datasets
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.datasets import DatasetError
from rlhf.stages.store.readonly import ReadOnlyStore
from tests.flows.commands import typed


@pytest.fixture(params=["local", "s3"])
def store(request, tmp_path):
    return Store(
        str(tmp_path / "store") if request.param == "local" else f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    )


@pytest.fixture
def rows(tmp_path):
    """Writes a file of records."""

    def write(text, name="rows.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"prompt": text, "answer": "4"}))
        return path

    return write


def content(store, source):
    url = datasets.located(store, source)
    return store.fs.cat_file(store.fs._strip_protocol(url) + "/rows.jsonl").decode()


def test_a_version_is_made_of_other_files_alone_and_stays(store, rows):
    first, is_new = datasets.add(store, "sums", [rows("2 + 2 = ")])
    assert is_new and first.number == 1
    assert datasets.add(store, "sums", [rows("2 + 2 = ")]) == (first, False)
    second, _ = datasets.add(store, "sums", [rows("1 + 3 = ")])
    assert [v.number for v in datasets.versions(store, "sums")] == [1, 2] and second.files != first.files
    assert "1 + 3" in content(store, "dataset:sums") and "2 + 2" in content(store, "dataset:sums@1")


def test_a_recipe_takes_the_newest_version_and_its_record_keeps_it(store, rows):
    datasets.add(store, "sums", [rows("2 + 2 = ")])
    sets = [f"store={json.dumps(store.url)}"]
    sources = '[{source: "dataset:sums", for: [sft]}, {source: "dataset:sums@1", for: [heldout]}]'
    recipe = load_recipe("smoke", sets=[*sets, f"data.sources={sources}"])
    datasets.add(store, "sums", [rows("1 + 3 = ")])
    newest = load_recipe("smoke", sets=[*sets, "data.source=dataset:sums"]).data.source
    assert newest == datasets.located(store, "dataset:sums@2")
    first = datasets.located(store, "dataset:sums@1")
    assert [s.source for s in recipe.data.sources] == [first, first] and "000001-" in first


def test_a_version_of_which_not_all_is_there_is_none(store, rows, monkeypatch):
    monkeypatch.setattr(datasets, "create", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        datasets.add(store, "sums", [rows("2 + 2 = ")])
    assert datasets.versions(store, "sums") == []


def test_of_two_at_once_each_gets_a_number(store, rows, monkeypatch):
    create, other = datasets.create, rows("1 + 3 = ", "other.jsonl")

    def late(*given):
        monkeypatch.setattr(datasets, "create", create)
        datasets.add(store, "sums", [other])
        return create(*given)

    monkeypatch.setattr(datasets, "create", late)
    version, _ = datasets.add(store, "sums", [rows("2 + 2 = ")])
    assert version.number == 2 and [v.number for v in datasets.versions(store, "sums")] == [1, 2]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dataset:sum", "did you mean sums?"),
        ("dataset:sums@7", "has no version '7'; it has 1 to 1"),
        ("dataset:../x", "no data set '../x'"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest_one(store, rows, name, said):
    datasets.add(store, "sums", [rows("2 + 2 = ")])
    with pytest.raises(RecipeError, match=said.replace("?", r"\?")):
        load_recipe("smoke", sets=[f"store={json.dumps(store.url)}", f"data.source={name}"])


def test_files_that_cannot_be_one_version_are_refused(store, rows, tmp_path):
    rows("2 + 2 = ", "a/rows.jsonl")
    (tmp_path / "empty").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "more").symlink_to(tmp_path / "a")
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / "rows.jsonl")
    (tmp_path / "other").symlink_to(tmp_path / "a")
    for paths, said in (
        ([tmp_path / "no"], "is not there"),
        ([tmp_path / "empty"], "no files in"),
        ([tmp_path / "linked"], "linked/more is a link to a folder"),
        ([tmp_path / "pipes"], "rows.jsonl is no file"),
        ([rows("1 + 3 = "), tmp_path / "a" / "rows.jsonl"], "have one name"),
    ):
        with pytest.raises(DatasetError, match=said):
            datasets.add(store, "sums", paths)
    assert list(datasets.add(store, "sums", [tmp_path / "other"])[0].files) == ["rows.jsonl"]


def test_nothing_of_a_version_is_written_to_a_read_only_store(store, rows, monkeypatch):
    monkeypatch.setenv("RLHF_READ_ONLY", "1")
    with pytest.raises(ReadOnlyStore):
        datasets.add(store, "sums", [rows("2 + 2 = ")])
    assert store.names(datasets.FOLDER) == []


def test_the_commands_store_and_list_versions(tmp_path, rows):
    store = ["--store", tmp_path / "store"]
    (tmp_path / "store").mkdir()
    assert "dataset:sums@1" in typed("dataset", "sums", rows("2 + 2 = "), *store).output
    assert "(unchanged)" in typed("dataset", "sums", rows("2 + 2 = "), *store).output
    assert "dataset:sums@1" in typed("datasets", *store).output
    assert json.loads(typed("datasets", "--json", *store).stdout)["sums"][0]["number"] == 1
    assert "is not a valid name" in typed("dataset", "../x", rows("2 + 2 = "), *store, code=2).stderr
