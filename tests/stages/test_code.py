"""The code part of a key: what runs, not what is written about it, and only what the stage reaches."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stages
from stages.code import OWN, function_digests, library_versions, module_hashes
from stages.engine_settings import EngineSettings, engine_digests
from stages.registry import MODULES

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


def test_the_modules_that_are_reached(pkg):
    found = module_hashes("pkg.stage", pkg)
    assert set(found) == {"pkg.stage", "pkg.middle", "pkg.helper", "pkg.core.loss"}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("pkg/stage.py", "# inside, as stages do", "# inside"),
        ("pkg/stage.py", '"""A stage."""', '"""Another text about the same stage."""'),
        ("pkg/stage.py", '    """Runs."""\n', ""),
        ("pkg/core/loss.py", "Doc of a field.", "Better doc of a field."),
        ("pkg/core/loss.py", "x * 2", "(x  *  2)"),
        ("pkg/core/loss.c", "// twice", "// two times"),
        ("pkg/core/loss.h", "// how often", "// how many times"),
        ("pkg/core/__init__.py", "# nothing here", "# nothing at all"),
        ("pkg/far.py", "9", "10"),
    ],
    ids=[
        "comment",
        "module-doc",
        "function-doc",
        "field-doc",
        "layout",
        "kernel-comment",
        "header-comment",
        "empty-package",
        "unreached",
    ],
)
def test_what_does_not_run_changes_nothing(pkg, name, old, new):
    before = module_hashes("pkg.stage", pkg)
    edit(pkg, name, old, new)
    assert module_hashes("pkg.stage", pkg) == before


@pytest.mark.parametrize(
    ("name", "old", "new", "module"),
    [
        ("pkg/stage.py", "loss(1)", "loss(2)", "pkg.stage"),
        ("pkg/core/loss.py", "x * 2", "x * 3", "pkg.core.loss"),
        ("pkg/core/loss.py", "0.1", "0.2", "pkg.core.loss"),
        ("pkg/core/loss.c", "x * 2", "x * 3", "pkg.core.loss"),
        ("pkg/core/loss.h", "TIMES = 1", "TIMES = 2", "pkg.core.loss"),
        ("pkg/helper.py", "return 2", "return 3", "pkg.helper"),
        ("pkg/core/__init__.py", "# nothing here", "import os; os.environ['X'] = '1'", "pkg.core"),
    ],
    ids=["stage", "function-import", "default", "kernel", "header", "relative-import", "package-body"],
)
def test_what_runs_changes_the_module_that_it_is_in(pkg, name, old, new, module):
    before = module_hashes("pkg.stage", pkg)
    edit(pkg, name, old, new)
    after = module_hashes("pkg.stage", pkg)
    assert {m for m in after if after[m] != before.get(m)} == {module}


def test_all_that_is_written_in_c_lies_beside_a_module():
    sources = [p for top in OWN for p in (Path(stages.__file__).parents[1] / top).rglob("*.[ch]")]
    assert sources and [p for p in sources if not p.with_suffix(".py").exists()] == []


def test_a_new_import_brings_its_module_in(pkg):
    edit(pkg, "pkg/stage.py", "from pkg import middle", "from pkg import middle, far")
    assert "pkg.far" in module_hashes("pkg.stage", pkg)


FITTED = {"sft", "distill", "preference", "reward"}
HASHES = """
import json
from stages.code import module_hashes
from stages.registry import MODULES
print(json.dumps({name: module_hashes(module) for name, module in MODULES.items()}))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of this project's own code, to be edited."""
    folder = tmp_path_factory.mktemp("tree")
    root = Path(next(iter(stages.__path__))).parent
    for name in ("stages", "tuning"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def hashes(tree: Path) -> dict[str, dict[str, str]]:
    command = [sys.executable, "-P", "-c", HASHES]
    return json.loads(subprocess.check_output(command, cwd=tree, env={"PYTHONPATH": str(tree)}, text=True))


@pytest.mark.parametrize(
    ("file", "old", "new", "touched"),
    [
        ("stages/worker.py", "HEARTBEAT_SECONDS = 2.0", "HEARTBEAT_SECONDS = 3.0", set()),
        ("tuning/losses/sft.py", "import", "# a remark\nimport", set()),
        ("stages/sft.py", "return metrics |", "return {} | metrics |", {"sft"}),
        ("stages/score.py", '"completions": 0', '"completions": 1', {"score"}),
        (
            "stages/settings.py",
            "= 0.95",
            "= 0.96",
            FITTED | {"rollout", "refill", "greedy", "score", "update", "evaluate"},
        ),
        (
            "tuning/rollout/engine.py",
            "\ndef ",
            "\nX = 1\n\n\ndef ",
            {"distill", "rollout", "refill", "greedy", "evaluate"},
        ),
        # Engines over HTTP are loaded by name, by those rollouts alone that use them.
        ("tuning/rollout/protocols.py", "\nclass ", "\nX = 1\n\n\nclass ", set()),
        ("tuning/data/records.py", "\ndef ", "\nX = 1\n\n\ndef ", {"prepare"}),
    ],
    ids=lambda v: v.replace("/", ".") if isinstance(v, str) and v.endswith(".py") else "",
)
def test_an_edit_of_the_project_reaches_these_stages_and_no_others(tree, file, old, new, touched):
    before = hashes(tree)
    path = tree / file
    text = path.read_text()
    edit(tree, file, old, new)
    try:
        after = hashes(tree)
    finally:
        path.write_text(text)
    assert {name for name in MODULES if after[name] != before[name]} == touched


def test_every_stage_names_its_own_module_and_no_infrastructure():
    for module in MODULES.values():
        found = module_hashes(module)
        assert module in found
        assert not {"stages.worker", "stages.artifacts", "stages.client", "stages.leases"} & set(found)


def test_a_reward_function_of_the_user_is_content(tmp_path, monkeypatch):
    (tmp_path / "myreward.py").write_text(
        "import json\nimport myhelper\n\n\ndef f(prompts, completions, **_):\n    return [1.0]\n"
    )
    (tmp_path / "myhelper.py").write_text("LIMIT = 3\n")
    (tmp_path / "other.py").write_text("LIMIT = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = function_digests("myreward:f", "here")
    assert set(before) == {"module:myreward", "module:myhelper"}
    (tmp_path / "other.py").write_text("LIMIT = 4\n")
    assert function_digests("myreward:f", "here") == before
    (tmp_path / "myhelper.py").write_text("LIMIT = 44\n")
    assert function_digests("myreward:f", "here") != before


def test_an_engine_over_http_is_content_where_it_is_used():
    native, remote = (engine_digests(s) for s in (EngineSettings(), EngineSettings(kind="vllm", version="1", url="u")))
    assert native == {}
    reached = {"module:stages.remote", "module:tuning.rollout.protocols", "module:tuning.rollout.remote"}
    assert reached <= set(remote)
    for name in ("rollout", "refill", "greedy"):
        module = importlib.import_module(MODULES[name])
        assert module.source_digests(module.Config()) == {}
        assert module.source_digests(module.Config(engine=EngineSettings(kind="vllm", version="1", url="u"))) == remote


def test_a_builtin_reward_needs_no_digest_of_its_own():
    assert function_digests("exact_match", "here") == {}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_mach", "rl.score.x: no reward function 'exact_mach'; did you mean exact_match?"),
        ("no_such_module:f", "rl.score.x: no module 'no_such_module' can be imported"),
    ],
)
def test_a_reward_function_that_is_not_there(name, message):
    with pytest.raises(ValueError) as e:
        function_digests(name, "rl.score.x")
    assert message in str(e.value)


def test_versions_of_libraries():
    found = library_versions(("numpy", "no-such-library"))
    assert found["no-such-library"] == "absent"
    assert found["numpy"][0].isdigit()
