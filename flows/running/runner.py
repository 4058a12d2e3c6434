"""Runs a recipe's graph: a stage begins as soon as its inputs are made and its worker is free.

A gate decides which stages a run still makes, and which policy a name has at the end (`Agenda`):

    nothing new   no row of the data is new, or the policy is the champion: the run ends without an error
    refused       nothing is exported, and the name keeps its policy
    promoted      after the last stage the name moves, if it still has the policy that the run compared with; else the
                  run fails, and the same command compares with the new champion
"""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import queue
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from rlhf.flows.graph.build import TOKENIZER, Node
from rlhf.flows.graph.keying import key_of, key_parts
from rlhf.flows.graph.policy_refs import Held, Standing
from rlhf.flows.recipe.model import Recipe
from rlhf.flows.records import refusal_of
from rlhf.flows.report.console import ConsoleReporter
from rlhf.flows.running.checks import check_columns
from rlhf.flows.running.closing import close, findings, status_after, status_at_end, summary
from rlhf.flows.running.session import Session
from rlhf.flows.running.sharing import LOOK_SECONDS, line_start
from rlhf.stages.gate.decide import NOTHING_NEW, PROMOTED, REFUSED
from rlhf.stages.store import registry
from rlhf.stages.store.artifacts import Artifact, ArtifactError


def stages_of(session: Session, chosen: Collection[str] | None = None) -> Iterator[Node]:
    """Yield the nodes to make, one after another; the caller makes each before it asks for the next.

    chosen: names of nodes, with the inputs of each; None: all. Only a run of all nodes moves the name.
    Raises ArtifactError if a policy cannot be used with this base, or if another run has moved the name meanwhile.
    """
    agenda = Agenda(session, chosen)
    while (node := next(agenda.ready(), None)) is not None:
        yield node
        agenda.made(node)
    agenda.promote()


class Agenda:
    """The nodes that are still to make."""

    def __init__(self, session: Session, chosen: Collection[str] | None):
        self._session, self._is_whole = session, chosen is None
        self._left = {
            name: node
            for name, node in session.nodes.items()
            if name not in session.made and (chosen is None or name in chosen)
        }

    def ready(self) -> Iterator[Node]:
        """Yield the nodes that can begin, in the graph's order, also those that were begun and are not made yet.

        Their inputs are made, and no node before them is left that decides whether they are made at all.
        """
        for node in self._left.values():
            if all(i.node in self._session.made for i in node.inputs.values()):
                yield node
            if _decides(node):
                return

    def made(self, node: Node) -> None:
        """Note that a node is made, and act on its result.

        Raises RecipeError or ArtifactError if the result means that the nodes after it cannot be made.
        """
        session = self._session
        del self._left[node.name]
        match node.stage:
            case "base" if node.name == "base":
                _check_tokenizers(session)
            case "prepare":
                stages = {left.stage for left in self._left.values()}
                check_columns(session.recipe, session.made[node.name].metrics, stages)
            case "fresh":
                if reason := _nothing_new(session.made[node.name]):
                    session.decide({"decision": NOTHING_NEW, "reasons": [reason], "checks": [], "difference": None})
                    self._left = {}
            case "gate":
                decision = session.made[node.name].metrics
                session.decide(dict(decision))
                refusal = refusal_of(session.record)
                said = refusal and f"the gate of run {session.name} has refused this policy: {refusal}"
                registry.note_decision(session.store, decision["name"], decision["candidate"], said)
                for left in [n for n in self._left.values() if refusal is not None and n.stage == "export"]:
                    _leave_out(session, left)
                    del self._left[left.name]

    def promote(self) -> None:
        """Move the name if the gate decided so and the run is whole.

        Raises ArtifactError if the name has another policy than the run compared with.
        """
        session = self._session
        decision, gate = session.record.get("decision"), session.recipe.gate
        whole = self._is_whole and session.made.keys() == session.nodes.keys()
        if gate is None or decision is None or decision["decision"] != PROMOTED or not whole:
            return
        store, seen = session.store, session.standing.champion
        current = registry.current(store, gate.name)
        ref = registry.trained_ref(store, current.policy) if current is not None else None
        if current is not None and ref is not None and ref[2] == decision["candidate"]:
            # By this run, before it was killed, or by another run of the same recipe.
            session.decide(decision | {"entry": current.number})
            return
        try:
            number = 0 if seen is None else seen.number
            reason = _reason(session, decision, seen)
            entry = registry.promote(store, gate.name, _policy(session), reason, expected=number)
        except registry.Moved as e:
            raise ArtifactError(
                f"{gate.name} has another policy than run {session.name} compared with: the same command compares with "
                "the new one, and reuses all other stages"
            ) from e
        session.decide(decision | {"entry": entry.number})


def _decides(node: Node) -> bool:
    """Whether a node's result determines if the nodes after it are made."""
    return node.name == "base" or node.stage in ("fresh", "gate")


def _leave_out(session: Session, node: Node) -> None:
    """Record that a node is not made because the gate refused the policy."""
    key = key_of(key_parts(node, session.made))
    entry = {"stage": node.stage, "key": key, "started": session.record["started"], "state": REFUSED}
    session.record["nodes"][node.name] = entry


def _nothing_new(data: Artifact) -> str | None:
    """The reason why there is nothing to train on; None if each part of the data has new rows."""
    empty = [part for part, rows in data.metrics["rows"].items() if not rows]
    return f"the data has no new rows for {', '.join(empty)}" if empty else None


