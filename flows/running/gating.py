"""What follows from a gate: which stages a run still makes, and which policy a name stands for at its end.

nothing new   no row of the data is new, or the policy is the champion: the run ends, in good order
refused       nothing is exported, and the name stays where it is
promoted      behind the last stage the name moves, if it still stands for what the policy was compared with;
              where it does not, the champion of now is evaluated and it is decided again
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rlhf.flows.graph.build import TOKENIZER, Node
from rlhf.flows.graph.keying import key_of, key_parts
from rlhf.flows.graph.policy_refs import Held, standing_of
from rlhf.flows.records import refusal_of
from rlhf.flows.running.checks import check_columns
from rlhf.flows.running.session import Session
from rlhf.stages.gate.decide import NOTHING_NEW, PROMOTED, REFUSED
from rlhf.stages.store import registry
from rlhf.stages.store.artifacts import Artifact, ArtifactError

DECISIONS = 5
"""How often a run decides where others move the name meanwhile."""


def stages_of(session: Session, chosen: Collection[str] | None = None) -> Iterator[Node]:
    """The nodes to make, one after the other: each has to be made before the next is asked for. The name moves at last.

    chosen: names of nodes that hold the inputs of each; None: all. A part of a recipe moves no name.
    Raises ArtifactError where a policy cannot be used with this base, and where the name does not come to rest.
    """
    for agenda in agendas(session, chosen):
        while (node := next(agenda.ready(), None)) is not None:
            yield node
            agenda.made(node)


def agendas(session: Session, chosen: Collection[str] | None = None) -> Iterator[Agenda]:
    """What is to make: each agenda has to be empty before the next is asked for, which there is where the name stands
    for another policy by then. Parameters and errors are those of `stages_of`."""
    for _ in range(DECISIONS):
        yield Agenda(session, chosen)
        # A part of a recipe moves no name, also where it has made every stage.
        if chosen is not None or _carried_out(session):
            return
        session.reporter.line("the champion is another by now: it is compared with that one, and decided again")
        session.rebuild(standing_of(session.recipe, session.store, session.name))
    raise ArtifactError(f"the champion was another after each of {DECISIONS} decisions: look at `rlhf champions`")


class Agenda:
    """The nodes that are still to make, and which of them can begin."""

    def __init__(self, session: Session, chosen: Collection[str] | None):
        self._session = session
        self._left = {
            node.name: place
            for place, node in enumerate(session.nodes.values())
            if node.name not in session.made and (chosen is None or node.name in chosen)
        }
        """The nodes to make, and their places in the graph's order."""
        nodes = [session.nodes[name] for name in self._left]
        self._missing = {node.name: {i.node for i in node.inputs.values()} - session.made.keys() for node in nodes}
        self._readers = defaultdict[str, list[str]](list)
        for name, missing in self._missing.items():
            for source in missing:
                self._readers[source].append(name)
        self._can = {name for name, missing in self._missing.items() if not missing}
        self._deciding = deque(node.name for node in nodes if _decides(node))
        self._over = False

    def ready(self) -> Iterator[Node]:
        """The nodes that can begin now, in the graph's order: their inputs are made, and so is what decides whether
        they are to be made at all. Those that were begun are among them until they are made."""
        if self._over:
            return
        nodes, last = self._session.nodes, len(self._session.nodes)
        if self._deciding:
            last = self._left[self._deciding[0]]
        for name in sorted(self._can, key=self._left.__getitem__):
            if self._left[name] > last:
                return
            yield nodes[name]

    def made(self, node: Node) -> None:
        """Notes that a node is made, and draws what follows from it. Raises RecipeError or ArtifactError where that is
        that the others cannot be made."""
        session = self._session
        self._remove(node)
        for reader in self._readers.pop(node.name, ()):
            self._missing[reader].discard(node.name)
            if not self._missing[reader] and reader in self._left:
                self._can.add(reader)
        match node.stage:
            case "base" if node.name == "base":
                _check_tokenizers(session)
            case "prepare":
                stages = {session.nodes[name].stage for name in self._left}
                check_columns(session.recipe, session.made[node.name].metrics, stages)
            case "fresh":
                if reason := _nothing_new(session.made[node.name]):
                    session.decide({"decision": NOTHING_NEW, "reasons": [reason], "checks": [], "difference": None})
                    self._over = True
            case "gate":
                decision = session.made[node.name].metrics
                session.decide(dict(decision))
                refusal = refusal_of(session.record)
                said = refusal and f"the gate of run {session.name} has refused this policy: {refusal}"
                registry.note_decision(session.store, decision["name"], decision["candidate"], said)
                if refusal is not None:
                    for left in [session.nodes[name] for name in self._left]:
                        if left.stage == "export":
                            _leave_out(session, left)
                            self._remove(left)

    def _remove(self, node: Node) -> None:
        del self._left[node.name]
        self._can.discard(node.name)
        if self._deciding and self._deciding[0] == node.name:
            self._deciding.popleft()


