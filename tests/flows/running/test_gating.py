"""A name moves by a decision about the entry that it is at, made by a run of all stages, which goes on as it began."""

import json

import pytest

from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.running.runner import stages_of
from rlhf.flows.running.session import Session
from rlhf.stages.store import registry
from rlhf.stages.store.artifacts import ArtifactError
from rlhf.stages.store.registry import Policy
from tests.flows.lines import Lines
from tests.stages.gate.support import Lab

DECISION = {"decision": "promoted", "reasons": [], "checks": [], "difference": None}


class Night(Lab):
    """A run whose stages are made, all but the gate."""

    def __init__(self, folder):
        super().__init__(folder)
        self.base, data = self.commit("base", {"config.json": "{}"}), self.data(2)
        self.one, self.two, self.new = (self.policy(name, data) for name in ("one", "two", "new"))

    def promote(self, run, policy):
        of = Policy(run, "sft", policy.stage, policy.key, policy.digest, self.base.key, self.base.digest)
        return registry.promote(self.store, "champion", of, "by hand")

    def session(self, name, *sets):
        of = [f"store={self.store.url}", "gate.first=promote", "export=null", *sets]
        return Session(load_recipe("smoke", sets=of), Lines(), name)

    def made(self, session):
        """Gives a run its stages."""
        for name, node in session.nodes.items():
            if name != "gate":
                session.made[name] = self.base if name == "base" else self.new
                session.record["nodes"][name] = {"stage": node.stage, "state": "made"}
        return session

    def decides(self, session):
        """The gate of a run promotes its policy."""
        session.made["gate"] = self.commit("gate", {"of": json.dumps(session.name)}, metrics=self.decision())
        session.record["nodes"]["gate"] = {"stage": "gate", "state": "made"}

    def decision(self):
        return DECISION | {"name": "champion", "candidate": self.new.digest, "champion": self.one.digest}

    def champion(self):
        entry = registry.current(self.store, "champion")
        return None if entry is None else (entry.number, entry.policy.run)


@pytest.fixture
def night(tmp_path):
    return Night(tmp_path)


@pytest.mark.parametrize("by_hand", [("other", "before"), ("late",)], ids=["another entry", "its own policy"])
def test_a_name_that_moved_meanwhile_ends_the_run_and_the_same_command_decides_again(night, by_hand):
    night.promote("before", night.one)
    session, asked = night.made(night.session("late")), []
    with pytest.raises(ArtifactError, match="champion has another policy than run late compared with"):
        for node in stages_of(session):
            asked.append(node.name)
            for run in by_hand:
                night.promote(run, night.one if run == "before" else night.two)
            night.decides(session)
    assert asked == ["gate"]
    session.finish("failed")
    again = night.made(night.session("late"))
    for node in stages_of(again):
        asked.append(node.name)
        night.decides(again)
    number = 2 + len(by_hand)
    assert asked == ["gate", "gate"] and night.champion() == (number, "late")
    assert again.record["decision"]["entry"] == number and again.standing.champion.number == number - 1
    again.finish("finished")


def test_a_part_of_a_recipe_moves_no_name_also_where_it_has_made_every_stage(night):
    session = night.made(night.session("part"))
    for _ in stages_of(session, set(session.nodes)):
        night.decides(session)
    assert session.record["decision"]["decision"] == "promoted" and session.made.keys() == session.nodes.keys()
    assert night.champion() is None
    # The same command without them is whole.
    for _ in stages_of(session):
        night.decides(session)
    assert night.champion() == (1, "part")
    session.finish("finished")


def test_a_first_night_that_was_killed_behind_its_promotion_goes_on_as_it_began(night):
    sets = ("start_from=champion", "data.new_since=champion")
    first = night.session("first", *sets)
    first.decide(night.decision())
    first.finish("interrupted")
    night.promote("first", night.new)
    again = night.session("first", *sets)
    assert again.record["tries"] == 2 and again.standing == first.standing and list(again.nodes) == list(first.nodes)
    again.finish("interrupted")
    # Also where the try after it ends before its gate.
    third = night.session("first", *sets)
    assert third.record["tries"] == 3 and third.standing == first.standing
    third.finish("interrupted")
    # The next night starts from it.
    second = night.session("second", *sets)
    assert second.standing.start.run == "first" and {"start", "fresh"} <= second.nodes.keys()
    second.finish("interrupted")


def test_the_refusal_of_a_gate_outlives_its_run(night):
    night.promote("before", night.one)
    session = night.made(night.session("refused"))
    asked = iter(stages_of(session))
    next(asked)
    refused = night.decision() | {"decision": "refused", "reasons": ["score -0.2", "too long"]}
    session.made["gate"] = night.commit("gate", {"of": "{}"}, metrics=refused)
    assert list(asked) == []
    session.finish("refused")
    night.store.remove_folder(night.store.join("runs", "refused"))
    said = "the gate of run refused has refused this policy: score -0.2; too long"
    assert registry.refusal_of(night.store, "champion", night.new.digest) == said
    assert registry.refusal_of(night.store, "other", night.new.digest) is None
    assert registry.names(night.store) == ["champion"] and night.champion() == (1, "before")
    # A later run may decide otherwise.
    session = night.made(night.session("later"))
    for _ in stages_of(session):
        night.decides(session)
    assert night.champion() == (2, "later") and registry.refusal_of(night.store, "champion", night.new.digest) is None
    session.finish("finished")
