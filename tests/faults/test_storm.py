"""After random faults the same command ends with the bits of an undisturbed run: a few of those of `make faults`.

Their kinds and moments are the seed's; `python -m tests.faults.storm` plays hundreds of them.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.storm.power import Loss, shim

PROJECT = Path(__file__).parents[2]
SCENES = ["kill-reward", "stop", "work", "power", "artifacts"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs Linux and a C compiler")
def test_every_scene_of_a_small_storm_ends_as_a_run_that_nobody_disturbs(tmp_path):
    words = ["--folder", tmp_path / "storm", "--faults", "25", "--seed", "3", "--jobs", "2"]
    words += [word for name in SCENES for word in ("--scene", name)]
    command = [sys.executable, "-m", "tests.faults.storm", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, timeout=580)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    scenes = [json.loads(line) for line in (tmp_path / "storm" / "results.jsonl").read_text().splitlines()]
    assert {scene["end"] for scene in scenes} == {"as calm"}
    assert sum(len(scene["faults"]) for scene in scenes) >= 25
    # A storm that was cut goes on: nothing is played twice.
    again = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, timeout=580)
    assert again.returncode == 0 and "ok    " not in again.stdout


WRITES = """
import os, pathlib, shutil, sys
place = pathlib.Path(sys.argv[1])

def put(path, text, data=False, folder=False):
    path.write_text(text)
    if data:
        with path.open() as f:
            os.fsync(f.fileno())
    if folder:
        fd = os.open(path.parent, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

put(place / "named", "x", data=True)
put(place / "kept", "x", data=True, folder=True)
put(place / "emptied", "x", folder=True)
put(place / "new", "new", data=True)
os.replace(place / "new", place / "kept-too")
(place / "old").unlink()
(place / "folder").mkdir()
put(place / "folder" / "file", "x", data=True, folder=True)
shutil.copyfile(place / "kept", place / "copied")
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs Linux and a C compiler")
def test_a_loss_of_power_takes_what_was_not_synced_and_nothing_else(tmp_path):
    place, graves, log = tmp_path / "disk", tmp_path / "graves", tmp_path / "log"
    place.mkdir()
    graves.mkdir()
    (place / "old").write_text("old")
    (place / "kept-too").write_text("before")
    env = os.environ | {"LD_PRELOAD": str(shim(tmp_path)), "STORM_ROOT": str(place)}
    env |= {"STORM_LOG": str(log), "STORM_GRAVES": str(graves)}
    subprocess.run([sys.executable, "-c", WRITES, str(place)], check=True, env=env)

    class Worst(random.Random):
        def random(self) -> float:
            return 0.0

    Loss(place, log, graves, Worst()).strike()
    left = {path.relative_to(place).as_posix(): path.read_text() for path in place.rglob("*") if path.is_file()}
    assert left == {"named": "x", "kept": "x", "emptied": "", "old": "old", "kept-too": "before"}


@pytest.mark.slow
def test_twelve_nights_end_as_they_must(tmp_path):
    command = [sys.executable, "-m", "tests.faults.year", "--nights", "12", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=1500)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout
    assert rows[-1] == {"ended": {"promoted": 2, "nothing new": 7, "refused": 2, "failed": 1}, "alerts": 3}
    [hung] = [row for row in rows[:-1] if row["ended"] == "failed"]
    assert hung["state"] == "TimedOut" and "limits.run_seconds" in hung["message"]
