"""A collection frees what no kept run reaches, and nothing else: whatever the graph, beside runs, and after a kill."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
import tracemalloc
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import MANIFEST, Store
from rlhf.stages.store.audit_log import events
from rlhf.stages.store.collect import Limits, collect, survey
from rlhf.stages.store.keys import digest
from rlhf.stages.store.leases import lease, process_folder, this_process
from rlhf.stages.store.pins import pin, pins, unpin
from rlhf.stages.store.reachability import versions
from tests.stages.store.disturbed import Disturbed
from tests.stages.store.graphs import below, put, roots, run_of

NOW = Limits(grace_seconds=-60.0, settle_seconds=0.0)
"""Nothing is too young: file systems tell times by their own clocks."""


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def store(request, tmp_path):
    """An empty store."""
    name = uuid.uuid4().hex
    url = {"file": str(tmp_path / name), "memory": f"memory://{name}"}.get(request.param)
    return Store(url or f"{request.getfixturevalue('s3')}/{name}", scratch=tmp_path / "scratch")


def keys(store):
    return set(store.all_keys())


@st.composite
def graphs(draw):
    """Inputs of each artifact by number; the artifacts of each run; which runs are kept."""
    count = draw(st.integers(1, 10))
    inputs = [draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else set() for i in range(count)]
    runs = draw(st.lists(st.sets(st.integers(0, count - 1), max_size=4), min_size=1, max_size=5))
    return inputs, runs, draw(st.lists(st.booleans(), min_size=len(runs), max_size=len(runs)))


@settings(max_examples=25, deadline=None, database=None)
@given(graphs())
def test_exactly_what_the_dry_run_says_is_freed_and_all_that_is_kept_is_whole(tmp_path_factory, graph):
    inputs, members, keep = graph
    store = Store(f"memory://{uuid.uuid4().hex}", scratch=tmp_path_factory.mktemp("scratch"))
    made = []
    for i, before in enumerate(inputs):
        made.append(put(store, i, [made[j] for j in sorted(before)]))
    by_key = {(a.stage, a.key): a for a in made}
    runs = [
        run_of(f"r{i}", [made[j] for j in m], "kept" * k) for i, (m, k) in enumerate(zip(members, keep, strict=True))
    ]
    for run in runs:
        store.write_json({"name": run.name}, "runs", run.name, "run.json")
    wanted = below([made[j] for m, k in zip(members, keep, strict=True) if k for j in m], by_key)
    said = survey(store, roots(*runs), NOW)
    assert keys(store) == set(by_key)
    done = collect(store, lambda: roots(*runs), NOW)
    assert {v.ref[:2] for v in done.garbage} == {v.ref[:2] for v in said.garbage} == set(by_key) - wanted
    assert done.freed == said.freed and keys(store) == wanted
    assert all(store.verify(store.with_digest(*place, by_key[place].digest)) is None for place in wanted)
    left = {path.split("/")[-3:][1] for path in store.fs.find(store.join("artifacts")) if path.endswith(MANIFEST)}
    assert left == {key for _, key in wanted} and not store.names("condemned")
    assert set(store.names("runs")) == {run.name for run in runs if run.why}
    trail = [(event["state"], event["freed_bytes"], len(event["artifacts"])) for event in events(store)]
    assert trail == [("finished", done.freed, len(done.garbage))] * bool(done.garbage or done.runs)
    assert collect(store, lambda: roots(*(run for run in runs if run.why)), NOW).freed == 0 and len(events(store)) <= 1


def test_a_run_that_has_ended_within_the_grace_time_stays_with_its_record_and_what_it_made(store):
    """Its report and log are what somebody reads now."""
    one, two = (put(store, i) for i in range(2))
    now = time.time()
    runs = [
        dataclasses.replace(run_of("old", [one]), ended=now - 7200),
        dataclasses.replace(run_of("young", [two]), ended=now - 60),
    ]
    for run in runs:
        store.write_json({"name": run.name}, "runs", run.name, "run.json")
    said = survey(store, roots(*runs), Limits(grace_seconds=3600))
    assert said.runs == ["old"] and said.as_json()["runs"] == {"old": None, "young": "too young"}
    done = collect(store, lambda: roots(*runs), Limits(grace_seconds=3600))
    assert done.runs == ["old"] and store.names("runs") == ["young"]
    assert collect(store, lambda: roots(*runs), NOW).runs == ["old", "young"] and store.names("runs") == []
    assert keys(store) == set()


def test_a_run_that_a_young_one_reads_stays_too():
    now = time.time()
    source = run_of("source", [])
    young = dataclasses.replace(run_of("young", []), ended=now, sources={"source": "its rollouts", "gone": "no more"})
    other = run_of("other", [])
    kept = {run.name: run.why for run in roots(source, young, other).since(now - 60).runs}
    assert kept == {"source": "its rollouts", "young": "too young", "other": ""}


def test_files_of_another_artifact_do_not_go_by_a_damaged_manifest(store):
    one, two = put(store, 0), put(store, 1)
    store.write_json(one.manifest | {"folder": two.folder}, "artifacts", one.stage, one.key, MANIFEST)
    collect(store, lambda: roots(run_of("r", [two], "kept")), NOW)
    assert store.verify(store.get(two.stage, two.key)) is None


def test_what_is_young_or_named_by_the_registry_stays_with_its_inputs(store):
    base = put(store, 0)
    sft, other = put(store, 1, [base]), put(store, 6, [base])
    assert not survey(store, roots(), Limits()).garbage
    collect(store, lambda: roots(named=frozenset([sft.digest])), NOW)
    assert keys(store) == {(base.stage, base.key), (sft.stage, sft.key)} and (other.stage, other.key) not in keys(store)


def test_a_run_that_starts_during_a_collection_keeps_what_it_has_found(store):
    base = put(store, 0)
    sft, other = put(store, 1, [base]), put(store, 6, [base])
    reads = []

    def read():
        reads.append(keys(store))
        # By the second time the run has begun and found `sft` just before its manifest was taken.
        return roots(run_of("new", [sft], "running", active=True)) if len(reads) > 1 else roots()

    done = collect(store, read, NOW)
    # Its manifest was away when the run was seen; the wait asked once more.
    assert reads[1:] == [set(), set()]
    assert keys(store) == {(base.stage, base.key), (sft.stage, sft.key)}
    assert all(store.verify(store.get(a.stage, a.key)) is None for a in (base, sft))
    assert [v.ref[:2] for v in done.garbage] == [(other.stage, other.key)]


def test_what_is_made_again_between_mark_and_sweep_is_not_swept(store):
    sft = put(store, 1)
    reads = []

    def read():
        reads.append(1)
        if len(reads) == 2:
            put(store, 1, content="of another run")
        return roots()

    # The new one has just been committed: as if the clock's grace time were the time since the first reading.
    limits = dataclasses.replace(NOW, grace_seconds=0.0)
    time.sleep(0.01)
    collect(store, read, limits)
    now = store.get(sft.stage, sft.key)
    assert now is not None and store.verify(now) is None and now.digest != sft.digest
    assert not store.names("condemned", sft.stage)


def test_what_is_being_made_is_left_alone(store):
    sft = put(store, 1)
    with lease(store, sft.stage, sft.key, print):
        assert not collect(store, roots, NOW).garbage
        assert keys(store) == {(sft.stage, sft.key)}
    assert collect(store, roots, NOW).garbage and not keys(store)


def test_a_replaced_artifact_stays_for_the_run_that_has_it_and_goes_alone(store):
    old = put(store, 1)
    new = put(store, 1, content="new", replace=True)
    both = [run_of("a", [old], "kept"), run_of("b", [new], "kept")]
    assert not collect(store, lambda: roots(*both), NOW).garbage
    assert len(collect(store, lambda: roots(both[1]), NOW).garbage) == 1
    assert store.with_digest(old.stage, old.key, old.digest) is None
    assert store.verify(store.with_digest(new.stage, new.key, new.digest)) is None
    assert not store.fs.exists(f"{old.url}/data.txt")


def test_work_of_the_dead_goes_and_work_to_go_on_with_stays(store):
    for stage, key in (("sft", "dead"), ("sft", "failed"), ("sft", "live")):
        store.write_json({}, "work", stage, key, "shard-0", "part.json")
    store.write_json({}, "damaged", "sft", "x", "data.json")
    store.fs.makedirs(store.join("artifacts", "sft", "killed"), exist_ok=True)
    store.fs.pipe_file(store.join("artifacts", "sft", "killed", "half.bin"), b"half")
    partial = store.scratch / "sub" / ".weights.1-2.part"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"half")
    # Of servers of a pod that is gone.
    weights = store.scratch / "engines" / "pod-1-7"
    # Of a live worker without a lease, which waits for the next stage.
    live = store.scratch / "engines" / process_folder()
    for folder in (weights, live):
        folder.mkdir(parents=True)
        (folder / "model").write_bytes(b"w")
    run = dataclasses.replace(run_of("r", [], "kept"), pending=frozenset({("sft", "failed")}))
    assert not survey(store, roots(run), Limits()).residues
    with lease(store, "sft", "live", print):
        done = collect(store, lambda: roots(run), NOW)
    assert {r.kind for r in done.residues} == {"work", "damaged", "orphan", "weights", "partial"}
    assert store.names("work", "sft") == ["failed", "live"] and not (partial.exists() or weights.exists())
    assert (live / "model").exists()
    assert not store.names("damaged") and not store.names("artifacts", "sft")


def test_leases_whose_holders_are_gone_go_and_those_of_other_hosts_by_their_silence(store):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    here = this_process() | {"pid": dead.pid}
    dead.wait()
    far = this_process() | {"host": "elsewhere boot ns"}
    holders = {"dead": (here, 0.0), "silent": (far, 3600.0), "beating": (far, 0.0)}
    for key, (process, seconds) in holders.items():
        store.write_json({"token": key, "beat": time.time() - seconds} | process, "leases", f"sft-{key}.json")
    with lease(store, "sft", "live", print):
        assert not survey(store, roots(), Limits()).residues
        done = collect(store, roots, NOW)
        assert store.names("leases") == ["sft-beating.json", "sft-live.json"]
    gone = [("lease", "leases/sft-dead.json"), ("lease", "leases/sft-silent.json")]
    assert sorted((r.kind, r.name) for r in done.residues) == gone


KILLED_IN_A_LINK = """
import os, signal, sys
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.exclusive import create
os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
store = Store(sys.argv[1])
store.fs.makedirs(store.join("trail"), exist_ok=True)
create(store, store.join("trail", "a.json"), b"{}")
"""


def test_what_a_kill_leaves_of_a_lease_the_trail_or_a_name_goes(tmp_path):
    store = Store(str(tmp_path / "store"))
    done = subprocess.run([sys.executable, "-c", KILLED_IN_A_LINK, store.url])
    assert done.returncode == -9 and len(os.listdir(store.join("trail"))) == 1
    assert {r.kind for r in collect(store, roots, NOW).residues} == {"partial"}
    assert not any(name.endswith(".part") for name in os.listdir(store.join("trail")))


def test_pins_are_objects_of_the_store(remote):
    store = remote
    pin(store, "mine", "of the paper")
    store.write_bytes(b"{half", "pins", "torn.json")
    assert set(pins(store)) == {"mine", "torn"} and pins(store)["mine"]["note"] == "of the paper"
    assert unpin(store, "mine") and not unpin(store, "mine") and set(pins(store)) == {"torn"}


KILLED = """
import os, shutil, signal, sys
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.collect import Limits, collect
from rlhf.stages.store.reachability import Roots, Run

