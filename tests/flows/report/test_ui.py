"""The pages of `rlhf ui`: every link is answered, nothing is written, and no other site can ask."""

import json
import re
import subprocess
from urllib.parse import urljoin, urlsplit

import pytest
from starlette.testclient import TestClient

from rlhf.flows.report.ui import make_app, placed
from rlhf.stages.store import registry
from rlhf.stages.store.artifacts import Store
from tests.browser import browse
from tests.flows.report.support import HOSTILE, Maker, Page, recipe_of
from tests.support import RLHF

ORIGIN = "http://127.0.0.1"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A finished run with a promoted policy, a failed one, and a sweep whose second run has not begun."""
    folder = tmp_path_factory.mktemp("ui")
    store = Store(str(folder / "store"))
    first = Maker(store, recipe_of(store.url, seed=1), folder, "demo-1.1").run()
    later = Maker(store, recipe_of(store.url, seed=2), folder, "failed")
    later.record["started"] = "2026-03-02T09:30:00+00:00"
    later.run(until="round-002.update", error=HOSTILE)
    setting = {"values": {"seed": HOSTILE}, "nodes": ["evaluate.rl"], "runs": ["demo-1.1"]}
    settings = [setting, setting | {"runs": ["demo-1.2"]}]
    sweep = {"name": "demo-1", "recipe": "demo", "started": "2026-11-29T10:00:00+00:00", "settings": settings}
    sweep |= {"axes": {"seed": ["1", HOSTILE]}, "runs": ["demo-1.1", "demo-1.2"], "stages": 60, "different": 40}
    store.write_json(sweep, "sweeps", "demo-1", "sweep.json")
    base, policy = first["nodes"]["base"], first["nodes"]["round-007.update"]
    of = registry.Policy(
        "demo-1.1", "round-007.update", policy["stage"], policy["key"], policy["digest"],
        base["key"], base["digest"], policy["digest"],
    )  # fmt: skip
    registry.promote(store, "champion", of, "", forced=False)
    return store


@pytest.fixture(scope="module")
def ui(store):
    return TestClient(make_app(store), base_url=ORIGIN)


def page(ui, path):
    return Page(ui.get(path).raise_for_status().text)


def test_the_first_page_has_names_runs_and_sweeps(ui):
    found = page(ui, "/")
    assert {"names", "runs", "sweeps"} <= set(found.ids)
    for words in ("champion", "demo-1.1", "failed", "Sweeps", "0.825"):
        assert words in found.text


def test_every_link_is_answered_without_scripts_or_writing(ui, store):
    before = sorted(store.fs.find(store.root))
    left, seen = ["/"], {}
    while left:
        path = left.pop()
        answer = ui.get(path)
        assert answer.status_code == (404 if "demo-1.2" in path else 200), (path, answer.text[-500:])
        assert "script" not in Page(answer.text).tags and "default-src 'none'" in answer.text
        seen[path] = answer
        # A form asks for the comparison.
        links = [urljoin(path, link) for link in re.findall(r'href="([^"#]*)', answer.text) if link != "data:,"]
        links += ["/compare.html?first=demo-1.1&second=failed"]
        left += [link for link in dict.fromkeys(links) if link not in {*seen, *left} and not urlsplit(link).scheme]
    kinds = {urlsplit(path).path.split("/")[1] for path in seen}
    assert kinds == {"", "runs", "sweeps", "artifacts", "compare.html"}
    assert sorted(store.fs.find(store.root)) == before


def test_lineage_reaches_the_base_through_all_runs(ui, store):
    rows = page(ui, "/runs/demo-1.1/lineage.html").text
    assert "never made" in rows and "round-000.rollout" in rows
    why = page(ui, "/runs/failed/lineage.html").text
    assert "seed: another, which follows from the recipe's `seed`" in why
    key = store.read_json("runs", "demo-1.1", "run.json")["nodes"]["export"]["key"]
    found = page(ui, f"/artifacts/export/{key}.html").text
    for words in ("update/", "rollout/", "prepare/", "base/", "Runs with it demo-1.1 (export)"):
        assert words in found


def test_the_graph_has_a_column_for_each_step_and_a_line_for_each_stage(ui):
    ways = {"base": [], "evaluate.a": ["base"], "evaluate.b": ["base"], "sft": ["base", "gone"], "evaluate": ["sft"]}
    found = placed([{"name": n, "stage": n.partition(".")[0], "inputs": inputs} for n, inputs in ways.items()])
    assert found["places"] == {
        "base": (0, 0),
        "evaluate.a": (1, 1),
        "evaluate.b": (1, 2),
        "evaluate": (2, 1),
        "sft": (1, 3),
    }
    assert (found["lines"], found["width"], found["height"]) == ({"base": 0, "evaluate": 1, "sft": 3}, 3, 4)
    drawn = ui.get("/runs/failed/lineage.html").text
    assert drawn.count("<circle") == len(re.findall("<tr id=", drawn)) and "seed: another" in drawn.split("</svg>")[0]


def test_a_page_reads_the_records_that_changed(ui, store, monkeypatch):
    ui.get("/")
    read = []
    monkeypatch.setattr("rlhf.flows.records.runs.read", lambda _, name: read.append(name) or record)
    assert ui.get("/").status_code == 200 and read == []
    record = store.read_json("runs", "failed", "run.json") | {"host": "another"}
    store.write_json(record, "runs", "failed", "run.json")
    assert ui.get("/").status_code == 200 and read == ["failed"]


def test_two_runs_are_compared(ui):
    found = page(ui, "/compare.html?first=demo-1.1&second=failed").text
    assert "seed: 1 -> 2" in found and "demo-1.1" in found


def test_a_store_that_fails_is_no_missing_page(ui, store, monkeypatch):
    monkeypatch.setattr("rlhf.flows.report.ui.registry.names", lambda _: (_ for _ in ()).throw(OSError("away")))
    answer = ui.get("/")
    assert answer.status_code == 503 and "OSError: away" in Page(answer.text).text
    sweep = store.read_json("sweeps", "demo-1", "sweep.json")
    store.write_bytes(json.dumps(sweep | {"recipe": "half a pair \ud83d"}).encode(), "sweeps", "demo-1", "sweep.json")
    assert ui.get("/sweeps/demo-1/report.html").status_code == 200


@pytest.mark.parametrize("path", ["/runs/no/report.html", "/artifacts/sft/..%2F..%2Fetc.html", "/compare.html", "/x"])
def test_unknown_pages_are_not_found(ui, path):
    assert ui.get(path).status_code == 404


def test_other_hosts_names_and_methods_are_refused(ui):
    assert ui.get("/", headers={"Host": "evil.example"}).status_code == 400
    assert ui.post("/").status_code == 405


@pytest.mark.slow
def test_a_browser_shows_a_page_of_the_command(store):
    command = [RLHF, "ui", "--store", store.root, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            [url] = re.findall(r"http://127.0.0.1:\d+", server.stderr.readline())
            text = browse(f"{url}/runs/demo-1.1/lineage.html", "--dump-dom")
            assert "round-007.update" in text and "Why it ran" in text
        finally:
            server.terminate()
