"""An environment's process costs at most its own episode (what processes do: `tests/tuning/parallel`)."""

import dataclasses
import itertools
import json
import re
import time

import numpy as np
import pytest

from rlhf.tuning.agents.contract import Fault, Observed, Spec, Task
from rlhf.tuning.agents.play import Player
from rlhf.tuning.agents.processes import EnvironmentRefused, Environments, state
from rlhf.tuning.agents.trajectory import Episode, Rules, completion_rows
from rlhf.tuning.chat.renderer import Renderer
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.requests import Sampling
from rlhf.tuning.rows import PromptRow
from tests.tuning.rollout.engine.support import EOS, PARAMS
from tests.tuning.tiny import CONFIG

OWN = "tests.tuning.agents.own_environments"
LIMITS = {"reset_seconds": 20.0, "step_seconds": 20.0, "megabytes": 256}


def rooms(spec, **limits):
    return Environments(dataclasses.replace(spec, **LIMITS | limits))


def gathered(environments, keys):
    """The answers of some episodes."""
    found = {}
    while set(found) < set(keys):
        found.update(environments.poll(60.0))
    return found


def one(environments, key="one"):
    return gathered(environments, [key])[key]


@pytest.fixture(scope="module")
def faulty():
    with rooms(Spec(f"{OWN}:Faulty")) as environments:
        yield environments


@pytest.fixture
def begun(faulty):
    """An episode that has answered its reset."""
    faulty.open("one", Task(1))
    assert isinstance(one(faulty), Observed)
    yield faulty
    faulty.discard("one")


def test_an_episode_alone_equals_the_same_one_among_others():
    """Its environment draws from the global generators."""

    def transcript(answers):
        return [(a.observation, a.reward, a.terminated, dict(a.info)) for a in answers[7]]

    with rooms(Spec(f"{OWN}:Dice")) as environments:
        alone, among = {7: []}, {seed: [] for seed in range(31)}
        for answers in (alone, among):
            for seed in answers:
                environments.open(seed, Task(seed))
            for turn in range(3):
                for key, answer in gathered(environments, answers).items():
                    assert isinstance(answer, Observed), answer
                    answers[key].append(answer)
                for key in reversed(list(answers)):
                    if turn < 2:
                        environments.step(key, f"throw {turn}")
            for seed in answers:
                environments.discard(seed)
        assert transcript(alone) == transcript(among)
        assert len({a[0].observation for a in among.values()}) > 20
        assert alone[7][0].reward is None and alone[7][0].info == {"state": [7]}


@pytest.mark.parametrize(
    "action, kind, reason",
    [
        ("raise", "error", r"step 1: RuntimeError: no such room \(own_environments.py:\d+\)"),
        ("nan", "error", "step 1: ValueError: the reward is nan: expected a finite number"),
        ("tuple", "error", "Faulty.step returned a tuple of 2: expected .observation, reward, terminated"),
        ("exit", "crash", "step 1: the process ended: status 3"),
    ],
)
def test_a_failing_step_is_a_fault_that_says_why(begun, action, kind, reason):
    begun.step("one", action)
    fault = one(begun)
    assert isinstance(fault, Fault) and fault.kind == kind and re.search(reason, fault.message), fault
    # The episode is over, its key free, and others go on.
    begun.open("one", Task(1))
    assert isinstance(one(begun), Observed)


def test_reset_and_step_have_limits_of_their_own():
    with rooms(Spec(f"{OWN}:Faulty"), step_seconds=0.15) as environments:
        environments.open("one", Task(1))
        one(environments)
        environments.step("one", "spin in c")
        fault = one(environments)
        assert fault.kind == "timeout" and fault.message == "step 1: no answer within 0.15 s" and fault.seconds >= 0.15
    with rooms(Spec(f"{OWN}:Faulty", {"at_reset": "sleep"}), reset_seconds=0.2) as environments:
        environments.open("one", Task(1))
        assert one(environments).message == "reset: no answer within 0.2 s"


def test_an_environment_is_closed_after_its_own_end(tmp_path):
    with rooms(Spec(f"{OWN}:Faulty", {"closed": str(tmp_path / "closed")})) as environments:
        environments.open("one", Task(1))
        one(environments)
        environments.step("one", "end")
        assert one(environments).terminated
        environments.discard("one")
        # Started after the other has ended, or closed.
        while not (tmp_path / "closed").exists():
            environments.poll(0.05)


