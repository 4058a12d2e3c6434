"""The record of a run is written often enough to tell a kill from a run at work, and is found by its name."""

import datetime
import json
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from rlhf.flows.graph.keying import key_of, key_parts
from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.recipe.retention import Retention
from rlhf.flows.records import UnknownRun, all_runs, candidates, readable_runs, status_of, whole_first
from rlhf.flows.report.console import ConsoleReporter
from rlhf.flows.retention import roots_of
from rlhf.flows.running import session
from rlhf.flows.running.runner import run_plain
from rlhf.flows.running.session import Session
from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.leases import booted, host_scope, lease, this_process
from rlhf.stages.worker.client import StageFailed, Worker
from tests.support import can_mount, in_small_disk, write_files

HEAD = ("runs", "again", "run.json")


def again(store: Path, **options) -> Session:
    return Session(load_recipe("smoke", sets=[f"store={store}"]), ConsoleReporter(), "again", **options)


@pytest.fixture
def run(store, monkeypatch):
    """A session over a store that has everything."""
    monkeypatch.setattr(session, "SAVE_SECONDS", 1e9)
    return again(store)


def test_a_run_that_makes_nothing_writes_its_record_at_its_two_ends(run, store):
    path = store / "runs" / "again" / "run.json"
    # Each write is a new file.
    writes = {path.stat().st_mtime_ns}
    for node in run.nodes:
        assert run.run_node(node)[0] == "hit"
        writes.add(path.stat().st_mtime_ns)
    assert len(run.nodes) > 5 and len(writes) == 1
    run.finish("finished")
    record = Store(str(store)).read_json("runs", "again", "run.json")
    assert record == run.record and {e["state"] for e in record["nodes"].values()} == {"hit"}


def test_a_run_that_could_not_begin_shows_no_signs_of_life(store, monkeypatch):
    def fail(self, soon=False):
        raise OSError("the disk is full")

    ended = []
    monkeypatch.setattr(session.Saver, "save", fail)
    monkeypatch.setattr(session.Saver, "end", lambda self: ended.append(self))
    with pytest.raises(OSError):
        again(store)
    assert len(ended) == 1


@pytest.mark.parametrize("waits", ["sources", "bytes"])
def test_what_a_run_has_found_is_in_its_record_however_long_it_reads_data_or_inputs(store, monkeypatch, waits):
    """A collection waits ten seconds for that; ten minutes of silence are the end of a run to another host."""
    monkeypatch.setattr(session, "SAVE_SECONDS", 0.2)
    monkeypatch.setattr(session, "SIGN_SECONDS", 0.5)
    run, ends = again(store), threading.Event()
    for name in ("base", "prepare"):
        assert run.run_node(name)[0] == "hit"
    run.force = {"sft"}

    def wait(*_):
        assert ends.wait(60)
        raise KeyboardInterrupt

    if waits == "sources":
        monkeypatch.setattr("rlhf.flows.running.session.key_now", wait)
    else:
        monkeypatch.setattr(run.inputs, "ensure", wait)
    thread = threading.Thread(target=lambda: pytest.raises(KeyboardInterrupt, run.run_node, "sft"))
    thread.start()
    place, seen = Store(str(store)), set()
    while len(seen) < 3:
        record = place.read_json("runs", "again", "run.json")
        if all("digest" in record["nodes"].get(name, {}) for name in ("base", "prepare")):
            seen.add(record["saved"])
        time.sleep(0.05)
    ends.set()
    thread.join()
    assert waits == "sources" or record["nodes"]["sft"]["state"] == "running"
    run.finish("interrupted")
    ended = place.read_json("runs", "again", "run.json")
    time.sleep(0.8)
    assert place.read_json("runs", "again", "run.json") == ended