def _check_tokenizers(session: Session) -> None:
    """Raises ArtifactError if a policy that the run starts from or compares with has another tokenizer or template."""
    base, standing = session.made["base"], session.standing
    others = {held.name: held for held in (standing.start, standing.champion) if held is not None}
    for name, held in (others | session.recipe.backfill).items():
        other = session.store.with_digest("base", held.base, held.base_digest)
        if other is None or other.part_digest(TOKENIZER) != base.part_digest(TOKENIZER):
            raise ArtifactError(
                f"{name} (run {held.run}) has another tokenizer, chat template or model than base.source "
                f"{session.recipe.base.source}, or its base model is gone: the two cannot be compared on the same "
                "prompts; use another policy (gate.name, start_from), or that base"
            )


def _policy(session: Session) -> registry.Policy:
    """The run's policy for the registry: its export if there is one."""
    trained = session.nodes["gate"].inputs["policy"].node
    node = "export" if "export" in session.made else trained
    base, artifact = session.made["base"], session.made[node]
    return registry.Policy(
        run=session.name,
        node=node,
        stage=artifact.stage,
        key=artifact.key,
        digest=artifact.digest,
        base=base.key,
        base_digest=base.digest,
        trained=session.made[trained].digest,
    )


def _reason(session: Session, decision: Mapping[str, Any], champion: Held | None) -> str:
    """The run and its figures, for the history."""
    of = "the first" if champion is None else f"over entry {champion.number} of run {champion.run}"
    said = "; ".join(check["said"] for check in decision["checks"])
    return f"run {session.name}, {of}: {said}"


Make = Callable[[str], object]
"""Makes the node of a name, and raises its error."""


def run_plain(
    recipe: Recipe,
    *,
    name: str | None = None,
    force: set[str] | None = None,
    only: set[str] | None = None,
    standing: Standing | None = None,
) -> str:
    """Run the recipe in this process and its workers, without Prefect; return the run's status.

    name: of the run; generated if None. force: nodes to recompute although they are cached.
    only: nodes to run, with the inputs of each; None runs all.
    standing: the policies of names; None: as the registry has them now.
    """
    reporter = ConsoleReporter()
    reporter.console.line_start = line_start(name)
    session = Session(recipe, reporter, name, force, standing)
    try:
        reporter.console.print(f"run {session.name}  store {session.store.shown}")
        run_stages(session, only, partial(session.run_node, retries=recipe.retries))
    except BaseException as e:
        close(session, status_after(e), e)
        raise
    status = status_at_end(session)
    summary(session, reporter, close(session, status), findings(session))
    return status


def run_stages(session: Session, chosen: Collection[str] | None, make: Make) -> None:
    """Make the nodes (`stages_of`) one after another, or concurrently on several workers.

    After an error no further stage begins, the running ones may finish, and the first error is raised. An exception in
    this thread, such as Ctrl-C, ends running stages within seconds.
    """
    session.chosen = chosen
    if session.recipe.workers is None and session.sharing is None:
        for node in stages_of(session, chosen):
            make(node.name)
        return

    def coordinate() -> None:
        agenda = Agenda(session, chosen)
        _run_overlapped(session, agenda, make)
        agenda.promote()

    interruptible(coordinate, session.stop)


def interruptible(action: Callable[[], None], stop: Callable[[], None]) -> None:
    """Run an action in another thread, and raise its error.

    After an exception in this thread, such as Ctrl-C, call `stop`, wait for the end of the action, and raise.
    """
    began, over, results = list[None](), list[None](), list[BaseException | None]()
    changed = queue.SimpleQueue[None]()

    def run() -> None:
        began.append(None)
        error: BaseException | None = None
        try:
            if not over:
                action()
        except BaseException as e:
            error = e
        results.append(error)
        changed.put(None)

    def wait_for_result() -> None:
        while not results:
            with contextlib.suppress(queue.Empty):
                changed.get(timeout=1.0)

    # Python raises signals in the main thread only. `threading` and `concurrent.futures` hold locks in Python code, and
    # an exception there would leave them locked: a second thread uses them, and this one only waits.
    try:
        _thread.start_new_thread(contextvars.copy_context().run, (run,))
        wait_for_result()
    except BaseException:
        # A thread that has not begun yet sees the mark, and begins nothing.
        over.append(None)
        stop()
        if began:
            wait_for_result()
        raise
    if (error := results[0]) is not None:
        raise error


def _run_overlapped(session: Session, agenda: Agenda, make: Make) -> None:
    at_work: dict[str, tuple[Node, Future[object]]] = {}
    """The stage of each busy worker, by the worker's name."""
    first: Exception | None = None
    sharing = session.sharing
    with ThreadPoolExecutor(len(session.crew.names), "stage") as pool:
        try:
            while True:
                elsewhere = []
                for node in agenda.ready() if first is None else ():
                    if (worker := session.crew.of(node)) in at_work:
                        continue
                    if sharing is None or sharing.take(session.name, node):
                        at_work[worker] = node, pool.submit(contextvars.copy_context().run, make, node.name)
                    else:
                        elsewhere.append(node)
                if not at_work and sharing is not None and elsewhere:
                    session.rest(elsewhere)
                    continue
                if not at_work:
                    break
                done, _ = wait([future for _, future in at_work.values()], LOOK_SECONDS, FIRST_COMPLETED)
                for worker in [name for name, (_, future) in at_work.items() if future in done]:
                    node, future = at_work.pop(worker)
                    if sharing is not None:
                        sharing.end(session.name, node)
                    try:
                        future.result()
                        agenda.made(node)
                    except Exception as e:
                        if first is not None:
                            session.line(str(e))
                        elif at_work:
                            others = " and ".join(other.name for other, _ in at_work.values())
                            session.line(f"{e}\n  no further stage begins; running stages may finish: {others}")
                        first = first or e
        except BaseException:
            session.stop()
            raise
    if first is not None:
        raise first
