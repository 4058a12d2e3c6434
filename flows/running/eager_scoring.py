"""Start processes that score finished shards of rollouts, and give the score stage what they have scored.

A process fills a work folder that is named by the rewards, with their settings and code, and by the rollouts' key. The
journals in it are used only if no file of that code was written since the folder was begun, so they hold no value of
other code. Nothing but time depends on them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.graph.build import Node
from flows.graph.keying import code_of, key_parts
from flows.running.crew import log_of_worker
from flows.running.turns import CHECK_SECONDS
from stages.contract.fingerprint import mark_of
from stages.contract.sources import user_code
from stages.score.settings import Config
from stages.store.artifacts import Artifact
from stages.store.keys import digest
from stages.store.work import WorkFolder
from stages.worker import interpreter
from stages.worker.client import worker_environment
from stages.worker.parent_death import in_lasting_thread

if TYPE_CHECKING:
    from flows.running.session import Session

SCORE, ROLLOUTS = "score", "rollouts"
"""The stage, which is also the name of its worker, and its input."""
MARKS = "marks.json"
"""File of a folder: the marks of all code when the folder was begun."""


class EagerScoring:
    """The scoring processes of a run by the folders that they fill."""

    def __init__(self, session: Session, check_time: Callable[[], None]):
        """check_time: called each second of a wait; an exception of it ends the wait."""
        self._session, self._check_time = session, check_time
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}

    @contextlib.contextmanager
    def during(self, node: Node, key: str) -> Iterator[None]:
        """Have the finished shards of a sampling node scored; after a failure the process stays for the next try."""
        folder = None
        try:
            if (reader := self._reader(node)) is not None:
                folder = self._begin(reader, (node.stage, key))
        except Exception as e:
            self._session.reporter.line(f"{node.name}: eager scoring cannot start ({type(e).__name__}: {e})")
        yield
        if folder in self._processes:
            _end_input(self._processes[folder])

    def take_over(
        self, node: Node, parts: Mapping[str, Any], inputs: Mapping[str, Artifact], work: str | None = None
    ) -> None:
        """Move the journals of a score node into its work folder, after the calls under way have ended.

        parts: of the node's key. inputs: artifacts by node. work: the key of the work folder; None if the node has its
            artifact: the journals are removed.
        """
        if node.stage != SCORE or not inputs:
            return
        rollouts = inputs[node.inputs[ROLLOUTS].node]
        folder = self._folder(node, parts, (rollouts.stage, rollouts.key))
        if (process := self._processes.pop(folder, None)) is not None:
            self._end(node, process, at_once=work is None)
        if work is not None and folder.exists() and _read_marks(folder) == _marks(node):
            own = WorkFolder(self._session.store, SCORE, work).path
            own.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("journal-*.jsonl"):
                # A kill in the middle leaves lines twice, which are equal.
                with path.open("rb") as lines, (own / path.name).open("ab") as journal:
                    shutil.copyfileobj(lines, journal)
        shutil.rmtree(folder, ignore_errors=True)

    def end(self) -> None:
        """End the processes at once. Finished calls are kept for the next try."""
        for folder in list(self._processes):
            _kill(self._processes.pop(folder))

    def _reader(self, node: Node) -> Node | None:
        """The score node of a sampling node, if its rewards can be called before the rollouts are complete."""
        session, crew = self._session, self._session.crew
        readers = [n for n in session.nodes.values() if n.stage == SCORE and n.inputs[ROLLOUTS].node == node.name]
        # Forced or recomputed rollouts may come out as they were, with scores that exist.
        if not readers or node.name in session.force or readers[0].name in session.made:
            return None
        (reader, *_), chosen = readers, session.chosen
        # The stage's own worker, on the host of the one that samples.
        if crew.of(reader) != SCORE or crew.of(node) == SCORE or crew.is_elsewhere(reader) or crew.is_elsewhere(node):
            return None
        from stages.worker.eager_scoring import eager_rewards  # Arrow, which a run without it does not need

        assert isinstance(reader.config, Config)
        unwanted = reader.taken or reader.shared or (chosen is not None and reader.name not in chosen)
        episodes = getattr(node.config, "environment", None)
        return None if unwanted or episodes or not eager_rewards(reader.config) else reader

    def _begin(self, reader: Node, sampled: tuple[str, str]) -> Path:
        """Start the process of a score node unless it runs, and return the folder that it fills."""
        # Before the key reads the files: a later edit changes the marks.
        marks = _marks(reader)
        folder = self._folder(reader, key_parts(reader, {}, partial=True), sampled)
        if (process := self._processes.get(folder)) is not None and process.poll() is None:
            return folder
        if _read_marks(folder) != marks:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / MARKS).write_text(json.dumps(marks))
        worker = self._session.crew.here(SCORE)
        log = log_of_worker(worker.log, "eager")
        log.parent.mkdir(parents=True, exist_ok=True)
        command = interpreter.command("stages.worker.eager_scoring")

        def start() -> None:
            with log.open("ab") as out:
                env = worker_environment() | dict(worker.variables)
                self._processes[folder] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=env
                )

        in_lasting_thread(start)
        asked = {"parent": os.getpid(), "folder": str(folder), "store": self._session.recipe.store, "sampled": sampled}
        stdin = self._processes[folder].stdin
        assert stdin is not None
        stdin.write(json.dumps(asked | {"config": reader.config.model_dump(mode="json")}).encode() + b"\n")
        stdin.flush()
        return folder

    def _folder(self, node: Node, parts: Mapping[str, Any], sampled: tuple[str, str]) -> Path:
        # A forced stage begins with nothing of other runs.
        forced = self._session.name if node.name in self._session.force else ""
        named = digest({**parts, "inputs": {}, "device": "", "sampled": list(sampled), "forced": forced})
        return WorkFolder(self._session.store, SCORE, named).path

    def _end(self, node: Node, process: subprocess.Popen[bytes], at_once: bool) -> None:
        _end_input(process)
        try:
            while not at_once and process.poll() is None:
                self._check_time()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(CHECK_SECONDS)
            if ended := process.poll():
                told = f"eager scoring {interpreter.end_of(ended)}; the stage scores the rest"
                self._session.reporter.line(f"{node.name}: {told}")
        finally:
            _kill(process)


def _marks(node: Node) -> dict[str, list[int]]:
    """Marks of all files of a score node's code, and of the folders that installations write."""
    assert isinstance(node.config, Config)
    functions = {reward.function for reward in node.config.rewards.values() if ":" in reward.function}
    marks = code_of(node).marks | {p: m for name in functions for p, m in user_code(name, name).marks.items()}
    marks |= {path: mark_of(path) for path in map(sysconfig.get_path, ("purelib", "platlib"))}
    return {path: list(mark) for path, mark in marks.items()}


def _read_marks(folder: Path) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / MARKS).read_bytes())


def _end_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    _end_input(process)
