"""The wheel: it claims one import name, holds all that a run reads, and works next to a user's own `flows/`."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import PACKAGES, ROOT, copy_project

REWARD = "def brevity(prompts, completions, **kwargs):\n    return [-len(text) / 100 for text in completions]\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of this project: setuptools writes into the folder that it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_project(folder / "project")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "project")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(folder / "project")], check=True)
    [path] = folder.glob("*.whl")
    return path


def test_it_claims_one_import_name_and_has_every_file_of_the_packages(wheel):
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {name.parts[0] for name in names if ".dist-info" not in name.parts[0]} == {"rlhf"}
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    expected = {Path("rlhf", path.relative_to(ROOT)) for path in files if path.suffix not in (".md", ".pyc")}
    assert expected and expected - names == set()


@pytest.mark.slow
def test_it_works_next_to_a_users_own_flows_and_tuning(wheel, tmp_path):
    site, work = tmp_path / "site", tmp_path / "work"
    zipfile.ZipFile(wheel).extractall(site)
    (work / "flows").mkdir(parents=True)
    (work / "flows" / "rewards.py").write_text(REWARD)
    (work / "tuning.py").write_text("raise SystemExit('this is the tuning.py of a user')\n")
    program = "import rlhf.flows.cli.app as app, sys; assert sys.argv.pop(1) in app.__file__; app.main()"
    sets = ["rl.score.rewards={brevity: {function: 'flows.rewards:brevity'}}", f"store={tmp_path / 'store'}"]
    command = ["plan", "smoke", *(word for text in sets for word in ("--set", text))]
    done = subprocess.run(
        [sys.executable, "-c", program, str(site), *command],
        cwd=work,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "0 hit" in done.stdout