def test_a_cut_episode_is_asked_for_its_last_reward():
    spec = Spec(f"{OWN}:Counter", tools=[f"{OWN}:stall"], tool_seconds=0.1)
    with rooms(spec) as environments:
        assert [s["function"]["name"] for s in environments.schemas()] == ["add", "wait", "stall"]
        environments.open("one", Task(1, {"start": 3}))
        first = one(environments)
        assert first.observation == "\nThe counter is at 3." and first.info == {"joins_prompt": True}
        calls = [{"name": "stall", "arguments": {"seconds": 60}}, {"name": "add", "arguments": {"amount": 2}}]
        environments.step("one", "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls))
        assert [m["content"] for m in one(environments).observation] == [
            "error: stall took longer than 0.1 s",
            "The counter is at 5.",
        ]
        environments.finish("one")
        last = one(environments)
        assert (last.observation, last.reward, last.terminated, last.truncated) == (None, 0.5, False, True)
    broken = Spec(f"{OWN}:Counter", tools=[f"{OWN}:untold"])
    with rooms(broken) as environments, pytest.raises(EnvironmentRefused, match="tool untold: no doc"):
        environments.schemas()


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec, reason",
    [
        (Spec(f"{OWN}:Absent"), "has no attribute 'Absent'"),
        (Spec("tests.tuning.agents.none_there:Class"), "No module named"),
        (Spec(), "no environment and no tools"),
        (Spec(tools=["calculater"]), "did you mean calculator?"),
    ],
)
def test_an_unknown_environment_is_refused_with_its_reason(spec, reason):
    with rooms(spec) as environments, pytest.raises(EnvironmentRefused, match=reason):
        environments.open("one", Task(1))


def test_tools_may_not_be_slower_than_a_step():
    with pytest.raises(ValueError, match="expected the longer one for the step"):
        rooms(Spec(tools=["calculator"], tool_seconds=30.0))


def test_answers_at_the_edge_of_the_contract_are_made_whole_or_are_errors_of_the_environment():
    with rooms(Spec(f"{OWN}:Odd")) as environments:
        names = ["surrogate", "parts", "one", "real", "numpy", "assistant", "none", "image", "word", "many"]
        for name in names:
            environments.open(name, Task(1))
        opened = gathered(environments, names)
        assert opened["one"].observation[1] == {"role": "assistant", "content": "two"}
        for name in names:
            environments.step(name, name)
        found = gathered(environments, names)
    assert found["surrogate"].observation == "file ?.txt" and found["surrogate"].info["state"] == {"name ?": "x"}
    assert found["parts"].observation == [{"role": "user", "content": "ab"}]
    assert [found[n].info["success"] for n in ("one", "real", "numpy", "parts")] == [True, False, True, None]
    for name, reason in {
        "assistant": "message 1 .* role 'assistant'",
        "none": "content of type NoneType: expected text",
        "image": "content of type list",
        "word": "success.* is 'yes': expected true or false",
        "many": "success.* is 2: expected",
    }.items():
        assert found[name].kind == "error" and re.search(reason, found[name].message), found[name].message


class Board:
    pass


class Named:
    def __str__(self):
        return "x.o"


def test_a_state_is_equal_where_the_environment_is_in_an_equal_state():
    given = {"at": np.int64(3), "cells": np.zeros(2), "seen": {2, 1}, "board": Named()}
    assert state(given) == {"at": 3, "cells": [0.0, 0.0], "seen": [1, 2], "board": "x.o"}
    # By its type's name all states would be the same one.
    with pytest.raises(TypeError, match=r'info\["state"\] holds an object of type Board, which has no text'):
        state({"board": Board()})


SLOTS = 2


class Ids:
    """Words in the ids of the tests' small model."""

    def __init__(self):
        self._words = Renderer(byte_tokenizer())
        self.messages, self.cut = self._words.messages, self._words.cut

    def first(self, messages):
        return [i % CONFIG.vocab_size for i in self._words.first(messages)][:20]

    def suffix(self, messages, ended):
        return [i % CONFIG.vocab_size for i in self._words.suffix(messages, ended)][:5]

    def text(self, ids):
        return "text"


