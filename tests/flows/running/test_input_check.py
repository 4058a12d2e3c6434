"""What a stage reads is whole: a damaged input is made again, by one thread, and keys follow what it is then."""

import contextlib
import shutil
import threading
import time
import types

import pytest

from rlhf.flows.running import crew
from rlhf.flows.running.session import InputCheck, Session
from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.worker.client import StageFailed
from tests.flows.lines import Lines
from tests.flows.running.support import ALL, recipe


@pytest.mark.slow
def test_a_key_and_its_request_have_the_inputs_of_one_moment(tmp_path, smoke_store, monkeypatch):
    """Another thread makes a damaged input again, with other content, while this one waits to look at it."""
    shutil.copytree(smoke_store, tmp_path / "store")
    session = Session(recipe(tmp_path, *ALL), Lines(), "told")
    for name in ("base", "prepare"):
        session.run_node(name)
    session.force = {"sft", "evaluate.base"}
    base = session.made["base"]
    files = [file | {"sha256": "0" * 64} for file in base.manifest["files"]]
    other = Artifact(session.store, base.manifest | {"files": files, "digest": "0" * 64})
    mending, requests = threading.Event(), []
    real = session._make_or_read

    def made_or_read(name, begun):
        if name != "base":
            return real(name, begun)
        mending.set()
        time.sleep(1.0)
        # Of other bits than before.
        session.made["base"] = other
        return "made", other

    def run(self, node, request, *_):
        requests.append((node.name, request.key_parts["inputs"], request.inputs))
        raise StageFailed(node.name)

    monkeypatch.setattr(session, "_make_or_read", made_or_read)
    monkeypatch.setattr(session.store, "verify", lambda a: "flipped" if a.digest == base.digest else None)
    monkeypatch.setattr("rlhf.flows.running.session.set_aside", lambda *_: "aside")
    monkeypatch.setattr(crew.Crew, "run", run)
    threads = [threading.Thread(target=_run_node, args=(session, name)) for name in ("sft", "evaluate.base")]
    threads[0].start()
    assert mending.wait(20)
    threads[1].start()
    for thread in threads:
        thread.join(30)
    assert sorted(name for name, *_ in requests) == ["evaluate.base", "sft"]
    artifacts = {a.digest: a for a in (base, other)}
    for name, parts, inputs in requests:
        node = session.nodes[name]
        for role, (_, _, digest) in inputs.items():
            artifact = artifacts.get(digest) or session.made[node.inputs[role].node]
            assert parts[role] == artifact.part_digest(node.inputs[role].parts), (name, role)


def _run_node(session: Session, name: str) -> None:
    with contextlib.suppress(StageFailed):
        session.run_node(name)


class Disk:
    """A store whose artifacts take their time to be read, and of which one is damaged."""

    is_local = True

    def __init__(self, damaged: str = ""):
        self.damaged, self.read = damaged, list[str]()
        self.may_end = {"a": threading.Event(), "b": threading.Event()}

    def verify(self, artifact):
        self.read.append(artifact.digest)
        assert self.may_end[artifact.digest].wait(20)
        return "flipped" if artifact.digest == self.damaged else None


def look(looks, artifact, made, again=lambda: None):
    thread = threading.Thread(target=looks.ensure, args=["n", artifact, lambda: made, again], daemon=True)
    thread.start()
    return thread


def artifact(digest):
    return types.SimpleNamespace(digest=digest, stage="base", key="k", url="u")


def test_a_look_at_one_artifact_waits_for_no_look_at_another():
    disk, told = Disk(), list[str]()
    looks = InputCheck(disk, told.append, lambda: None)
    slow = look(looks, artifact("a"), {"n": artifact("a")})
    disk.may_end["b"].set()
    fast = look(looks, artifact("b"), {"n": artifact("b")})
    fast.join(20)
    assert not fast.is_alive() and slow.is_alive()
    disk.may_end["a"].set()
    slow.join(20)
    assert sorted(disk.read) == ["a", "b"] and told == []


def test_two_threads_that_find_the_same_damage_make_it_again_once_and_a_stopped_one_waits_no_more(monkeypatch):
    disk, made, told = Disk("a"), {"n": artifact("a")}, list[str]()
    times, ends = list[int](), list[bool]()

    def check() -> None:
        if ends:
            raise KeyboardInterrupt

    def again() -> None:
        times.append(1)
        made["n"] = artifact("c")

    looks = InputCheck(disk, told.append, check)
    monkeypatch.setattr("rlhf.flows.running.session.set_aside", lambda *_: "aside")
    first, second = (look(looks, artifact("a"), made, again) for _ in range(2))
    disk.may_end["a"].set()
    for thread in (first, second):
        thread.join(20)
        assert not thread.is_alive()
    assert times == [1] and len(told) == 1 and "aside" in told[0]
    disk.may_end["b"].clear()
    look(looks, artifact("b"), {"n": artifact("b")})
    ends.append(True)
    with pytest.raises(KeyboardInterrupt):
        looks.ensure("n", artifact("b"), lambda: {"n": artifact("b")}, again)
    disk.may_end["b"].set()
