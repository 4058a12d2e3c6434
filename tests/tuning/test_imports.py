"""The core is tested alone: its tests import neither stages nor flows."""

import ast
from pathlib import Path

import pytest

FOLDERS = ("algorithms", "evaluation", "examples", "losses", "models", "rewards", "training")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("folder", FOLDERS)
def test_tests_of_the_core_import_the_core_alone(folder):
    files = sorted((Path(__file__).parent / folder).rglob("*.py"))
    above = {
        f"{file.name}: {name}" for file in files for name in imported(file) if name.startswith(("stages", "flows"))
    }
    assert files and not above
