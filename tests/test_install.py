"""`infra/install.sh`: which tool installs which file, and what becomes of an installation that was interrupted.

Stand-ins for pip and uv write down how they are called: no test downloads anything.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOL = """#!/bin/sh
echo "{name} $*" >> {log}
case "$*" in
  --version) exit {version} ;;
  "config get"*) exit 1 ;;
  *{breaks}*) {how} ;;
esac
"""


class Place:
    """A virtual environment of stand-ins; `run` is the script in it."""

    def __init__(self, folder: Path):
        self.venv, self.log = folder / "venv", folder / "log"
        (self.venv / "bin").mkdir(parents=True)
        self.tool("pip")
        self.tool("uv")

    def tool(self, name: str, breaks: str = "nothing", how: str = "exit 1", version: int = 0) -> None:
        path = self.venv / "bin" / name
        path.write_text(TOOL.format(name=name, log=self.log, breaks=breaks, how=how, version=version))
        path.chmod(0o755)

    def start(self) -> subprocess.Popen[str]:
        command = ["infra/install.sh", str(self.venv), "a.txt", "b.txt"]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def run(self, code: int = 0) -> str:
        process = self.start()
        output = process.communicate(timeout=60)[0]
        assert process.returncode == code, output
        return output

    def calls(self) -> list[str]:
        """How files were installed, and forgotten then: tool, files, and whether what is there counts."""
        lines = [line.split() for line in self.log.read_text().splitlines() if " install " in f"{line} "]
        self.log.unlink()
        again = {"--reinstall", "--force-reinstall"}
        return [f"{w[0]} {w[w.index('-r') + 1]}{' again' if again & {*w} else ''}" for w in lines]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_uv_installs_all_files_and_leaves_nothing_behind(place):
    assert place.run() == ""
    assert place.calls() == ["uv a.txt", "uv b.txt"]
    assert [p.name for p in place.venv.iterdir()] == ["bin"]


def test_an_installation_that_was_interrupted_is_made_again_whole(place):
    # It could be looked at as installed: its packages' records are written before their files.
    place.tool("uv", breaks="a.txt", how="kill -INT 0; sleep 20")
    process = place.start()
    process.communicate(timeout=30)
    assert process.returncode in (130, -signal.SIGINT)
    assert place.calls() == ["uv a.txt"]
    place.tool("uv")
    place.run()
    assert place.calls() == ["uv a.txt again", "uv b.txt"]
    place.run()
    assert place.calls() == ["uv a.txt", "uv b.txt"]


def test_what_uv_leaves_half_done_pip_makes_whole_and_uv_is_asked_once(place):
    place.tool("uv", breaks="a.txt", how="exit 2")
    output = place.run()
    assert place.calls() == ["uv a.txt", "pip a.txt again", "pip b.txt"]
    assert output.count("installed by pip, without uv") == 2


@pytest.mark.parametrize("version", [1, 126, 139])
def test_a_uv_that_does_not_run_is_fetched_and_else_pip_goes_on(place, version):
    place.tool("uv", version=version)
    place.run()
    assert place.calls() == ["pip infra/requirements-uv.txt again", "pip a.txt", "pip b.txt"]


def test_an_interrupted_pip_stops_it(place):
    """pip ends with an ordinary error where it is interrupted."""
    place.tool("uv", version=1)
    place.tool("pip", breaks="requirements-uv.txt", how="trap 'exit 1' INT; kill -INT 0; sleep 5 & wait; exit 1")
    began = time.monotonic()
    process = place.start()
    process.communicate(timeout=30)
    assert process.returncode in (130, -signal.SIGINT) and time.monotonic() - began < 20
    assert place.calls() == ["pip infra/requirements-uv.txt again"]


def test_an_install_that_fails_fails_and_the_next_one_begins_with_its_file(place):
    for tool in ("uv", "pip"):
        place.tool(tool, breaks="b.txt", how="exit 3")
    place.run(code=3)
    assert place.calls() == ["uv a.txt", "uv b.txt", "pip b.txt again"]
    assert (place.venv / ".installing").exists()