def test_of_two_commands_with_one_name_at_one_instant_one_is_refused(tmp_path, monkeypatch):
    recipe, ends = load_recipe("smoke", sets=[f"store={tmp_path / 'store'}"]), list[object]()
    real = session.before

    def before(*asked):
        found = real(*asked)
        time.sleep(0.3)
        return found

    def begin():
        try:
            ends.append(Session(recipe, ConsoleReporter(), "k1"))
        except RecipeError as error:
            ends.append(error)

    monkeypatch.setattr(session, "before", before)
    threads = [threading.Thread(target=begin) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (error,) = [end for end in ends if isinstance(end, RecipeError)]
    (run,) = [end for end in ends if isinstance(end, Session)]
    assert "run k1 is running" in str(error)
    run.finish("interrupted")


def test_a_stage_is_on_disk_as_running_before_its_work_begins(run, store):
    place = Store(str(store))

    class Interrupted(ConsoleReporter):
        def stage_started(self, node):
            nodes.update(place.read_json("runs", "again", "run.json")["nodes"])
            raise KeyboardInterrupt

    nodes = {}
    run.run_node("base")
    run.reporter, run.force = Interrupted(), {"prepare"}
    with pytest.raises(KeyboardInterrupt):
        run.run_node("prepare")
    assert {name: entry["state"] for name, entry in nodes.items()} == {"base": "hit", "prepare": "running"}


@pytest.mark.slow
def test_a_record_that_cannot_be_written_hides_no_error_of_a_stage(run, store, capsys):
    run.run_node("base")
    shutil.rmtree(store / "artifacts" / "prepare")
    record = store / "runs" / "again" / "run.json"

    class Blocked(ConsoleReporter):
        def stage_started(self, node):
            super().stage_started(node)
            shutil.rmtree(store / "artifacts" / "base")
            record.unlink()
            record.mkdir()

    run.reporter = Blocked()
    with pytest.raises(StageFailed, match=r"prepare: .*input base .* is gone"):
        run.run_node("prepare")
    run.finish("failed")
    assert "the record of run again could not be written: " in capsys.readouterr().out


def test_a_run_that_is_interrupted_while_it_waits_for_another_says_so(run, store):
    class Interrupted(ConsoleReporter):
        def line(self, text):
            super().line(text)
            if "prepare: prepare is being made by" in text:
                # As by Ctrl-C; a signal could meet a garbage collection, which would swallow it.
                raise KeyboardInterrupt

    run.run_node("base")
    run.reporter, run.force = Interrupted(), {"prepare"}
    key = key_of(key_parts(run.nodes["prepare"], run.made))
    with lease(run.store, "prepare", key, print), pytest.raises(KeyboardInterrupt):
        run.run_node("prepare")
    run.finish("interrupted")
    nodes = Store(str(store)).read_json("runs", "again", "run.json")["nodes"]
    assert {name: entry["state"] for name, entry in nodes.items()} == {"base": "hit", "prepare": "interrupted"}


class Unclosable(Worker):
    """A worker that does not end well."""

    def close(self):
        super().close()
        raise OSError("no process of this number")


def test_a_worker_that_does_not_end_well_leaves_no_record_open(run, store, capsys):
    run.run_node("base")
    (worker,) = run.crew._workers.values()
    worker.__class__ = Unclosable
    run.finish("failed")
    record = Store(str(store)).read_json("runs", "again", "run.json")
    assert record["status"] == "failed" and record["ended"]
    assert "OSError: no process of this number" in " ".join(capsys.readouterr().out.split())


ENDS = """
import sys
from pathlib import Path
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.recipe.retention import Retention
from rlhf.flows.report.console import ConsoleReporter
from rlhf.flows.running.closing import close
from rlhf.flows.running.session import Session
from rlhf.stages.store.artifacts import Store
place = Path(sys.argv[1])
session = Session(load_recipe("smoke", sets=[f"store={place}/store"]), ConsoleReporter(), "full")
session.record["nodes"]["sft"] = {"stage": "sft", "key": "f" * 64, "state": "failed", "error": "No space" * 500}
try:
    (place / "full").write_bytes(bytes(2**24))
except OSError:
    close(session, "failed")
    record = Store(f"{place}/store").read_json("runs", "full", "run.json")
    print(record["status"], len(record["nodes"]["sft"]["error"]))
"""


@pytest.mark.skipif(not can_mount(), reason="this machine gives no namespace of mounts")
def test_the_record_of_a_run_that_a_full_disk_ends_says_so(tmp_path):
    assert in_small_disk(tmp_path, 4, ENDS).splitlines()[-1] == "failed 4000"


def test_a_try_that_ends_early_keeps_what_the_tries_before_it_have_made_and_begun(store):
    first, place = again(store), Store(str(store))
    for node in ("base", "prepare"):
        first.run_node(node)
    begun = {"stage": "sft", "key": "0" * 64, "started": session.now(), "state": "failed", "error": "an outage"}
    first.record["nodes"]["sft"] = begun
    first.finish("failed")
    again(store).finish("interrupted")
    nodes = runs.read(place, "again")["nodes"]
    assert list(nodes) == ["base", "prepare", "sft"] and nodes["sft"]["state"] == "interrupted"
    [run] = [run for run in roots_of(place, Retention()).runs if run.name == "again"]
    made = {(a.stage, a.key, a.digest) for a in first.made.values()}
    assert made <= set(run.refs) and run.pending == {("sft", "0" * 64)}


def test_what_a_run_was_forced_to_make_and_has_is_not_made_again_by_the_same_command(store):
    first = again(store)
    first.run_node("base")
    first.record["nodes"]["base"] |= {"state": "made", "forced": True}
    first.finish("interrupted")
    for _ in range(2):
        other = again(store, force={"base"})
        assert other.run_node("base")[0] == "hit"
        other.finish("interrupted")


def test_a_process_that_counted_as_killed_leaves_the_record_to_the_try_that_went_on(store):
    cut, place = again(store), Store(str(store))
    cut.run_node("base")
    # As another host sees it whose network holds.
    silent = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=11)).isoformat()
    place.write_json(cut.record | {"process": this_process() | {"host": "other"}, "saved": silent}, *HEAD)
    other = again(store)
    other.run_node("base")
    other.finish("finished")
    whole = place.read_json(*HEAD)
    with pytest.raises(ArtifactError, match="has resumed it"):
        cut.save()
    cut.finish("failed")
    assert place.read_json(*HEAD) == whole and whole["tries"] == 2


