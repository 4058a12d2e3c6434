"""Episodes over a real engine; environments answer in the test's own process, at once or never."""

import itertools
import time

import pytest

from rlhf.tuning.agents.contract import Observed, Task
from rlhf.tuning.agents.play import Player
from rlhf.tuning.agents.trajectory import Episode, Rules, completion_rows
from rlhf.tuning.chat.renderer import Renderer
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.requests import Sampling
from rlhf.tuning.rows import PromptRow
from tests.tuning.rollout.engine.support import EOS, PARAMS
from tests.tuning.tiny import CONFIG

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
