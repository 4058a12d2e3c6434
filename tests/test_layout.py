"""The tests mirror the packages, share support modules and no tests, and test the core with the core alone."""

import ast
import graphlib
from collections.abc import Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import grimp
import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(TESTS.rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def imported(name: str) -> Iterator[str]:
    """Names of modules that a file imports anywhere in it; of `from a import b` also `a.b`, which may be a module."""
    for node in ast.walk(trees()[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), name.rpartition(".")[0])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@cache
def imports() -> dict[str, set[str]]:
    return {name: set(imported(name)) for name in FILES}


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def is_test(name: str) -> bool:
    return name.rpartition(".")[2].startswith("test_")


def test_no_file_imports_a_test_module_or_a_conftest():
    closed = {name for name in FILES if is_test(name) or name.endswith(".conftest")}
    assert {name: found & closed for name, found in imports().items() if found & closed} == {}


@pytest.mark.parametrize("package", ["flows", "stages", "tuning"])
def test_each_folder_of_tests_mirrors_a_package(package):
    folders = {path.parent.relative_to(TESTS) for path in (TESTS / package).rglob("*.py")}
    assert folders and [str(f) for f in folders if not (ROOT / f / "__init__.py").is_file()] == []


@pytest.mark.parametrize("package", ["flows", "stages", "tuning"])
def test_tests_of_a_package_are_in_its_own_folder(package):
    tests = [path.relative_to(TESTS) for path in (TESTS / package).rglob("test_*.py")]
    beside = [path.with_name(path.stem.removeprefix("test_")) for path in tests]
    assert [str(path) for path in beside if (ROOT / path / "__init__.py").is_file()] == []


def test_tests_of_the_core_import_the_core_alone():
    """Through support modules too. The conftest above all is not one of theirs: only a fixture of it loads stages."""
    reached = {name for name in FILES if below(name, "tests.tuning")}
    while more := {name for file in reached for name in imports()[file] if name in FILES} - reached:
        reached |= more
    above = {(file, name) for file in reached for name in imports()[file] if below(name, "rlhf.stages", "rlhf.flows")}
    assert reached and above == set()


def test_each_test_file_opens_with_its_property():
    openings = {name: ast.get_docstring(trees()[name]) or "" for name in FILES if is_test(name)}
    assert openings and [name for name, text in openings.items() if not text.partition("\n")[0].strip()] == []


def test_no_imports_form_a_circle():
    graph = grimp.build_graph("rlhf")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()
