"""The code part of a key: what runs, not what is written about it, and only what the stage reaches."""

import ast
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.flows.graph.keying import key_of
from rlhf.stages.contract.fingerprint import INFRASTRUCTURE, Code, canonical_tree, reached
from rlhf.stages.contract.registry import modules, stage
from rlhf.stages.sampling.settings import SERVERS, EngineSettings
from tests.support import PACKAGES, ROOT, copy_project, write_files

STAGE = '''"""A stage."""
import json
from pkg import middle


def run(ctx):
    """Runs."""
    from pkg.core.loss import loss  # inside, as stages do
    return loss(1) + middle.one()
'''


@pytest.fixture
def pkg(tmp_path):
    """A small project: pkg.stage reaches pkg.middle and, inside a function, pkg.core.loss; none reaches pkg.far."""
    files = {
        "pkg/__init__.py": "",
        "pkg/stage.py": STAGE,
        "pkg/middle.py": "from .helper import two\n\n\ndef one():\n    return two() - 1\n",
        "pkg/helper.py": "def two():\n    return 2\n",
        "pkg/core/__init__.py": "# nothing here\n",
        "pkg/core/loss.py": (
            "class Config:\n    rate: float = 0.1\n    '''Doc of a field.'''\n\n\ndef loss(x):\n    return x * 2\n"
        ),
        "pkg/core/loss.c": "// twice\nfloat loss(float x) { return x * 2; }\n",
        "pkg/core/loss.h": "// how often\nenum { TIMES = 1 };\n",
        "pkg/core/loss.html.j2": "<p>https://a/{{ loss }}</p>\n",
        "pkg/far.py": "def far():\n    return 9\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def edit(folder: Path, name: str, old: str, new: str) -> None:
    path = folder / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def identity(code: Code) -> tuple[list[str], str]:
    """What a key has of code: contents without names, and their links."""
    return sorted(set(code.modules.values())), code.imports


def test_the_modules_that_are_reached(pkg):
    found = reached("pkg.stage", folder=pkg)
    assert set(found.modules) == {"pkg.stage", "pkg.middle", "pkg.helper", "pkg.core.loss"}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("pkg/stage.py", "# inside, as stages do", "# inside"),
        ("pkg/core/loss.py", "x * 2", "(x  *  2)"),
        ("pkg/core/loss.c", "// twice", "// two times"),
        ("pkg/core/loss.h", "// how often", "// how many times"),
        ("pkg/core/__init__.py", "# nothing here", "# nothing at all"),
        ("pkg/far.py", "9", "10"),
    ],
    ids=["comment", "layout", "kernel-comment", "header-comment", "empty-package", "unreached"],
)
def test_what_does_not_run_changes_nothing(pkg, name, old, new):
    before = reached("pkg.stage", folder=pkg)
    edit(pkg, name, old, new)
    assert reached("pkg.stage", folder=pkg) == before


@pytest.mark.parametrize(
    ("name", "old", "new", "module"),
    [
        # The docstring of a user's tool stands in prompts.
        ("pkg/stage.py", '    """Runs."""\n', "", "pkg.stage"),
        ("pkg/stage.py", "loss(1)", "loss(2)", "pkg.stage"),
        ("pkg/core/loss.py", "x * 2", "x * 3", "pkg.core.loss"),
        ("pkg/core/loss.py", "0.1", "0.2", "pkg.core.loss"),
        ("pkg/core/loss.c", "x * 2", "x * 3", "pkg.core.loss"),
        ("pkg/core/loss.h", "TIMES = 1", "TIMES = 2", "pkg.core.loss"),
        ("pkg/core/loss.html.j2", "a/{{", "b/{{", "pkg.core.loss"),
        ("pkg/helper.py", "return 2", "return 3", "pkg.helper"),
        ("pkg/core/__init__.py", "# nothing here", "import os; os.environ['X'] = '1'", "pkg.core"),
    ],
    ids=[
        "docstring",
        "stage",
        "function-import",
        "default",
        "kernel",
        "header",
        "template",
        "relative-import",
        "package-body",
    ],
)
def test_what_runs_changes_the_module_that_it_is_in(pkg, name, old, new, module):
    before = reached("pkg.stage", folder=pkg).modules
    edit(pkg, name, old, new)
    after = reached("pkg.stage", folder=pkg).modules
    assert {m for m in after if after[m] != before.get(m)} == {module}


