"""The command line as people use it: real processes on the store of a real run."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import yaml

from rlhf.flows.cli import launch
from rlhf.flows.recipe.model import Recipe
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.running.session import now
from rlhf.stages.auditing.audit import LAWS
from rlhf.stages.store.artifacts import Store
from tests.flows.commands import typed
from tests.flows.prefect_server import PROJECT
from tests.support import RLHF, free_port, write_files


def state(record: dict, *names: str) -> dict[str, str]:
    return {name: e["state"] for name, e in record["nodes"].items() if not names or name in names}


def test_the_second_run_is_all_cached_and_starts_no_worker(rlhf, store, record):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = rlhf("run", "smoke", "--no-prefect", "--name", "second", "--set", f"store={store}").stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Time of the processor: other tests run beside this one.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    second = record(store, "second")
    assert second["worker_starts"] == 0
    assert set(state(second).values()) == {"hit"}
    assert second["status"] == "finished"
    assert out.count("cached") >= 10
    first = record(store, "first")
    assert first["worker_starts"] == 1 and set(state(first).values()) == {"made"}
    assert [e["digest"] for e in first["nodes"].values()] == [e["digest"] for e in second["nodes"].values()]


def test_a_run_never_overwrites_another(rlhf_here, smoke_store):
    before = (smoke_store / "runs" / "first" / "run.json").read_bytes()
    for prefect in ([], ["--no-prefect"]):
        done = rlhf_here("run", "smoke", *prefect, "--name", "first", "--store", smoke_store, code=2)
        assert done.stdout == "" and "choose another --name" in done.stderr
        assert done.stderr.startswith("error: run first is finished") and done.stderr.count("\n") == 1
    assert (smoke_store / "runs" / "first" / "run.json").read_bytes() == before


def test_runs_and_show(rlhf_here, smoke_store):
    line = next(x for x in rlhf_here("runs", "--store", smoke_store).stdout.splitlines() if "first" in x)
    assert "finished" in line
    shown = rlhf_here("show", "first", "--store", smoke_store).stdout
    for name in ("base", "prepare", "sft", "round-001.score", "evaluate.rl", "export"):
        assert re.search(rf"^  {re.escape(name)} +made ", shown, re.MULTILINE)
    newest = rlhf_here("show", "--store", smoke_store)
    assert newest.stdout == shown and newest.stderr == "run first\n"
    assert rlhf_here("show", "first", "--store", smoke_store).stderr == ""
    assert rlhf_here("show", "smoke", "--store", smoke_store).stderr == "run first\n"
    assert Path(re.search(r"^log +(.+)$", shown, re.MULTILINE).group(1)).is_file()


@pytest.mark.slow
def test_an_audit_has_a_line_for_each_law_a_table_in_the_report_and_an_exit_status(rlhf_here, store):
    out = rlhf_here("audit", "first", "--store", store).stdout
    # The smoke run is no fork, has no baselines of ReMax, and chooses no policy.
    played = ["episodes", "tokens", "returns", "faults", "limits", "seeds"]
    without = ["fork", "greedy", *played, "choice"]
    assert re.findall(r"^  no case +(\w+)", out, re.MULTILINE) == without
    held = [law for law in LAWS if law.name not in without]
    assert len(re.findall(r"^  holds ", out, re.MULTILINE)) == len(held)
    assert "each prompt is drawn once before any is drawn again" in out
    page = (store / "runs" / "first" / "report.html").read_text()
    assert "totals are the weighted sums of the reward columns" in page

    lost = next((store / "artifacts" / "score").glob("*/manifest.json"))
    lost.unlink()
    out = rlhf_here("audit", "first", "--store", store, code=1).stdout
    assert re.search(r"^  BROKEN +artifacts .*\n +round-00\d.score with digest \w+ is missing", out, re.MULTILINE)
    assert "laws are broken: artifacts" in out


def test_an_audit_of_a_run_without_a_finished_stage_says_so(rlhf_here, smoke_store, tmp_path):
    record = json.loads((smoke_store / "runs" / "first" / "run.json").read_text())
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "run.json").write_text(json.dumps(record | {"status": "failed", "nodes": {}}))
    said = rlhf_here("audit", "first", "--store", tmp_path, code=2).stderr
    assert "run first has no finished stage to check yet" in said


def test_a_run_that_is_not_there(rlhf_here, smoke_store, tmp_path):
    assert "did you mean first?" in rlhf_here("show", "frist", "--store", smoke_store, code=2).stderr
    assert "no runs in" in rlhf_here("show", "--store", tmp_path, code=2).stderr


def test_plan_tells_what_a_run_would_do(rlhf_here, smoke_store):
    sets = ["--set", f"store={smoke_store}"]
    assert " 0 miss, 0 wait" in rlhf_here("plan", "smoke", *sets).stdout
    out = rlhf_here("plan", "smoke", *sets, "--set", "sft.optimizer.learning_rate=1e-3").stdout
    assert re.search(
        r"^miss +sft  \(nearest: run first\)\n +sft\.optimizer\.learning_rate: 0\.003 -> 0\.001$", out, re.MULTILINE
    )
    assert re.search(r"^hit +reward$", out, re.MULTILINE)
    assert "the rounds compile at most 4 programs to train and 6 to decode" in out
    assert "rows by source" in out
    assert "rows by source" not in rlhf_here("plan", "smoke", *sets, "--set", "data.sft_fraction=0.3").stdout


def test_plan_config_prints_a_recipe_that_reads_back_with_presets_and_defaults(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    engine = "{kind: vllm, version: '1', command: serve, environment: {HF_TOKEN: '***'}}"
    sets = ["rl.update={algorithm: dapo, prompts_per_step: 4}", f"rl.rollout.engine={engine}", "export=null"]
    shown = typed("plan", "smoke", "--config", *[w for s in sets for w in ("--set", s)])
    assert "HF_TOKEN: '***'" in shown.stdout and "hf_secret" not in shown.stdout
    path = tmp_path / "resolved.yaml"
    path.write_text(shown.stdout)
    resolved = load_recipe("smoke", sets=sets)
    assert load_recipe(str(path)).model_dump() == resolved.model_dump()
    values = yaml.safe_load(shown.stdout)
    assert list(values) == list(Recipe.model_fields)
    sources = ["data.sources=[{source: addition}]", "rl=null"]
    path.write_text(typed("plan", "smoke", "--config", *[w for s in sources for w in ("--set", s)]).stdout)
    assert load_recipe(str(path)).model_dump() == load_recipe("smoke", sets=sources).model_dump()
    assert values["export"] is None
    # A preset of the algorithm and a default of the stage, neither of which the recipe names.
    assert values["rl"]["update"]["clip_high"] == resolved.rl.update.clip_high != values["rl"]["update"]["clip_low"]
    assert values["sft"]["optimizer"]["beta2"] == 0.95


@pytest.mark.slow
def test_rerun_makes_one_stage_again_and_that_stage_alone(rlhf, store, record):
    # Another run that has begun meanwhile is not what is compared.
    later = record(store, "first") | {"name": "later", "started": "2999-01-01T00:00:00+00:00", "nodes": {}}
    Store(str(store)).write_json(later, "runs", "later", "run.json")
    out = rlhf("rerun", "first", "--stage", "evaluate", "--no-prefect", "--store", store).stdout
    assert "the output is the same as before" in out
    assert "+ evaluate.rl" in out
    name = next(p.name for p in (store / "runs").iterdir() if p.name not in ("first", "later"))
    again = record(store, name)
    assert again["status"] == "partial"
    assert {n for n, s in state(again).items() if s == "made"} == {"evaluate.base", "evaluate.sft", "evaluate.rl"}
    first = record(store, "first")
    assert all(e["digest"] == first["nodes"][n]["digest"] for n, e in again["nodes"].items())
    artifact = Store(str(store)).get("evaluate", again["nodes"]["evaluate.rl"]["key"])
    assert artifact.manifest["run"] == name


def test_rerun_of_a_stage_that_had_no_output_says_so(rlhf_here, store, record, monkeypatch):
    """The stage had failed: nothing is the same as before."""
    first, place = record(store, "first"), Store(str(store))
    failed = {n: e for n, e in first["nodes"].items() if not n.startswith("evaluate")}
    place.write_json(first | {"status": "failed", "nodes": failed}, "runs", "first", "run.json")

    def launch(recipe, no_prefect, name, **_):
        place.write_json(first | {"name": name}, "runs", name, "run.json")

    monkeypatch.setattr("rlhf.flows.cli.launch.launch", launch)
    out = rlhf_here("rerun", "first", "--stage", "evaluate.rl", "--store", store).stdout
    assert "evaluate.rl: new output; `rlhf run` recomputes later stages" in out and "same" not in out


def test_rerun_of_a_stage_that_the_gate_leaves_out_ends_well(rlhf_here, store, record, monkeypatch):
    first, place = record(store, "first"), Store(str(store))

    def launch(recipe, no_prefect, name, **_):
        nodes = first["nodes"] | {"export": {"stage": "export", "state": "refused"}}
        place.write_json(first | {"name": name, "nodes": nodes}, "runs", name, "run.json")

    monkeypatch.setattr("rlhf.flows.cli.launch.launch", launch)
    assert "export: new" not in rlhf_here("rerun", "first", "--stage", "export", "--store", store).stdout


@pytest.mark.parametrize("command", ["runs", "metrics", "champions", "gc", "show", "history", "verify"])
def test_a_store_that_is_not_there_is_named_and_no_empty_one(rlhf_here, tmp_path, s3, command):
    for url in (str(tmp_path / "none"), "s3://nosuchbucket/x"):
        error = rlhf_here(command, "--store", url, code=2).stderr
        assert f"error: no store at {url}: `rlhf run` creates one, in a bucket that exists; name another" in error


@pytest.mark.parametrize("command", [["runs"], ["gc"], ["plan", "smoke"], ["run", "smoke", "--no-prefect"]])
def test_a_store_that_does_not_answer_is_named_in_one_line(rlhf_here, s3, monkeypatch, command):
    from s3fs import S3FileSystem

    closed = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", closed)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    S3FileSystem.clear_instance_cache()
    try:
        error = rlhf_here(*command, "--store", "s3://bucket/x", code=2).stderr
    finally:
        S3FileSystem.clear_instance_cache()
    assert error.startswith("error: the store s3://bucket/x cannot be reached: EndpointConnectionError: ")
    assert closed in error and error.count("\n") == 1


class _Listed(BaseHTTPRequestHandler):
    """A store that lists a run, and is gone for the next request."""

    def do_HEAD(self):
        self.send_error(404)

    def do_GET(self):
        body = b"<ListBucketResult><Contents><Key>x/runs/a/run.json</Key><Size>2</Size></Contents></ListBucketResult>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.server.socket.close()

    def log_message(self, *_):
        pass


def test_a_store_that_is_lost_during_a_command_is_named_in_one_line(rlhf, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), _Listed) as server:
        for name, value in (("MAX_ATTEMPTS", "1"), ("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b")):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        error = rlhf("runs", "--store", "s3://bucket/x", code=1).stderr
    assert error.startswith("failed: EndpointConnectionError: Could not connect") and error.count("\n") == 1
    assert error.endswith("; check the network and the credentials, and repeat the command\n")


@pytest.mark.slow
def test_a_part_of_a_recipe_is_made_and_the_same_command_goes_on_with_it(rlhf, rlhf_here, store, record):
    options = ["run", "smoke", "--no-prefect", "--name", "part", "--store", store]
    out = rlhf(*options, "--only", "sft").stdout
    assert re.search(r"partial: 3 of \d+ stages; `rlhf run` of the whole recipe makes the others", out)
    part = record(store, "part")
    assert part["status"] == "partial" and list(part["nodes"]) == ["base", "prepare", "sft"]
    # The newest of all, and no default of what wants a whole run.
    assert rlhf_here("show", "--store", store).stderr == "run part\n"
    assert rlhf_here("report", "--store", store).stderr == "run first\n"
    assert re.search(r"^ *part +partial ", rlhf_here("runs", "--store", store).stdout, re.MULTILINE)

    done = rlhf(*options, "--only", "evaluate.sft,evaluate.base")
    assert "run part continues (try 2)" in done.stderr
    assert list(record(store, "part")["nodes"]) == ["base", "prepare", "sft", "evaluate.base", "evaluate.sft"]
    rlhf(*options)
    assert record(store, "part")["status"] == "finished"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["run", "smoke", "--only", "sft,x"], "no stage, round or node 'x'"),
        (["run", "smoke", "--only", "round-9"], "a round is round-000"),
        (["rerun", "first"], "--stage is missing; use one of base, prepare"),
        (["rerun", "first", "--stage", "evalute"], "no stage, round or node 'evalute'"),
    ],
)
def test_a_part_of_a_recipe_is_stages_rounds_or_nodes(rlhf_here, smoke_store, command, told):
    assert told in rlhf_here(*command, "--no-prefect", "--store", smoke_store, code=2).stderr


@pytest.mark.slow
def test_a_stage_that_fails_ends_with_status_1_and_what_was_done_is_kept(rlhf, rlhf_here, store, record):
    sets = ["--set", f"store={store}", "--set", "reward.optimizer.learning_rate=1e30", "--set", "rl=null"]
    sets += ["--set", "reward.optimizer.clip_norm=1e30"]
    done = rlhf("run", "smoke", "--no-prefect", "--name", "fails", *sets, code=1)
    assert "failed: reward: NonFinite" in done.stderr
    assert "traceback in" in done.stderr
    # It would end in the same way.
    assert "the same command" not in done.stderr
    assert "finished stages are kept and reused: change what the message names" in done.stderr
    failed = record(store, "fails")
    assert failed["status"] == "failed"
    assert state(failed, "sft", "reward") == {"sft": "hit", "reward": "failed"}
    shown = next(
        x for x in rlhf_here("show", "fails", "--store", store).stdout.splitlines() if x.startswith("  reward")
    )
    assert "NonFinite" in shown and " 0.0 s" not in shown and re.search(r"failed +\d+\.\d s", shown)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("ConnectionRefusedError('no answer')", "finished stages are kept; the same command continues"),
        ("ValueError('no such column')", "finished stages are kept and reused: change what the message names, in the"),
    ],
)
def test_the_same_command_is_advised_only_where_it_may_go_on(rlhf, tmp_path, error, advice):
    write_files(tmp_path, **{"mine.py": f"def records(seed=0):\n    raise {error}\n"})
    sets = ["--set", f"store={tmp_path / 'store'}", "--set", "data.source=mine:records"]
    done = rlhf("run", "smoke", "--no-prefect", *sets, code=1, cwd=tmp_path)
    assert error[:10] in done.stderr and done.stderr.splitlines()[-1].startswith(advice)


@pytest.mark.parametrize("place", ["/proc/x", __file__], ids=["no folder", "a file"])
def test_a_store_that_cannot_be_made_is_named_with_what_helps(rlhf_here, place):
    done = rlhf_here("run", "smoke", "--no-prefect", "--store", place, code=1)
    assert "failed: " in done.stderr and "Traceback" not in done.stderr
    assert "make the path writable or mount it, or name another store (--store), and run again" in done.stderr


def test_a_run_whose_process_is_gone_is_shown_as_killed(rlhf_here, store):
    place = Store(str(store))
    first = place.read_json("runs", "first", "run.json")
    process = subprocess.Popen(["true"])
    process.wait()
    nodes = {"sft": {"stage": "sft", "state": "running", "key": "a" * 64}}
    there = {"process": first["process"] | {"pid": process.pid}, "nodes": nodes}
    gone = first | {"name": "gone", "status": "running"} | there
    elsewhere = gone | {"name": "elsewhere", "process": first["process"] | {"host": "another"}, "saved": now()}
    for run in (gone, elsewhere):
        place.write_json(run, "runs", run["name"], "run.json")
    lines = rlhf_here("runs", "--store", store).stdout.splitlines()
    assert "killed" in next(x for x in lines if "gone" in x)
    assert "running" in next(x for x in lines if "elsewhere" in x)
    shown = rlhf_here("show", "gone", "--store", store).stdout
    assert re.search(r"^  sft +killed ", shown, re.MULTILINE) and "running" not in shown


@pytest.mark.slow
def test_verify_finds_damage_and_the_next_run_repairs_it(rlhf, store, record):
    assert ", 0 damaged" in rlhf("verify", "--store", store).stdout
    entry = record(store, "first")["nodes"]
    for name, damage in {"sft": "flip", "evaluate.sft": "manifest"}.items():
        folder = store / "artifacts" / entry[name]["stage"] / entry[name]["key"]
        if damage == "flip":
            path = folder / "model" / "model.safetensors"
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        else:
            (folder / "manifest.json").write_text('{"stage":')
    out = rlhf("verify", "--store", store, code=1).stdout
    assert "model/model.safetensors has checksum" in out
    assert "is not JSON" in out
    assert ", 2 damaged; `rlhf run` recomputes them" in out
    rlhf("run", "smoke", "--no-prefect", "--name", "repaired", "--set", f"store={store}")
    repaired = record(store, "repaired")
    assert {n for n, s in state(repaired).items() if s == "made"} == {"sft", "evaluate.sft"}
    assert {n: e["digest"] for n, e in repaired["nodes"].items()} == {n: e["digest"] for n, e in entry.items()}


def test_an_empty_store_is_not_well(rlhf_here, tmp_path):
    (tmp_path / "mount").mkdir()
    assert f"no artifacts in {tmp_path / 'mount'}" in rlhf_here("verify", "--store", tmp_path / "mount", code=2).stderr


@pytest.mark.slow
@pytest.mark.parametrize("node", ["export", "round-000.update"])
def test_chat_answers_each_line(rlhf, store, node):
    """Round 0 stores no weights: its policy is made again from its rollouts."""
    options = ["--store", store, "--node", node, "--max-tokens", "4", "--temperature", "0"]
    done = rlhf("chat", "first", *options, input="1 + 1 = ?\n2 + 2 = ?\n")
    assert done.stdout.count("\n") >= 2
    assert "Traceback" not in done.stderr
    assert ("replaying the update of round 0" in done.stderr) == (node != "export")


@pytest.mark.slow
def test_a_signal_ends_a_chat_and_leaves_nobody(smoke_store):
    process = subprocess.Popen(
        [RLHF, "chat", "first", "--store", smoke_store], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while "ends the conversation" not in (line := process.stderr.readline()):
        assert line, "it ended before it began"
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    assert process.wait(timeout=20) == -signal.SIGTERM
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_chat_with_a_node_that_is_not_there(rlhf_here, smoke_store):
    done = rlhf_here("chat", "first", "--store", smoke_store, "--node", "sfft", code=2)
    assert "run first has no finished sfft; name another --node: base, prepare" in done.stderr


@pytest.mark.slow
def test_doctor_shows_the_device_and_versions(rlhf):
    out = rlhf("doctor").stdout
    for word in ("device", "memory", "dtype", "decoding", "micro-batch", "rollout rows", "sandbox", "jax"):
        assert re.search(rf"^{word} +\S", out, re.MULTILINE), word


@pytest.mark.slow
def test_a_store_that_has_moved_is_as_good_and_may_be_named_from_the_current_folder(rlhf, store, record):
    """Records hold the address that a store had; what is in it does not depend on that."""
    store.rename(store.with_name("elsewhere"))
    options = ["--no-prefect", "--name", "moved", "--set", "store=elsewhere"]
    out = rlhf("run", "smoke", *options, cwd=store.parent).stdout
    assert record(store.with_name("elsewhere"), "moved")["worker_starts"] == 0
    assert "store elsewhere" in out
    assert "moved" in rlhf("runs", "--store", "elsewhere", cwd=store.parent).stdout


@pytest.mark.slow
def test_a_reward_function_in_the_current_folder_is_found(rlhf, store, record):
    folder = store.parent
    code = "def short(prompts, completions, **_):\n    return [-float(len(c)) for c in completions]\n"
    # None of these is imported in place of the project's or of Python's.
    traps = dict.fromkeys(("stages____init__.py", "tuning____init__.py", "random.py"), "raise SystemExit('a trap')\n")
    write_files(folder, **traps, **{"my_rewards.py": code})
    sets = ["store=store", "rl.rounds=1", "evaluate=null", "export=null"]
    sets += ["rl.score.rewards={exact: null, mine: {function: 'my_rewards:short'}}"]
    words = [w for item in sets for w in ("--set", item)]
    assert "rl.score.rewards.exact" in rlhf("plan", "smoke", *words, cwd=folder, code=2).stderr
    words[-1] = "rl.score.rewards.mine={function: 'my_rewards:short'}"
    rlhf("run", "smoke", "--no-prefect", "--name", "mine", *words, cwd=folder)
    mine = record(store, "mine")["nodes"]
    assert mine["round-000.rollout"]["state"] == "hit"
    assert mine["round-000.score"]["metrics"]["reward_mine"] < 0
    assert mine["round-000.score"]["metrics"]["failed"] == 0


def test_an_option_that_only_the_settings_refuse_is_a_usage_error(rlhf_here, smoke_store):
    done = rlhf_here("chat", "first", "--store", smoke_store, "--temperature", "inf", code=2)
    assert "--temperature" in done.stderr and "finite" in done.stderr and "pydantic" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["rl.update.algorithm", "rl.score.rewards.digits.function"])
def test_a_syntax_error_in_a_users_module_names_its_line(rlhf, smoke_store, tmp_path, setting):
    (tmp_path / "broken.py").write_text("def f(:\n")
    sets = ["--set", f"store={smoke_store}", "--set", f"{setting}=broken:f"]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = rlhf("plan", "smoke", *sets, code=2, env=env)
    assert setting in done.stderr and "broken.py, line 1" in done.stderr


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The ways in which runs were started."""
    ways = []
    run = contextlib.nullcontext(lambda recipe, **_: ways.append("prefect"))
    monkeypatch.setattr(launch, "prefect_flow", lambda: run)
    monkeypatch.setattr("rlhf.flows.running.runner.run_plain", lambda recipe, **_: ways.append("plain"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "no-profiles"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("PREFECT_PROFILES_PATH", raising=False)
    return ways


def test_a_run_that_is_cached_starts_no_private_server(smoke_store, started, monkeypatch):
    recipe = load_recipe("smoke", sets=[f"store={smoke_store}"])
    launch.launch(recipe, False)
    launch.launch(recipe, False, force={"export"})
    launch.launch(load_recipe("smoke", sets=[f"store={smoke_store}", "seed=7"]), False)
    # A configured server shows cached runs too.
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    launch.launch(recipe, False)
    monkeypatch.delenv("PREFECT_API_URL")
    monkeypatch.setenv("PREFECT_PROFILES_PATH", "/run/secrets/profiles.toml")
    launch.launch(recipe, False)
    assert started == ["plain", "prefect", "prefect", "prefect", "prefect"]


@pytest.mark.parametrize(
    ("file", "text", "way"),
    [
        ("prefect.toml", (PROJECT / "prefect.toml").read_text(), "plain"),
        ("pyproject.toml", (PROJECT / "pyproject.toml").read_text(), "plain"),
        ("prefect.toml", '[api]\nurl = "http://127.0.0.1:4200/api"\n', "prefect"),
        ("prefect.toml", 'api.url = "http://127.0.0.1:4200/api"\n', "prefect"),
        ("prefect.toml", 'profiles_path = "/run/profiles.toml"\n', "prefect"),
        ("pyproject.toml", '[tool.prefect.api]\nurl = "http://127.0.0.1:4200/api"\n', "prefect"),
        (".env", "PREFECT_API_URL=http://127.0.0.1:4200/api\n", "prefect"),
    ],
)
def test_a_server_that_a_file_names_shows_cached_runs_too(smoke_store, started, monkeypatch, tmp_path, file, text, way):
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).write_text(text)
    launch.launch(load_recipe("smoke", sets=[f"store={smoke_store}"]), False)
    assert started == [way]
