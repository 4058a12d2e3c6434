"""Files of a policy: read in place below a folder, downloaded once from a URL, and never outside the root."""

from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from rlhf.tuning.rollout.servers.transfer import digests, pull


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "root" / "run" / "policy"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(name * 100)
    return folder


@pytest.fixture
def url(source):
    fs = fsspec.filesystem("memory")
    fs.put(f"{source}/", "/weights/run/policy/", recursive=True)
    yield "memory://weights"
    fs.rm("/weights", recursive=True)


def test_a_folder_is_read_in_place(source, tmp_path):
    found = pull(str(tmp_path / "root"), "run/policy", digests(source), tmp_path / "scratch")
    assert found == source
    assert not (tmp_path / "scratch").exists()


def test_a_url_is_downloaded_once_for_all_and_replaces_the_previous_policy(source, url, tmp_path, monkeypatch):
    scratch, fs, fetched = tmp_path / "scratch", fsspec.filesystem("memory"), []
    get = type(fs).get_file

    def counted(self, path, target):
        fetched.append(path)
        get(self, path, target)

    monkeypatch.setattr(type(fs), "get_file", counted)
    files = digests(source)
    with ThreadPoolExecutor(4) as pool:
        (found,) = set(pool.map(lambda _: pull(url, "run/policy", files, scratch), range(4)))
    assert {name: (found / name).read_text() for name in files} == {name: name * 100 for name in files}
    assert len(fetched) == 2
    fs.pipe("/weights/run/policy/config.json", b"other")
    (source / "config.json").write_text("other")
    second = pull(url, "run/policy", digests(source), scratch)
    assert (second / "config.json").read_text() == "other" and not found.exists()


def test_a_download_that_was_cut_or_is_of_other_files_is_repeated(source, url, tmp_path):
    files, fs = digests(source), fsspec.filesystem("memory")
    fs.pipe("/weights/run/policy/model.safetensors", b"half")
    with pytest.raises(ValueError, match=r"model.safetensors has SHA-256 \w+, expected \w+: write the policy again"):
        pull(url, "run/policy", files, tmp_path / "scratch")
    fs.put(str(source / "model.safetensors"), "/weights/run/policy/model.safetensors")
    assert (pull(url, "run/policy", files, tmp_path / "scratch") / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("folder", "name"),
    [("../run", "x"), ("/run", "x"), ("run//policy", "x"), ("run", "../x"), ("run", "a/b"), ("", "x")],
)
def test_a_name_is_no_path(tmp_path, folder, name):
    with pytest.raises(ValueError, match="is not a valid name"):
        pull(str(tmp_path), folder, {name: "0" * 64}, tmp_path)