def test_all_that_is_written_in_c_lies_beside_a_module():
    sources = [p for name in PACKAGES for p in (ROOT / name).rglob("*.[ch]")]
    assert sources and [p for p in sources if not p.with_suffix(".py").exists()] == []


def test_a_new_import_brings_its_module_in(pkg):
    edit(pkg, "pkg/stage.py", "from pkg import middle", "from pkg import middle, far")
    assert "pkg.far" in reached("pkg.stage", folder=pkg).modules


def move(folder: Path, old: str, new: str, *rewrites: tuple[str, str, str]) -> None:
    """Moves a module and rewrites the imports of it."""
    (folder / new).parent.mkdir(exist_ok=True)
    (folder / "pkg/tools/__init__.py").touch()
    (folder / old).rename(folder / new)
    for name, before, after in rewrites:
        edit(folder, name, before, after)


@pytest.mark.parametrize(
    ("old", "new", "rewrites"),
    [
        ("pkg/core/loss.py", "pkg/tools/loss.py", [("pkg/stage.py", "pkg.core.loss", "pkg.tools.loss")]),
        ("pkg/helper.py", "pkg/tools/aid.py", [("pkg/middle.py", "from .helper", "from pkg.tools.aid")]),
        ("pkg/middle.py", "pkg/tools/between.py", [
            ("pkg/stage.py", "from pkg import middle", "from pkg.tools import between as middle"),
            ("pkg/tools/between.py", "from .helper", "from pkg.helper"),
        ]),
    ],
    ids=["another room", "another name", "a module that is imported as one"],
)  # fmt: skip
def test_a_module_that_moves_changes_nothing(pkg, old, new, rewrites):
    before = reached("pkg.stage", folder=pkg)
    for suffix in (".c", ".h", ".html.j2"):
        if (pkg / old).with_suffix(suffix).exists():
            (pkg / new).parent.mkdir(exist_ok=True)
            (pkg / old).with_suffix(suffix).rename((pkg / new).with_suffix(suffix))
    move(pkg, old, new, *rewrites)
    after = reached("pkg.stage", folder=pkg)
    assert set(after.modules) != set(before.modules)
    assert identity(after) == identity(before)


TWO_NAMES = {"defs": "LIMIT = 1\n", "strict": "LIMIT = 2\n"}
WRAPPERS = {
    "right": "def f(x): return x\n",
    "wrong": "def f(x): return -x\n",
    "aa": "from right import f\ndef score(x): return f(x)\n",
    "bb": "from wrong import f\ndef score(x): return f(x)\n",
    "user": "import aa, bb\ndef reward(x): return aa.score(x) if x else 0.1 * bb.score(x)\n",
}