@pytest.mark.parametrize(("seconds", "status"), [(-1.0, "killed"), (1.0, "running")])
def test_a_run_of_an_earlier_boot_has_ended_and_one_of_a_host_of_the_same_name_may_go_on(seconds, status):
    """A save since this host has booted is of another host, which may make nothing just then."""
    name, *rest = host_scope().split()
    if not rest:
        pytest.skip("this machine does not tell its boots apart")
    # As if the host had booted now: silence alone says nothing yet.
    at = datetime.datetime.now(datetime.UTC)
    assert booted() < at.timestamp()
    saved = (at + datetime.timedelta(seconds=seconds)).isoformat()
    process = {"pid": 1, "started": 0.0, "host": " ".join([name, "another-boot", *rest[1:]])}
    record = {"status": "running", "process": process, "started": at.isoformat(), "saved": saved, "nodes": {}}
    assert status_of(record, Store("memory://records"), at.timestamp()) == status


def test_a_run_that_is_refused_between_two_stages_shows_why(store, tmp_path, monkeypatch, rlhf_here, record, capsys):
    write_files(tmp_path, **{"mine_asks.py": "def f(prompts, completions, level):\n    return [0.0] * len(prompts)\n"})
    monkeypatch.syspath_prepend(tmp_path)
    sets = [f"store={store}", "rl.score.rewards={mine: {function: 'mine_asks:f'}}"]
    why = "rl.score.rewards.mine.function: mine_asks:f takes level"
    with pytest.raises(RecipeError, match=re.escape(why)):
        run_plain(load_recipe("smoke", sets=sets), name="asks")
    assert why in rlhf_here("show", "asks", "--store", store).stdout
    shown = json.loads(rlhf_here("show", "asks", "--store", store, "--json").stdout)
    assert shown["status"] == "failed" and why in shown["error"] and shown["log"] is None
    page = (store / "runs" / "asks" / "report.html").read_text()
    assert "mine_asks:f takes level" in page and "Everything came from the store" not in page
    assert "type `rlhf show asks`" in rlhf_here("logs", "asks", "--store", store, code=2).stderr
    # A part of the recipe, in which nothing is scored, is made and says what ends the whole.
    assert run_plain(load_recipe("smoke", sets=sets), name="part", only={"base", "prepare"}) == "partial"
    assert f"! a run of the whole recipe ends after prepare: {why}" in capsys.readouterr().out
    assert record(store, "part").get("error") is None


