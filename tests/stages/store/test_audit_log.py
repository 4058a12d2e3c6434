"""The trail of a store only grows, says who did what with which code, and holds no secrets."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.audit_log import append, checkout, events, without_secrets
from tests.support import write_files


@pytest.mark.parametrize("root", ["folder", "memory://trail"])
def test_changes_of_many_at_once_are_all_there_in_their_order(tmp_path, root):
    store = Store(str(tmp_path) if root == "folder" else root)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: append(store, "run", run=f"r{i}"), range(8)))
    assert append(store, "pin", run="last") is None
    found = events(store)
    assert sorted(e["run"] for e in found) == sorted([*(f"r{i}" for i in range(8)), "last"])
    assert [e["at"] for e in found] == sorted(e["at"] for e in found) and found[-1]["run"] == "last"
    assert all("@" in e["by"] and e["command"] and {"commit", "dirty"} <= set(e) for e in found)


def test_a_long_change_is_told_by_its_end_or_else_by_its_beginning(tmp_path):
    store = Store(str(tmp_path))
    append(store, "gc", state="begun", change="a")
    append(store, "gc", state="begun", change="b")
    append(store, "gc", state="finished", change="b")
    assert [(e["change"], e["state"]) for e in events(store)] == [("a", "begun"), ("b", "finished")]
    # Of a version before: one object, written twice.
    write_files(tmp_path, **{"trail__20200101T000000-0.json": '{"at": "2020-01-01", "what": "gc", "state": "begun"}'})
    write_files(tmp_path, **{"trail__broken.json": "{", "trail__other.json": "[]"})
    assert [e["at"][:4] for e in events(store)] == ["2020"] + [e["at"][:4] for e in events(store)][1:]
    assert len(events(store)) == 3


def test_the_newest_changes_are_read_without_the_others(tmp_path, monkeypatch):
    store = Store(str(tmp_path))
    append(store, "gc", state="begun", change="a")
    for number in range(30):
        append(store, "pin", run=f"r{number}")
    append(store, "gc", state="finished", change="a")
    whole = events(store)

    monkeypatch.setattr(store, "read_json", reads := Mock(wraps=store.read_json))
    assert events(store, 4) == whole[-4:] and reads.call_count == 4
    # Its beginning does not count.
    assert events(store, 31) == whole and len(whole) == 31


def test_a_trail_that_cannot_be_written_is_said_and_raises_nothing(tmp_path):
    write_files(tmp_path, trail="a file where the folder has to be")
    assert "trail cannot be written (" in str(append(Store(str(tmp_path)), "run"))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/opt/bin/rlhf", "run", "smoke", "--set", "seed=1"], "rlhf run smoke --set seed=1"),
        (["rlhf", "runs", "--store", "s3://user:word@host/x"], "rlhf runs --store s3://host/x"),
        (["rlhf", "serve", "--api-key", "word"], "rlhf serve --api-key ***"),
        (["rlhf", "serve", "--api-key=word"], "rlhf serve --api-key=***"),
        (["x", "--set", "data.source_args.api_token=word"], "x --set data.source_args.api_token=***"),
        (["x", "--set", "rl.rollout.engine.environment.HOME=word"], "x --set rl.rollout.engine.environment.HOME=***"),
        (["x", "--set", "a={judge: {password: word, n: 2}}"], "x --set a=***"),
        (["x", "--set", 'data.source_args={"token": "word"}'], "x --set data.source_args=***"),
        (["x", "--set", "a= {token: {of: [word, b]}}"], "x --set a=***"),
        (["x", "--set", "a={agent: [prog, --api-key, word]}"], "x --set a=***"),
        (["x", "--set=a=[prog, --api-key=word, b]"], "x --set=a=***"),
        (["x", "--set", 'a=["prog","--token","word"]'], "x --set a=***"),
        (["x", "--set", "a=['--secret', 'word']"], "x --set a=***"),
        (["x", "--set", 'a=[["password", "word"]]'], "x --set a=***"),
        (["x", "--set", "a={headers: {x: bearer word}}"], "x --set a=***"),
        (["x", "--header", "Authorization: Token word"], "x --header ***"),
        (["x", "--set", "a.password=two words"], "x --set a.password=***"),
        (["x", "--set", "a={tokens: [1, 2], max_tokens: 9000}"], "x --set 'a={tokens: [1, 2], max_tokens: 9000}'"),
        (["x", "--reason", "two words"], "x --reason 'two words'"),
    ],
)  # fmt: skip
def test_a_command_line_is_kept_without_secrets(words, shown):
    assert without_secrets(words) == shown


def test_the_commit_of_a_checkout_and_whether_files_differ_from_it(tmp_path):
    assert checkout(tmp_path) == {"commit": None, "dirty": None}

    def git(*arguments):
        who = ["-c", "user.name=x", "-c", "user.email=x@y"]
        return subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True, text=True)

    git("init", "-q")
    write_files(tmp_path, a="1")
    git("add", "a")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD").stdout.strip()
    assert checkout(tmp_path) == {"commit": commit, "dirty": False}
    # Files that git does not know, such as a recipe or a store in the folder, are none of the commit's.
    write_files(tmp_path, b="1")
    assert checkout(tmp_path) == {"commit": commit, "dirty": False}
    write_files(tmp_path, a="2")
    assert checkout(tmp_path) == {"commit": commit, "dirty": True}


def test_the_command_of_a_person_stands_for_that_of_the_process_it_starts(tmp_path):
    """A deployment's run is a process of Prefect, which nobody typed."""
    store = Store(str(tmp_path))
    append(store, "run", run="x", command="prefect deployment run rlhf-pipeline/default")
    append(store, "run", run="y")
    typed, own = [event["command"] for event in events(store)]
    assert typed == "prefect deployment run rlhf-pipeline/default" and own and "deployment" not in own