@pytest.mark.parametrize(
    ("modules", "edit_of"),
    [
        (
            TWO_NAMES | {"user": "from defs import *\nfrom strict import *\n"},
            {"user": "from strict import *\nfrom defs import *\n"},
        ),
        (
            TWO_NAMES | {"user": "from defs import LIMIT\nfrom strict import LIMIT\n"},
            {"user": "from strict import LIMIT\nfrom defs import LIMIT\n"},
        ),
        (WRAPPERS, {"aa": WRAPPERS["aa"].replace("right", "wrong"), "bb": WRAPPERS["bb"].replace("wrong", "right")}),
        (
            {"user": 'import importlib\nM = importlib.import_module("rlhf.tuning.rewards.sentiment")\n'},
            {"user": 'import importlib\nM = importlib.import_module("rlhf.tuning.rewards.learned")\n'},
        ),
        (
            {"user": "class Stage: ...\nSTAGE = Stage(section='<think>')\n"},
            {"user": "class Stage: ...\nSTAGE = Stage(section='<plan>')\n"},
        ),
    ],
    ids=["two stars", "one name twice", "two wrappers of one text", "a module by name", "a class called Stage"],
)
def test_what_decides_a_users_result_is_content(tmp_path, modules, edit_of):
    first, same, edited = (
        write_files(tmp_path / n, **{f"{name}.py": text for name, text in m.items()})
        for n, m in (("a", modules), ("b", modules), ("c", modules | edit_of))
    )
    before = identity(reached("user", folder=first))
    assert identity(reached("user", folder=same)) == before
    assert identity(reached("user", folder=edited)) != before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from pkg import middle\n", "from pkg import middle\nfrom pkg.one import rate\n"),
        ("from pkg.one import rate\n", "from pkg.two import rate\n"),
        ("import rate\n", "import other as rate\n"),
    ],
    ids=["a new import", "of the same name in another module", "of another name in the same module"],
)
def test_another_import_of_code_that_is_reached_anyway_is_another_code(pkg, old, new):
    for name, value in (("one", 1), ("two", 2)):
        (pkg / f"pkg/{name}.py").write_text(f"rate, other = {value}, 9\n")
    edit(pkg, "pkg/helper.py", "def two", "from pkg import one, two as second\n\n\ndef two")
    if "middle" not in old:
        edit(pkg, "pkg/stage.py", "from pkg import middle\n", "from pkg import middle\nfrom pkg.one import rate\n")
    before = reached("pkg.stage", folder=pkg)
    edit(pkg, "pkg/stage.py", old, new)
    after = reached("pkg.stage", folder=pkg)
    assert set(after.modules) == set(before.modules)
    assert identity(after) != identity(before)


def test_a_key_holds_contents_and_no_names_of_modules():
    parts = {"stage": "sft", "imports": "links", "code": {"rlhf.stages.sft": "a", "rlhf.tuning.losses.sft": "b"}}
    moved = parts | {"code": {"rlhf.stages.tuning.sft": "b", "rlhf.stages.sft": "a"}}
    assert key_of(moved) == key_of(parts)
    assert key_of(parts | {"code": {"rlhf.stages.sft": "a", "rlhf.tuning.losses.sft": "c"}}) != key_of(parts)
    assert key_of(parts | {"imports": "other links"}) != key_of(parts)