@pytest.fixture
def four_runs(tmp_path):
    """Runs `demo-a`, `demo-b` of the recipe `demo`, `smoke` of the recipe `other`, and a later part of `demo`."""
    place = Store(str(tmp_path))
    runs = {"demo-a": "demo", "smoke": "other", "demo-b": "demo", "twin-of-demo": "demo", "smoke-x": "smoke"}
    for i, (name, recipe) in enumerate(runs.items()):
        status = "partial" if name == "twin-of-demo" else "finished"
        record = {"name": name, "recipe": {"name": recipe}, "status": status, "nodes": {}}
        place.write_json(record | {"started": f"2026-01-0{i + 1}"}, "runs", name, "run.json")
    return place


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("demo-a", ["demo-a"]),
        # A run's name goes before a recipe's.
        ("smoke", ["smoke"]),
        ("demo", ["demo-b", "demo-a", "twin-of-demo"]),
        ("other", ["smoke"]),
        ("tw", ["twin-of-demo"]),
        (None, ["smoke-x", "demo-b", "smoke", "demo-a", "twin-of-demo"]),
    ],
)
def test_a_run_is_found_by_its_name_then_by_its_recipe_then_by_its_beginning_and_parts_of_recipes_are_last(
    four_runs, name, found
):
    assert [record["name"] for record in whole_first(candidates(four_runs, name))] == found


@pytest.mark.parametrize(
    ("name", "message"),
    [("dem", "several runs in .* begin with 'dem': demo-a, demo-b"), ("dmeo-a", "no run or recipe .* mean demo-a")],
)
def test_a_name_that_stands_for_no_run_or_for_several_is_refused(four_runs, name, message):
    with pytest.raises(UnknownRun, match=message):
        candidates(four_runs, name)


OF_A_RUN = '"name": "x", "started": "2026", "recipe": {}'


@pytest.mark.parametrize(
    "damage",
    [
        *("", "{", "[]", "null", '{"name": "x"}', '{"name": 1, "started": "2026"}'),
        f'{{{OF_A_RUN}, "status": "finished"}}',
        f'{{{OF_A_RUN}, "status": "running", "nodes": {{}}}}',
        f'{{{OF_A_RUN}, "status": "finished", "nodes": {{}}, "parts": 3}}',
        f'{{{OF_A_RUN}, "status": "finished", "nodes": {{}}, "parts": [[1, 0]]}}',
        f'{{{OF_A_RUN}, "status": "finished", "nodes": [], "parts": [[1, 0, 0]]}}',
    ],
)
def test_a_record_that_cannot_be_read_hides_no_other_and_is_told(four_runs, caplog, damage):
    names = [record["name"] for record in all_runs(four_runs)]
    four_runs.write_bytes(damage.encode(), "runs", "broken", "run.json")
    assert [record["name"] for record in readable_runs(four_runs)] == names
    assert candidates(four_runs, None)[0]["name"] == names[-1]
    if damage != "null":
        assert "run broken is left out" in caplog.text
        # What decides over deletion has to know all.
        with pytest.raises(ArtifactError, match="broken"):
            all_runs(four_runs)
