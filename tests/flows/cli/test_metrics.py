"""`rlhf metrics` tells the state of a store in Prometheus's format: on standard output, to a file, or to scrapers."""

import datetime
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client import start_http_server
from prometheus_client.parser import text_string_to_metric_families

from rlhf.flows.report import prometheus
from rlhf.flows.report.prometheus import registry_of
from rlhf.stages.store import registry
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.leases import this_process
from rlhf.stages.store.registry import Policy
from tests.flows.commands import typed
from tests.flows.report.support import Maker, recipe_of
from tests.support import RLHF, hears_ctrl_c, until


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Store:
    """Two runs of the recipe demo, of which the newer one has failed, and one that is under way."""
    folder = tmp_path_factory.mktemp("metrics")
    store = Store(str(folder / "store"))
    ended = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    first = Maker(store, recipe_of(store.url), folder, "first")
    first.run()
    first.record["ended"] = ended.isoformat()
    first.save()
    second = Maker(store, recipe_of(store.url), folder, "second")
    second.record["started"] = ended.isoformat()
    second.run(until="round-001.score", cached=("base", "prepare"))
    entry = {"stage": "sft", "key": "k" * 64, "state": "running", "started": ended.isoformat()}
    waiting = {"name": "waits", "recipe": {"name": "other"}, "status": "running", "process": this_process()}
    store.write_json(waiting | {"started": ended.isoformat(), "nodes": {"sft": entry}}, "runs", "waits", "run.json")
    return store


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by the name of a metric and its labels."""
    return {
        (s.name, *(s.labels[label] for label in sorted(s.labels))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def shown(place: Store, *options: str) -> str:
    return typed("metrics", "--store", place.url, *options).stdout


def test_runs_by_state_age_scores_seconds_hits_speed_and_bytes(place):
    found = samples(shown(place))
    assert found["rlhf_runs", "demo", "finished"] == found["rlhf_runs", "demo", "failed"] == 1
    assert found["rlhf_runs", "demo", "running"] == 0 and found["rlhf_runs", "other", "running"] == 1
    assert 3600 <= found["rlhf_seconds_since_finished", "demo"] < 3600 + 600
    assert found["rlhf_score", "rl", "demo"] == pytest.approx(33 / 40)
    # Of the newest run: 9.5 s for each of two rollouts, two of its stages cached.
    assert found["rlhf_stage_seconds", "demo", "rollout"] == pytest.approx(19.0)
    assert found["rlhf_tokens_per_second", "demo", "rollout"] == pytest.approx(517.3)
    assert 0 < found["rlhf_hit_ratio", "demo"] < 0.5
    size = sum(f["size"] for key in place.names("artifacts", "sft") for f in place.get("sft", key).manifest["files"])
    assert found["rlhf_store_bytes", "sft"] == size > 0
    assert ("rlhf_seconds_since_finished", "other") not in found


def test_a_night_without_a_new_policy_is_a_night_and_names_have_entry_and_age(place):
    """A healthy quiet week pages nobody: refused runs and runs with nothing new came to their end."""
    now = datetime.datetime.now(datetime.UTC).isoformat()
    for number, status in enumerate(("finished", "refused", "nothing new")):
        ended = {"ended": now} if status != "finished" else {"ended": "2026-01-01T00:00:00+00:00"}
        night = {"name": f"night-{number}", "recipe": {"name": "quiet"}, "status": status, "nodes": {}}
        place.write_json(night | {"started": now} | ended, "runs", night["name"], "run.json")
    policy = Policy("night-0", "export", "export", "k" * 64, "d" * 64, "b" * 64, "e" * 64, "t" * 64)
    registry.promote(place, "champion", policy, "first")
    found = samples(shown(place))
    assert found["rlhf_seconds_since_finished", "quiet"] < 600 and found["rlhf_runs", "quiet", "nothing new"] == 1
    assert found["rlhf_runs", "demo", "nothing new"] == 0
    assert found["rlhf_name_entry", "champion", "night-0"] == 1 and found["rlhf_name_seconds", "champion"] < 600


def test_a_damaged_name_takes_no_other_metric(place):
    place.write_bytes(b"{", "registry", "torn", "000001.json")
    try:
        assert "rlhf_runs{" in shown(place) and 'name="torn"' not in shown(place)
    finally:
        place.fs.rm(place.join("registry", "torn"), recursive=True)


def test_a_file_for_node_exporter_is_written_whole(place, tmp_path):
    file = tmp_path / "rlhf.prom"
    assert shown(place, "--to", str(file)) == ""
    assert samples(file.read_text()).keys() == samples(shown(place)).keys()
    assert list(tmp_path.iterdir()) == [file]


def test_a_scrape_is_answered_on_this_machine_alone_until_ctrl_c(place):
    command = [RLHF, "metrics", "--serve", "0", "--store", place.url]
    serving = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=hears_ctrl_c)
    url = serving.stderr.readline().rpartition(" on ")[2].strip()
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert samples(answer.read().decode())["rlhf_runs", "demo", "finished"] == 1
    serving.send_signal(signal.SIGINT)
    assert serving.communicate(timeout=30)[1] == "" and serving.returncode == 0


class Slow(Store):
    """A store whose reading waits to be let on."""

    def __init__(self, url):
        super().__init__(url)
        self.readers, self.gate = 0, threading.Event()

    def names(self, *parts):
        if parts == ("runs",):
            self.readers += 1
            assert self.gate.wait(60)
        return super().names(*parts)


def test_scrapes_of_a_slow_store_read_it_one_after_the_other_and_do_not_pile_up(place, monkeypatch):
    slow = Slow(place.url)
    server, thread = start_http_server(0, "127.0.0.1", registry_of(slow))

    def scrape():
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=60) as answer:
            return answer.read()

    try:
        first = threading.Thread(target=scrape)
        first.start()
        until(lambda: slow.readers == 1)
        # A scrape of a store that hangs ends with an error, and reads nothing.
        monkeypatch.setattr(prometheus, "WAIT_SECONDS", 0.0)
        with pytest.raises(urllib.error.HTTPError, match="500"):
            scrape()
        assert slow.readers == 1
        slow.gate.set()
        first.join()
        assert b"rlhf_runs" in scrape() and slow.readers == 2
    finally:
        slow.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_address_that_is_none_or_taken_is_told(place):
    serve = ("metrics", "--store", place.url, "--serve")
    assert "expected PORT or HOST:PORT" in typed(*serve, "localhost", code=2).stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "in use" in typed(*serve, taken.getsockname()[1], code=2).stderr
