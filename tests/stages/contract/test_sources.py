"""A user's code in a key: rewards, and functions that give records, with all that they import."""

from importlib.metadata import version

import pytest

from rlhf.stages.contract import fingerprint
from rlhf.stages.contract.fingerprint import reached
from rlhf.stages.contract.source_archive import keep, kept
from rlhf.stages.contract.sources import data_digests, function_digests
from rlhf.stages.store.artifacts import Store
from tests.support import write_files


def test_a_function_that_gives_records_is_content_with_what_it_imports(tmp_path, monkeypatch):
    write_files(tmp_path, **{"mysource.py": "from myrows import rows\n", "myrows.py": "def rows():\n    return []\n"})
    monkeypatch.syspath_prepend(tmp_path)
    before = data_digests("mysource:rows", "data.source")
    assert set(before) == {"task", "module:mysource", "module:myrows", "reached from mysource"}
    write_files(tmp_path, **{"myrows.py": "def rows():\n    return [{}]\n"})
    assert data_digests("mysource:rows", "data.source") != before
    assert data_digests("addition", "data.source") == {"task": "addition"}
    with pytest.raises(ValueError, match="data.source: no module 'nosource' can be imported"):
        data_digests("nosource:rows", "data.source")


def test_packages_that_a_users_code_imports_are_content(tmp_path, monkeypatch):
    code = "import json\nimport yaml\nfrom numpy import mean\n\n\ndef f():\n    import no_such_package\n"
    write_files(tmp_path, **{"mypackages.py": code})
    monkeypatch.syspath_prepend(tmp_path)
    found = function_digests("mypackages:f", "here")
    assert {n: v for n, v in found.items() if n.startswith("package:")} == {
        "package:PyYAML": version("PyYAML"),
        "package:numpy": version("numpy"),
        "package:no_such_package": "absent",
    }
    (sentiment,) = [n for n in function_digests("rlhf.tuning.rewards.sentiment:vader", "here") if "vader" in n.lower()]
    assert sentiment.startswith("package:vaderSentiment")


EDITABLE = '{"url": "file:///x", "dir_info": {"editable": true}}'


@pytest.mark.parametrize("kind", ["module", "package", "editable", "further", "installed"])
def test_a_helper_without_a_version_of_its_content_counts_by_that(tmp_path, monkeypatch, kind):
    """It is beside no reward: in a folder of PYTHONPATH, or installed for editing."""
    write_files(tmp_path / "mine", **{"withhelp.py": "import helper_x\n\n\ndef f(prompts, completions):\n    pass\n"})
    place = tmp_path / "there"
    edited = "helper_x__inside.py" if kind in ("package", "editable") else "helper_x.py"
    files = {"helper_x__inside.py": "A = 1\n", "helper_x____init__.py": ""} if "__" in edited else {edited: "A = 1\n"}
    if kind == "further":
        files, edited = {"helper_x.py": "import helper_y\n", "helper_y.py": "A = 1\n"}, "helper_y.py"
    if kind in ("editable", "installed"):
        info = {"METADATA": "Metadata-Version: 2.1\nName: helper_x\nVersion: 1.0\n", "RECORD": ""}
        info |= {"direct_url.json": EDITABLE} if kind == "editable" else {}
        files |= {f"helper_x-1.0.dist-info__{name}": text for name, text in info.items()}
    write_files(place, **files)
    for folder in (tmp_path / "mine", place):
        monkeypatch.syspath_prepend(folder)
    fingerprint.library_versions.cache_clear()
    before = function_digests("withhelp:f", "here")
    assert before == function_digests("withhelp:f", "here")
    write_files(place, **{edited: "A = 2\n"})
    # What was installed is its version's, which does not change without another one.
    assert (function_digests("withhelp:f", "here") == before) == (kind == "installed")
    fingerprint.library_versions.cache_clear()


def test_a_builtin_reward_needs_no_digest_of_its_own_but_the_version_of_what_it_reads_with():
    assert function_digests("contains", "here") == {}
    assert function_digests("exact_match", "here") == {"package:regex": version("regex")}


def test_an_environment_s_records_are_in_the_key_by_the_code_that_makes_them():
    """Under its name as a source; other data reaches none of it."""
    guess, lake = (data_digests(name, "data.source") for name in ("guess", "frozenlake"))
    assert guess["task"] == "guess" and len(guess) == 2 and set(guess.values()) & set(lake.values()) == set()
    modules = reached("rlhf.stages.prepare.stage").modules
    agents = {name for name in modules if name.startswith("rlhf.tuning.agents")} - {"rlhf.tuning.agents"}
    assert "rlhf.tuning.data.tasks" in modules and agents <= {"rlhf.tuning.agents.contract"}


def test_the_text_of_a_module_in_another_encoding_is_kept(tmp_path, monkeypatch):
    (tmp_path / "inlatin.py").write_bytes("# coding: latin-1\ndef f(completions): 'Größe'\n".encode("latin-1"))
    monkeypatch.syspath_prepend(tmp_path)
    parts, store = {"code": {}, "sources": function_digests("inlatin:f", "here")}, Store(str(tmp_path / "store"))
    keep(store, parts)
    assert "def f(completions)" in kept(store, parts)["inlatin"]["text"]