class Mortal(Store):
    left = 0
    def step(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    def write_bytes(self, *args):
        self.step()
        super().write_bytes(*args)
    def remove(self, path):
        self.step()
        super().remove(path)
    def remove_folder(self, path):
        self.step()
        for file in self.fs.find(path)[:1]:
            self.fs.rm_file(file)
        self.step()
        super().remove_folder(path)

for n in range(1, 100):
    folder = shutil.copytree(sys.argv[1], f"{sys.argv[1]}-{n}")
    if os.fork() == 0:
        store = Mortal(str(folder))
        store.left = n
        runs = (Run("kept", "kept", False, eval(sys.argv[2])), Run("gone", "", False, ()))
        collect(store, lambda: Roots(runs), Limits(-60.0, 0.0))
        os._exit(0)
    if os.wait()[1] == 0:
        print(n)
        break
"""


@pytest.mark.slow
def test_a_collection_that_is_killed_at_any_moment_is_finished_by_the_next(tmp_path):
    url = tmp_path / "store"
    store = Store(str(url))
    base = put(store, 0)
    sft, other = put(store, 1, [base]), put(store, 6, [base])
    for run in ("kept", "gone"):
        store.write_json({"name": run}, "runs", run, "run.json")
    ref = (sft.stage, sft.key, sft.digest)
    done = subprocess.run([sys.executable, "-c", KILLED, url, repr((ref,))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    moments = int(done.stdout)
    assert moments > 8
    wanted = {(base.stage, base.key), (sft.stage, sft.key)}
    runs = [run_of("kept", [sft], "kept"), run_of("gone", [])]
    for n in range(1, moments):
        after = Store(f"{url}-{n}")
        # What is half deleted does not look whole.
        found = after.get(other.stage, other.key)
        assert keys(after) >= wanted and (found is None) == ((other.stage, other.key) not in keys(after))
        collect(after, lambda: roots(*runs), NOW)
        assert keys(after) == wanted and after.names("runs") == ["kept"]
        assert not after.names("condemned", other.stage) and not after.fs.exists(
            other.url.replace(str(url), f"{url}-{n}")
        )
        assert all(after.verify(after.get(*place)) is None for place in wanted)
        assert json.dumps(after.read_json("trail", after.names("trail")[-1]))


def test_work_that_a_forced_run_computes_stays_with_that_of_its_processes(store):
    """Its folder is named after the key and the run; its lease and its record have the key alone."""
    key, dead = digest("live"), digest("dead")
    for folder in (key, f"{key}-again", f"{key}-again.process-1", f"{dead}-again"):
        store.write_json({}, "work", "sft", folder, "shard-0", "part.json")
    with lease(store, "sft", key, print):
        collect(store, roots, NOW)
    assert store.names("work", "sft") == sorted([key, f"{key}-again", f"{key}-again.process-1"])
    run = dataclasses.replace(run_of("again", [], "running"), pending=frozenset({("sft", key)}))
    collect(store, lambda: roots(run), NOW)
    assert len(store.names("work", "sft")) == 3
    collect(store, roots, NOW)
    assert not store.names("work", "sft")


def test_a_collection_waits_for_no_stage_and_restores_the_others(tmp_path):
    """A run makes a condemned artifact again for hours; the rest is condemned for seconds alone."""
    store = Store(str(tmp_path / "store"))
    sft, other = put(store, 1), put(store, 2)
    making, reads = contextlib.ExitStack(), []

    def read():
        reads.append(1)
        if len(reads) == 1:
            return roots()
        if len(reads) == 2:
            making.enter_context(lease(store, sft.stage, sft.key, print))
        return roots(run_of("new", [sft, other], "running"))

    with making:
        began = time.monotonic()
        assert collect(store, read, NOW).garbage == ()
        assert time.monotonic() - began < 10 and keys(store) == {(other.stage, other.key)}
        assert store.names("condemned", sft.stage)
    collect(store, lambda: roots(run_of("new", [sft, other], "running")), NOW)
    assert keys(store) == {(sft.stage, sft.key), (other.stage, other.key)} and not store.names("condemned", sft.stage)


@pytest.mark.parametrize("at", ["tomb", "file"])
def test_a_collection_that_has_lost_its_lease_removes_nothing_more(tmp_path, monkeypatch, at):
    """Its host was suspended; another one has taken the lease over and committed other content."""
    store = Store(str(tmp_path / "store"))
    sft = put(store, 1)
    made = []

    def taken_over():
        monkeypatch.undo()
        path = store.join("leases", f"{sft.stage}-{sft.key}.json")
        store.remove(path)
        with lease(store, sft.stage, sft.key, print):
            made.append(put(store, 1, content="of another host", replace=True))
        store.write_json(
            {"token": "other", "beat": time.time()} | this_process() | {"host": "far boot"}, *path.split("/")[-2:]
        )

    write, remove = store.write_json, store.remove

    def written(value, *parts):
        write(value, *parts)
        if parts[0] == "condemned" and at == "tomb":
            taken_over()

    def removed(path):
        remove(path)
        if at == "file" and path.endswith("moments.bin"):
            taken_over()

    monkeypatch.setattr(store, "write_json", written)
    monkeypatch.setattr(store, "remove", removed)
    collect(store, roots, NOW)
    (new,) = made
    assert store.get(new.stage, new.key).digest == new.digest and store.verify(new) is None


def test_a_request_that_fails_takes_nothing_from_what_stays(tmp_path):
    """`fs.exists` says no where a store does not answer: as if a manifest that is there were not."""
    store = Store(f"disturbed://{tmp_path.name}", scratch=tmp_path)
    old, new = put(store, 1), put(store, 1, content="new", replace=True)
    both = [run_of("a", [old], "kept"), run_of("b", [new], "kept")]
    assert not collect(store, lambda: roots(*both), NOW).garbage
    Disturbed.disturb(info=["", ""] + ["before"] * 9)
    with contextlib.suppress(OSError):
        collect(store, lambda: roots(both[1]), NOW)
    Disturbed.disturb(info=["before"])
    with pytest.raises(OSError, match="Input/output"):
        runs.exists(store, "b")
    Disturbed.disturb()
    assert store.verify(store.get(new.stage, new.key)) is None
    assert len(collect(store, lambda: roots(both[1]), NOW).residues) <= 1 and keys(store) == {(new.stage, new.key)}


def test_a_listing_of_artifacts_holds_little_of_each_manifest(tmp_path):
    store = Store(f"memory://{uuid.uuid4().hex}", scratch=tmp_path)
    for number in range(40):
        manifest = {"stage": "sft", "key": digest(["key", number]), "metrics": {}, "inputs": {}}
        (folder := tmp_path / str(number)).mkdir()
        (folder / "data").write_text("x")
        store.commit(folder, manifest | {"config": {str(i): i for i in range(1000)}})
    tracemalloc.start()
    found = versions(store)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(found) == 40 and held < 40 * 4000
