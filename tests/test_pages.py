"""The pages: their code runs, their commands and recipes are read, and what they name exists.

Fenced blocks, by language and the words behind it:

    python              all blocks of a page run as one program
    python file=NAME    is written to NAME first; so are yaml blocks
    diff file=NAME      is applied to NAME in a scratch copy of the packages
    sh                  lines run after the page's Python, in the same scratch folder
    python of=NAME      is an excerpt: its lines stand in NAME as they are
    sh no-run           is only looked at: `rlhf run|plan RECIPE --set ...` must be a recipe that can run, and
                        `cp FROM TO` copies a file of the project into the scratch copy of the packages
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from rlhf.flows.recipe.reading import RECIPES, load_recipe
from rlhf.stages.common.settings import Optimizer
from rlhf.tuning.algorithms.algorithm import Objective, Scored
from rlhf.tuning.algorithms.algorithm import find as find_algorithm
from rlhf.tuning.algorithms.flat import Column
from rlhf.tuning.algorithms.registry import ALGORITHMS
from rlhf.tuning.rewards.functions import find as find_reward
from tests.pages import PACKAGES, PAGES, ROOT, Block, blocks_of, commands_of, text_of
from tests.support import copy_project

RULES = ROOT / "docs" / "explanation" / "rules.md"
OPTIMIZERS = get_args(Optimizer.model_fields["name"].annotation)

ROOMS = (*PACKAGES, "tests")

LINK = re.compile(r"\]\(([^)#\s]+)(?:#([\w-]+))?\)")
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
PLACE = re.compile(rf"`((?:{'|'.join((*PACKAGES, 'tests', 'docs', 'infra'))})/[\w./*-]*)`")


def is_executed(block: Block) -> bool:
    return block.runs and block.language in ("python", "sh")


def scratch_copy(folder: Path, blocks: list[Block]) -> None:
    """Writes the files of a page; where it changes the project, into a copy of the packages."""
    files = [b for b in blocks if b.file]
    if any(str(b.file).startswith(PACKAGES) for b in files):
        copy_project(folder)
    for command in (c for b in blocks if b.language == "sh" for c in commands_of(b) if c[0] == "cp"):
        shutil.copy(ROOT / command[1], folder / command[2])
    for block in files:
        place = folder / str(block.file)
        if block.language == "diff":
            header = f"--- a/{block.file}\n+++ b/{block.file}\n"
            apply = ["git", "apply", "--unidiff-zero", "--recount", "-"]
            done = subprocess.run(apply, input=header + block.text, cwd=folder, capture_output=True, text=True)
            assert done.returncode == 0, f"the diff of {block.file} does not apply: {done.stderr}"
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(block.text)


# `tests/test_tutorials.py` runs the tutorials, whose blocks build on one another.
RUN_HERE = [p for p in PAGES if "tutorials" not in p.parts and any(map(is_executed, blocks_of(p)))]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_HERE, ids=str)
def test_the_code_of_a_page_runs(page, tmp_path):
    blocks = blocks_of(page)
    scratch_copy(tmp_path, blocks)
    path = os.pathsep.join(map(str, (tmp_path / "src", tmp_path, ROOT)))
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": path, "PATH": binaries}}

    def run(command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    program = "\n".join(b.text for b in blocks if b.language == "python" and b.runs and not b.file)
    if program:
        run([sys.executable, "-c", program])
    for block in blocks:
        if block.language == "sh" and block.runs:
            for command in commands_of(block):
                run(command)


@pytest.mark.parametrize("page", [p for p in PAGES if "```" in text_of(p)], ids=str)
def test_recipes_and_settings_of_a_page_can_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(page)
    for number, block in enumerate(b for b in blocks if b.language == "yaml" and b.runs):
        place = Path(block.file or f"block-{number}.yaml")
        place.write_text(block.text)
        load_recipe(str(place))
    # What runs needs no look: it may use what the page has added to its copy of the project.
    for command in (c for b in blocks if b.language == "sh" and not b.runs for c in commands_of(b)):
        names = [Path(word).name for word in command]
        if names[0] != "rlhf" or names[1] not in ("run", "plan") or "RECIPE" in names:
            continue
        sets = [value for option, value in zip(command, command[1:], strict=False) if option == "--set"]
        place = command[2] if Path(command[2]).suffix == "" or Path(command[2]).exists() else str(ROOT / command[2])
        load_recipe(place, sets=sets)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_what_a_page_names_exists(page):
    text = text_of(page)
    for target, anchor in LINK.findall(text):
        if "://" in target:
            continue
        place = (ROOT / page).parent / target
        assert place.exists(), f"{page} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(place), f"{page} links to {target}#{anchor}; there are {anchors(place)}"
    for file, name in TEST.findall(text):
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{page}: no {file}::{name}"
    for name in set(PLACE.findall(text)):
        if "NAME" in name:
            continue
        assert any(ROOT.glob(name.rstrip("/"))), f"{page} names `{name}`, which is not there"


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("room", ROOMS)
def test_a_package_has_a_page_of_one_screen(room):
    lines = (ROOT / room / "README.md").read_text().splitlines()
    assert len(lines) <= 60
    assert lines[0] == f"# {room}"


def test_excerpts_are_the_lines_of_their_file():
    for page in PAGES:
        for block in blocks_of(page):
            for name in (o.removeprefix("of=") for o in block.options if o.startswith("of=")):
                whole = without_empty_lines((ROOT / name).read_text())
                indented = [textwrap.indent(without_empty_lines(block.text), " " * depth) for depth in (0, 4, 8)]
                assert any(x in whole for x in indented), f"{page}: its excerpt is not in {name}"


def without_empty_lines(text: str) -> str:
    """The formatter of pages decides where a block has empty lines."""
    return "".join(line for line in text.splitlines(keepends=True) if line.strip())


def test_every_shell_block_runs_or_says_that_it_does_not():
    for page in PAGES:
        for block in blocks_of(page):
            if block.language == "sh" and block.runs:
                for command in commands_of(block):
                    assert command[0] in ("rlhf", "python"), f"{page}: mark the block of {command} as `sh no-run`"


def test_what_a_recipe_may_name_is_on_a_page():
    rl, recipes = (text_of(Path(f"docs/guides/{name}.md")) for name in ("rl", "recipes"))
    for name in ALGORITHMS:
        assert re.search(rf"(?<![\w-]){name}(?![\w-])", rl), f"docs/guides/rl.md does not name {name}"
    for name in (path.stem for path in RECIPES.glob("*.yaml")):
        assert f"| `{name}` |" in recipes, f"docs/guides/recipes.md does not name {name}"
    for name in OPTIMIZERS:
        assert re.search(rf"\b{name}\b", recipes), f"docs/guides/recipes.md does not name the optimizer {name}"


def test_rules_that_the_code_cites_are_there():
    known = set(re.findall(r"^## (R\d+)\.", RULES.read_text(), re.MULTILINE))
    for package in (*PACKAGES, "tests"):
        for file in (ROOT / package).rglob("*.py"):
            cited = set(re.findall(r"\(R\d+(?:, R\d+)*\)", file.read_text()))
            numbers = {n for group in cited for n in re.findall(r"R\d+", group)}
            assert numbers <= known, f"{file} cites {numbers - known}"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a Python file of a guide to an importable folder, and returns its module's name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(guide: str, file: str) -> str:
        [block] = [b for b in blocks_of(Path("docs/guides") / guide) if b.file == file]
        name = Path(file).stem
        (tmp_path / f"{name}.py").write_text(block.text)
        return name

    return write


def test_rewards(written):
    shortest = find_reward(f"{written('rewards.md', 'shortest.py')}:shortest")
    assert shortest(["?"] * 2, ["4", "so 4"], answer=["4", "4"]) == [1.0, 0.25]
    brevity = find_reward(f"{written('extend.md', 'brevity.py')}:brevity")
    assert brevity(["?"], ["ab"], completion_ids=[[7, 8]], tokens=8) == [0.75]


def test_the_algorithm_compares_with_the_mean_of_the_round(written):
    name = written("extend.md", "tuning/algorithms/round_mean.py")
    mask = Column(np.ones((4, 2)).__getitem__, 4, 2, np.dtype(float))
    penalty = Column.zeros(np.full(4, 2), 2, float)
    scored = Scored(np.array([1.0, 0.0, 0.0, 1.0]), np.array([0, 0, 1, 1]), np.ones(4, bool), mask, penalty)
    algorithm = find_algorithm(Objective(algorithm=f"{name}:algorithm"))
    assert np.asarray(algorithm.advantages(scored)).tolist() == [0.5, -0.5, -0.5, 0.5]
