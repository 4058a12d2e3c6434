"""A collection on a disk without a free block has the room that the store keeps."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import can_mount

COLLECTS = """
import contextlib, sys, time
from pathlib import Path
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.collect import Limits, collect
from rlhf.stages.store.disk import disk_fault
from rlhf.stages.store.reserve import keep_room
from rlhf.stages.store.audit_log import events
from tests.stages.store.graphs import put, roots, run_of

place, case = Path(sys.argv[1]), sys.argv[2]
store = Store(str(place / "store"))
made = [put(store, n, content="x" * 2**15) for n in range(8)]
runs = {"kept": run_of("kept", made[:2], "kept", active=case == "beside a run"), "gone": run_of("gone", made[2:])}
if case != "nothing":
    keep_room(store)
for name in runs:
    store.write_json({"name": name, "log": "x" * 2**16}, "runs", name, "run.json")
full = (place / "full").open("wb", buffering=0)
with contextlib.suppress(OSError):
    for size in (2**20, 2**12, 1):
        with contextlib.suppress(OSError):
            while True:
                full.write(bytes(size))
try:
    store.write_bytes(b"x", "probe")
    raise SystemExit("not full")
except OSError:
    pass
now = Limits(grace_seconds=-60.0, settle_seconds=0.0)
try:
    done = collect(store, lambda: roots(*(run for name, run in runs.items() if name in store.names("runs"))), now)
    print(len(done.garbage), done.runs, done.freed > 6 * 2**15, len(store.all_keys()), store.names("runs"))
    assert [store.verify(a) for a in made[:2]] == [None, None]
    assert not [p for name in ("leases", "condemned") for p in Path(store.join(name)).rglob("*.json")]
    assert sum(len(event["artifacts"]) for event in events(store) if event["state"] == "finished") == 6
    assert (place / "store" / "room").stat().st_size == 2**20
except OSError as error:
    print(disk_fault(error, place).strerror, len(store.all_keys()))
"""


@pytest.mark.skipif(not can_mount(), reason="this machine gives no namespace of mounts")
@pytest.mark.parametrize("case", ["quiet", "beside a run", "nothing"])
def test_a_collection_on_a_full_disk_frees_what_it_would_free_elsewhere(tmp_path: Path, case: str):
    script = f"mount -t tmpfs -o size=4m none {tmp_path} && exec {sys.executable} -c '{COLLECTS}' {tmp_path} '{case}'"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 0, done.stderr
    if case == "nothing":
        assert "delete the log of an old run, runs/NAME/worker.log" in done.stdout and done.stdout.endswith(" 8\n")
    else:
        assert done.stdout == "6 ['gone'] True 2 ['kept']\n"