FITTED = {"sft", "distill", "preference", "reward"}
TOOL = "rlhf.tuning.agents.tools.calculator"
HASHES = (
    f"TOOL = {TOOL!r}"
    + """
import json
from rlhf.stages.contract.fingerprint import reached
from rlhf.stages.contract.registry import modules
codes = {name: reached(module) for name, module in {**modules(), "calculator": TOOL}.items()}
print(json.dumps({name: [sorted(set(code.modules.values())), code.imports] for name, code in codes.items()}))
"""
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of this project's own code, to be edited."""
    folder = tmp_path_factory.mktemp("tree")
    copy_project(folder)
    return folder


def hashes(tree: Path) -> dict[str, list[object]]:
    command = [sys.executable, "-P", "-c", HASHES]
    return json.loads(subprocess.check_output(command, cwd=tree, env={"PYTHONPATH": str(tree / "src")}, text=True))


@pytest.fixture(scope="module")
def unedited(tree):
    """Of the tree as it was copied: each test leaves it so."""
    return hashes(tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new", "touched"),
    [
        ("stages/worker/process.py", "HEARTBEAT_SECONDS = 2.0", "HEARTBEAT_SECONDS = 3.0", set()),
        ("stages/sft.py", "return metrics |", "return {} | metrics |", {"sft"}),
        # What a stage is called and shows, and where it stands in a run, is in no key.
        ("stages/sft.py", 'title="SFT"', 'title="Tuned"', set()),
        ("stages/sft.py", '"""Supervised fine-tuning."""', '"""SFT."""', set()),
        ("stages/score/stage.py", '"completions": 0', '"completions": 1', {"score"}),
        (
            "tuning/settings.py",
            "= 0.95",
            "= 0.96",
            FITTED | {"rollout", "refill", "greedy", "score", "update", "evaluate"},
        ),
        (
            "tuning/rollout/engine/engine.py",
            "\nclass ",
            "\nX = 1\n\n\nclass ",
            {"distill", "rollout", "refill", "greedy", "evaluate"},
        ),
        # Engines over HTTP are loaded by name, by those rollouts alone that use them.
        ("tuning/rollout/servers/protocol.py", "\nclass ", "\nX = 1\n\n\nclass ", set()),
        ("tuning/data/records.py", "\ndef ", "\nX = 1\n\n\ndef ", {"prepare"}),
    ],
    ids=lambda v: v.replace("/", ".") if isinstance(v, str) and v.endswith(".py") else "",
)
def test_an_edit_of_the_project_reaches_these_stages_and_no_others(tree, unedited, file, old, new, touched):
    path = tree / file
    text = path.read_text()
    edit(tree, file, old, new)
    try:
        after = hashes(tree)
    finally:
        path.write_text(text)
    assert {name for name in modules() if after[name] != unedited[name]} == touched


@pytest.mark.slow
def test_the_docstring_of_a_built_in_tool_is_content(tree, unedited):
    path = tree / "src" / f"{TOOL.replace('.', '/')}.py"
    text = path.read_text()
    path.write_text(text.replace('"""', '"""More: ', 1))
    try:
        assert hashes(tree)["calculator"] != unedited["calculator"]
    finally:
        path.write_text(text)


@pytest.mark.slow
def test_a_module_of_the_project_that_moves_leaves_every_stage_as_it_was(tree, unedited):
    moved = {"rlhf.stages.common.tables": "rlhf.stages.tables", "rlhf.tuning.losses.kl": "rlhf.tuning.kullback"}
    texts = {p: p.read_text() for p in tree.rglob("*.py")}
    for old, new in moved.items():
        path = tree.joinpath("src", *new.split(".")).with_suffix(".py")
        tree.joinpath("src", *old.split(".")).with_suffix(".py").rename(path)
    try:
        for path in tree.rglob("*.py"):
            text = path.read_text()
            for old, new in moved.items():
                text = text.replace(old, new)
            path.write_text(text)
        after = hashes(tree)
    finally:
        for new in moved.values():
            tree.joinpath("src", *new.split(".")).with_suffix(".py").unlink()
        for path, text in texts.items():
            path.write_text(text)
    after.pop("tables", None)
    assert after == unedited


def test_no_stage_reaches_the_flows_nor_the_client_of_notebooks():
    for module in modules().values():
        assert [name for name in reached(module).modules if name == "rlhf" or name.startswith("rlhf.flows")] == []


def test_every_stage_names_its_own_module_and_no_infrastructure():
    for module in modules().values():
        found = reached(module).modules
        assert module in found
        assert not [name for name in found for room in INFRASTRUCTURE if name.startswith(room)]


def test_a_tree_is_written_alike_in_every_version_of_python():
    tree = ast.parse("@d\ndef f(x: int = 1, *, y='a') -> None:\n    return lambda: [x, y][0]\n")
    text = canonical_tree(tree)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "e9a54299f9450231"
    # Fields that later versions have and earlier ones have not.
    for node in ast.walk(tree):
        node._fields = (*node._fields, "of_a_later_version")
        node.of_a_later_version = []
    assert canonical_tree(tree) == text
    other = ast.parse("def f(x: int = 1, *, y='a') -> None:\n    return lambda: [x, y][0]\n")
    assert canonical_tree(other) != text


def test_what_a_stage_loads_by_name_is_content_where_it_is_used():
    remote = EngineSettings(kind="vllm", version="1", url="http://127.0.0.1:1")
    for name in ("rollout", "refill", "greedy"):
        loaded = stage(name).loads
        assert loaded(stage(name).config()) == ()
        assert loaded(stage(name).config(engine=remote)) == (SERVERS,)
    code = reached(stage("rollout").module, SERVERS).modules
    assert {SERVERS, "rlhf.tuning.rollout.servers.protocol", "rlhf.tuning.rollout.servers.fleet"} <= set(code)
    assert SERVERS not in reached(stage("rollout").module).modules
    update = stage("update")
    assert update.loads(update.config(algorithm="rloo")) == ("rlhf.tuning.algorithms.rloo",)
    assert "rlhf.tuning.algorithms.rloo" not in reached(update.module).modules
