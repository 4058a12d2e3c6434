"""A process parses only what no process before it has read, and what it is told is what parsing gives."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import finish, python, write_files

LOOK = """
import json, pathlib, sys
from rlhf.stages.contract.fingerprint import reached

parsed = []
sys.addaudithook(lambda event, args: parsed.append(args) if event == "compile" and args[0] is not None else None)
code = reached("pkg.stage", folder=pathlib.Path(sys.argv[1]))
print(json.dumps([len(parsed), sorted(code.modules), sorted(code.modules.values()), code.imports, code.packages]))
"""


@pytest.fixture
def pkg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project, and nothing read yet on this machine."""
    monkeypatch.setenv("RLHF_SCRATCH", str(tmp_path / "scratch"))
    stage = "import numpy\nfrom pkg import core, late\n"
    write_files(tmp_path / "project", **{"pkg__stage.py": stage, "pkg__core.py": "x = 1\n"})
    (tmp_path / "project" / "pkg" / "__init__.py").write_text("late = 0\n")
    return tmp_path / "project"


def look(folder: Path) -> tuple[int, list[Any]]:
    """How many modules a new process parses, and what it finds."""
    parsed, *found = json.loads(finish(python(LOOK, folder)))
    return parsed, found


def test_the_second_process_parses_nothing_and_finds_the_same(pkg):
    first, second = look(pkg), look(pkg)
    assert (first[0], second[0]) == (3, 0)
    assert second[1] == first[1] and first[1][0] == ["pkg", "pkg.core", "pkg.stage"] and first[1][3] == ["numpy"]


def test_an_edit_is_seen_also_where_size_and_times_are_those_of_before(pkg):
    path = pkg / "pkg" / "core.py"
    before, stat = look(pkg), os.stat(path)
    with path.open("r+") as file:
        file.write("x = 2\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = look(pkg)
    assert after[0] == 1 and after[1][1] != before[1][1]


def test_a_name_that_has_become_a_module_is_one_in_modules_that_have_not_changed(pkg):
    look(pkg)
    (pkg / "pkg" / "late.py").write_text("y = 1\n")
    parsed, found = look(pkg)
    assert "pkg.late" in found[0] and parsed == 2
    (pkg / "pkg" / "late.py").unlink()
    assert "pkg.late" not in look(pkg)[1][0]


@pytest.mark.parametrize("text", ["[1]", '{"a": 1'])
def test_a_damaged_file_costs_time_alone(pkg, text):
    found = look(pkg)[1]
    (file,) = (pkg.parent / "scratch").rglob("code.json")
    file.write_text(text)
    assert look(pkg) == (3, found)
    assert look(pkg) == (0, found)


def test_where_nothing_can_be_written_each_process_parses(pkg, monkeypatch):
    found = look(pkg)
    (pkg.parent / "file").write_text("")
    monkeypatch.setenv("RLHF_SCRATCH", str(pkg.parent / "file"))
    assert look(pkg) == look(pkg) == found