class Rooms:
    """Environments that answer a step with what `step` says; None: never."""

    def __init__(self, step=lambda key: Observed("on", 0.0), first="begin"):
        self._step, self._first = step, first
        self._answers = {}

    def open(self, key, task):
        self._answers[key] = Observed(self._first)

    def step(self, key, text):
        if (answer := self._step(key)) is not None:
            self._answers[key] = answer

    def finish(self, key):
        self._answers[key] = Observed(None, 0.0, truncated=True)

    def poll(self, seconds):
        time.sleep(min(seconds, 0.01))
        found, self._answers = list(self._answers.items()), {}
        return found

    def discard(self, key):
        self._answers.pop(key, None)


@pytest.fixture(scope="module")
def engine():
    made = Engine(CONFIG, limits=Limits(slots=SLOTS, context=96))
    made.load(PARAMS)
    return made


@pytest.fixture(scope="module")
def words():
    return Ids()


def rules(**more):
    return Rules(**{"turns": 3, "turn_tokens": 4, "tokens": 90, "observation_tokens": 20, "live": SLOTS} | more)


def played(engine, words, rooms, count=2):
    player = Player(engine, rooms, words, rules(), tuple(EOS), Sampling(1.0), 0)
    return sorted(player.play([Episode(i, 0, f"e{i}", Task(i)) for i in range(count)]), key=lambda e: e.episode.place)


@pytest.mark.slow
@pytest.mark.parametrize("lockstep", [False, True])
def test_episodes_that_are_left_leave_no_slot_taken(engine, words, lockstep):
    player = Player(engine, Rooms(), words, rules(lockstep=lockstep), tuple(EOS), Sampling(1.0), 0)
    playing = player.play([Episode(i, 0, f"e{i}", Task(i)) for i in range(4)])
    next(playing)
    playing.close()
    while not engine.idle:
        engine.step()
    assert engine._pool.taken == 0


@pytest.mark.slow
def test_an_episode_whose_last_turn_has_no_end_token_was_cut_off(engine, words):
    """The environment takes the text as it is, as tools alone do an answer: it is the first half of one."""
    ended = played(engine, words, Rooms(lambda key: Observed(None, 1.0, terminated=True)), count=24)
    assert {e.status for e in ended} == {"done"}
    stops = {}
    for e in ended:
        [row] = completion_rows(e, PromptRow(id="task", prompt_ids=[1], prompt="p"), "digest", 0, 1.0)
        stops.setdefault(e.turns[-1].stop, set()).add(row.stop)
    assert stops == {"length": {"length"}, "eos": {"eos"}}


PARTS = [{"role": "user", "content": [{"type": "text", "text": "won"}]}]
ODD = [[{"role": "user"}], PARTS, "half a pair \udcff"]


@pytest.mark.parametrize(
    ("where", "odd"),
    [*itertools.product(["reset", "step"], ODD), ("step", [{"role": "assistant", "content": "I won"}])],
)
def test_an_observation_that_cannot_be_written_costs_its_own_episode(engine, words, odd, where):
    """Whatever comes through: the child refuses or mends these before."""

    def answer(key):
        return Observed(odd if where == "step" and key[0] == 0 else "on", 0.5)

    rooms = Rooms(answer)
    if where == "reset":
        rooms.open = lambda key, task: rooms._answers.update({key: Observed(odd if key[0] == 0 else "begin")})
    failed, other = played(engine, words, rooms)
    assert (failed.status, failed.tries, failed.reward, other.status) == ("failed", 2, None, "turn_limit")
    assert other.reward == 1.5 and failed.reason.startswith(
        f"the observation of {'the reset' if where == 'reset' else 'turn 1'}"
    )


@pytest.mark.parametrize("calls", [3, "two", ["add"], {"made": 1}, [{"count": 2}]])
def test_what_an_environment_has_under_the_name_of_calls_and_is_none_is_left_out(engine, words, calls):
    """What reads the table takes them for calls of tools."""

    def kept(calls):
        [ended] = played(engine, words, Rooms(lambda key: Observed("", 1.0, True, info={"calls": calls})), count=1)
        return ended.turns[0].calls

    assert kept(calls) is None and kept([{"name": "add"}]) == [{"name": "add"}]