def _decides(node: Node) -> bool:
    """Whether it follows from a node if those behind it are made."""
    return node.name == "base" or node.stage in ("fresh", "gate")


def _leave_out(session: Session, node: Node) -> None:
    """Notes that a node is not made, since the gate has refused what it would be made of."""
    key = key_of(key_parts(node, session.made))
    entry = {"stage": node.stage, "key": key, "started": session.record["started"], "state": REFUSED}
    session.record["nodes"][node.name] = entry


def _nothing_new(data: Artifact) -> str | None:
    """Why there is nothing to train on; None where each part of the data has new rows."""
    empty = [part for part, rows in data.metrics["rows"].items() if not rows]
    return f"the data has no new rows for {', '.join(empty)}" if empty else None


def _check_tokenizers(session: Session) -> None:
    """Raises ArtifactError where a policy that the run starts from or compares with has another tokenizer."""
    base, standing = session.made["base"], session.standing
    for held in (standing.start, standing.champion):
        other = None if held is None else session.store.with_digest("base", held.base, held.base_digest)
        if held is None:
            continue
        if other is None or other.part_digest(TOKENIZER) != base.part_digest(TOKENIZER):
            raise ArtifactError(
                f"{held.name} (run {held.run}) has another tokenizer than base.source {session.recipe.base.source}, or "
                "its base model is gone: the two cannot be compared on the same prompts; use another name (gate.name, "
                "start_from), or that base"
            )


def _carried_out(session: Session) -> bool:
    """Moves the name where the run has decided so; False where it stands for another policy than was compared with."""
    decision, gate = session.record.get("decision"), session.recipe.gate
    whole = session.made.keys() == session.nodes.keys()
    if gate is None or decision is None or decision["decision"] != PROMOTED or not whole:
        return True
    store, seen = session.store, session.standing.champion
    current = registry.current(store, gate.name)
    ref = registry.trained_ref(store, current.policy) if current is not None else None
    if current is not None and ref is not None and ref[2] == decision["candidate"]:
        # This very run, before it was killed, or another one of the same recipe.
        session.decide(decision | {"entry": current.number})
        return True
    try:
        number = 0 if seen is None else seen.number
        entry = registry.promote(store, gate.name, _policy(session), _reason(session, decision, seen), expected=number)
    except registry.Moved:
        return False
    session.decide(decision | {"entry": entry.number})
    return True


def _policy(session: Session) -> registry.Policy:
    """The run's policy as the registry has it: its export where there is one."""
    base, trained = session.made["base"], session.made[session.nodes["gate"].inputs["policy"].node]
    node = "export" if "export" in session.made else session.nodes["gate"].inputs["policy"].node
    artifact = session.made[node]
    return registry.Policy(
        run=session.name,
        node=node,
        stage=artifact.stage,
        key=artifact.key,
        digest=artifact.digest,
        base=base.key,
        base_digest=base.digest,
        trained=trained.digest,
    )


def _reason(session: Session, decision: Mapping[str, Any], champion: Held | None) -> str:
    """The run and its figures, for the history."""
    of = "the first" if champion is None else f"over entry {champion.number} of run {champion.run}"
    said = "; ".join(check["said"] for check in decision["checks"])
    return f"run {session.name}, {of}: {said}"
