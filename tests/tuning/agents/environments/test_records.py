"""Records of environments are valid and hold out what training never sees; levels are what play of them reaches."""

import collections
import itertools
import json
import random

import pytest

from rlhf.tuning.agents.contract import Task
from rlhf.tuning.agents.environments import BUILT_IN, frozenlake
from rlhf.tuning.agents.environments.frozenlake import FrozenLake
from rlhf.tuning.agents.environments.guess import Guess
from rlhf.tuning.agents.environments.records import records as records_of
from rlhf.tuning.agents.tools.calculator import make
from rlhf.tuning.agents.tools.schemas import schema_of
from rlhf.tuning.chat.calls import parse
from rlhf.tuning.chat.renderer import Renderer
from rlhf.tuning.data.records import parse_record
from tests.tuning.chat import templates
from tests.tuning.data.conversation import conversation_ids

GAMES = ("guess", "frozenlake")


def parsed(name, **arguments):
    rows = list(BUILT_IN[name].records(**arguments))
    records = [parse_record(row, name, number) for number, row in enumerate(rows, start=1)]
    assert len({record.id for record in records}) == len({record.content for record in records}) == len(records)
    assert all(record.named_group for record in records)
    return records


def of_split(records, split):
    return [record for record in records if record.split == split]


def seeds(records):
    return [json.loads(record.metadata)["seed"] for record in records]


@pytest.mark.parametrize("name", GAMES)
def test_records_are_valid_and_follow_from_the_seed(name):
    counts = {"transcripts": 21, "prompts": 14, "heldout": 28}
    records = parsed(name, **counts)
    splits = collections.Counter(record.split for record in records)
    assert splits == {"sft": 21, "prompts": 14, "heldout": 28}
    assert records == parsed(name, **counts) != parsed(name, seed=1, **counts)
    assert len(set(seeds(records))) == len(records)
    # A task's prompt is no transcript's, and each is its own: equal prompts would be one.
    prompts = [record.prompt_text for record in records if record.split != "sft"]
    assert len(set(prompts)) == len(prompts) and not set(prompts) & {r.prompt_text for r in of_split(records, "sft")}


@pytest.mark.parametrize("name", GAMES)
def test_transcripts_are_what_the_environment_says(name):
    environment = BUILT_IN[name].ENVIRONMENT()
    for record in of_split(parsed(name, transcripts=14, prompts=0, heldout=0), "sft"):
        turns = [*(record.conversation or (*record.prompt, {"role": "assistant", "content": record.completion}))]
        observation, _ = environment.reset(seed=json.loads(record.metadata)["seed"])
        ended = False
        for said, answer in zip(turns[::2], turns[1::2], strict=True):
            assert not ended and (said["role"], answer["role"]) == ("user", "assistant")
            assert said["content"] == observation
            observation, _, terminated, truncated, info = environment.step(answer["content"])
            assert info["valid"]
            ended = terminated or truncated
        assert ended


def test_tasks_of_one_map_are_a_group_and_no_group_is_on_both_sides():
    game = FrozenLake()
    records = parsed("frozenlake", transcripts=40, prompts=40, heldout=40)
    by_group = collections.defaultdict(set)
    for record in records:
        seed = json.loads(record.metadata)["seed"]
        by_group[record.group].add((game.lake(seed), record.split == "heldout"))
    assert all(len(of) == 1 for of in by_group.values())
    assert len(by_group) == len(set.union(*by_group.values())) < len(records)


@pytest.mark.parametrize("name", GAMES)
def test_perfect_play_succeeds_as_often_as_can_be_and_the_others_are_played_at_random(name):
    module = BUILT_IN[name]
    environment = module.ENVIRONMENT()

    def success(skilled):
        seen, tasks = [], []
        for record in of_split(parsed(name, transcripts=140, prompts=0, heldout=0, skilled=skilled), "sft"):
            facts = json.loads(record.metadata)
            tasks.append(Task(facts["seed"]))
            environment.reset(seed=facts["seed"])
            said = [*(record.conversation or ({"content": ""}, {"content": record.completion}))][1::2]
            *_, info = [environment.step(turn["content"])[-1] for turn in said]
            seen.append((facts["skilled"], info["success"]))
        levels = module.levels(tasks)
        return {kind: [won for is_skilled, won in seen if is_skilled == kind] for kind in (True, False)}, levels

    of, levels = success(0.5)
    assert len(of[True]) == len(of[False]) == 70
    assert sum(of[True]) / 70 == pytest.approx(levels.optimal, abs=1e-9)
    assert abs(sum(of[False]) / 70 - levels.random) < 0.2 < levels.optimal - levels.random


def test_perfect_play_takes_the_shortest_way():
    environment = FrozenLake()
    seed = next(seed for seed in range(100) if environment.distance(environment.lake(seed)) == 4)
    environment.reset(seed=seed)
    ended = [environment.step(environment.best()[0])[2] for _ in range(4)]
    assert ended == [False, False, False, True]


def test_guesses_cover_all_numbers_equally_and_by_chance_alone():
    records = parsed("guess", transcripts=700)
    for split in ("sft", "prompts", "heldout"):
        hidden = collections.Counter(seed % 7 for seed in seeds(of_split(records, split)))
        assert len(hidden) == 7 and len(set(hidden.values())) == 1
    played = of_split(records, "sft")
    first = collections.Counter((r.conversation or r.prompt)[1:2][0]["content"] for r in played if r.conversation)
    assert set(first) == set("1234567") and max(first.values()) < 1.7 * min(first.values())
    with pytest.raises(ValueError, match="prompts must be a multiple of high = 7, got 15"):
        BUILT_IN["guess"].records(prompts=15)


def test_too_few_maps_for_both_sides_are_an_error():
    with pytest.raises(ValueError, match="vary more"):
        records_of("guess", Guess(), 0, 1, 1, 1, lambda number: "one map")
    with pytest.raises(ValueError, match="argument heldout must be in 0"):
        BUILT_IN["frozenlake"].records(heldout=-1)
    with pytest.raises(ValueError, match=r"argument skilled must be in 0\.\.1, got 1\.5"):
        BUILT_IN["guess"].records(skilled=1.5)


def test_problems_of_the_calculator_are_right_and_apart():
    records = parsed("calculator", transcripts=0)
    assert len(of_split(records, "prompts")) == 256 and len(of_split(records, "heldout")) == 128
    for record in records:
        a, b = map(int, record.prompt_text.removeprefix("What is ").removesuffix("?").split(" * "))
        assert record.answer == str(a * b) and min(a, b) >= 10 and max(a, b) <= 99
    assert len({record.group for record in records}) == len(records)
    levels = BUILT_IN["calculator"].levels([Task(0, {"answer": r.answer}) for r in of_split(records, "heldout")])
    assert levels.blind < 0.05
    with pytest.raises(ValueError, match="4095 pairs"):
        BUILT_IN["calculator"].records(prompts=4000)
    with pytest.raises(ValueError, match="calls"):
        BUILT_IN["calculator"].records(calls=2)


def test_transcripts_of_the_calculator_are_episodes_as_they_are_played():
    """Under a template without tools, SFT sees the contexts that episodes have, token by token."""
    tokenizer = templates.tokenizer(templates.CHATML)
    renderer = Renderer(tokenizer, [schema_of(make())], None, "hermes")
    records = of_split(parsed("calculator", prompts=0, heldout=0, transcripts=20), "sft")
    called = [record for record in records if json.loads(record.metadata)["calls"]]
    assert len(called) == 2 and len(records) == 20
    for record in records:
        system, question = record.prompt[:2]
        assert (system["role"], question["role"]) == ("system", "user")
        first = renderer.first([question])
        ids, mask = conversation_ids(tokenizer, record.conversation or [*record.prompt, answer(record)])
        assert ids[: len(first)] == first and not any(mask[: len(first)]) and mask[len(first)] == 1
        assert record.completion == make()(question["content"].removeprefix("What is ").removesuffix("?"))
    for record in called:
        _, question, call, result, last = record.conversation
        (made,) = parse(call["content"], "hermes", [schema_of(make())]).calls
        value = make()(**made.arguments)
        assert [result] == renderer._fitted([{"role": "tool", "name": "calculator", "content": value}]) and last[
            "content"
        ] == value
        ids, mask = conversation_ids(tokenizer, record.conversation)
        first, suffix = renderer.first([question]), renderer.suffix([result], ended=True)
        start = len(first) + mask[len(first) :].index(0)
        assert ids[start : start + len(suffix)] == suffix and mask[start + len(suffix)] == 1


def answer(record):
    return {"role": "assistant", "content": record.completion}


def tasks(count, first=0):
    return [Task(seed) for seed in range(first, first + count)]


def test_guess_has_the_levels_of_arithmetic():
    levels = BUILT_IN["guess"].levels(tasks(70))
    assert levels.random == pytest.approx(1 - (6 / 7) ** 3) and levels.random == pytest.approx(0.370, abs=5e-4)
    assert levels.blind == pytest.approx(3 / 7) and levels.optimal == 1.0 and levels.exact
    hard = BUILT_IN["guess"].levels(tasks(60), high=15, guesses=4)
    assert hard.blind == pytest.approx(4 / 15) and hard.optimal == 1.0
    # Too few turns for all: one guess finds one number, two find three.
    assert BUILT_IN["guess"].levels(tasks(7), turns=1).optimal == pytest.approx(1 / 7)
    assert BUILT_IN["guess"].levels(tasks(7), turns=2).optimal == pytest.approx(3 / 7)
    # Tasks that hide one number more often than others are a gift to the blind.
    assert BUILT_IN["guess"].levels([*tasks(7), Task(0), Task(7), Task(14)]).blind == pytest.approx(6 / 10)


def best_sequence(environment, seeds, moves, length):
    """The success of the best of all sequences of moves, each played on every seed."""

    def won(seed, sequence):
        environment.reset(seed=seed)
        for move in sequence:
            _, reward, terminated, truncated, _ = environment.step(move)
            if terminated or truncated:
                return reward
        return 0.0

    return max(
        sum(won(seed, sequence) for seed in seeds) / len(seeds) for sequence in itertools.product(moves, repeat=length)
    )


def test_the_blind_level_is_that_of_the_best_of_all_sequences():
    arguments = {"rows": 2, "holes": 1, "moves": 4}
    levels = BUILT_IN["frozenlake"].levels(tasks(12), **arguments)
    best = best_sequence(FrozenLake(**arguments), range(12), ("up", "down", "left", "right"), 4)
    assert levels.exact and levels.blind == pytest.approx(best) and 0 < best < 1 == levels.optimal


@pytest.mark.parametrize(
    ("name", "arguments"), [("guess", {}), ("frozenlake", {}), ("frozenlake", {"rows": 2, "moves": 8})]
)
def test_random_play_reaches_the_random_level(name, arguments):
    """Four standard errors of 1000 episodes, under fixed draws."""
    environment, count, seeds = BUILT_IN[name].ENVIRONMENT(**arguments), 1000, 20
    expected = BUILT_IN[name].levels(tasks(seeds) if name != "guess" else tasks(21), **arguments).random
    rng, won = random.Random("levels"), 0
    for number in range(count):
        environment.reset(seed=number if name == "guess" else number % seeds)
        ended = False
        while not ended:
            _, _, terminated, truncated, info = environment.step(rng.choice(environment.moves()))
            ended = terminated or truncated
        won += info["success"]
    assert abs(won / count - expected) < 4 * (expected * (1 - expected) / count) ** 0.5


def test_fewer_turns_lower_the_levels():
    more = BUILT_IN["frozenlake"].levels(tasks(10), moves=8)
    fewer = BUILT_IN["frozenlake"].levels(tasks(10), moves=8, turns=3)
    assert fewer.optimal < more.optimal == 1.0


def test_a_search_that_is_cut_short_is_a_lower_bound(monkeypatch):
    whole = BUILT_IN["frozenlake"].levels(tasks(12))
    monkeypatch.setattr(frozenlake, "SEQUENCES", 3)
    short = BUILT_IN["frozenlake"].levels(tasks(12))
    assert whole.exact and not short.exact and 0 < short.blind <= whole.blind
    assert (short.random, short.optimal) == (whole.random, whole.optimal)


def test_products_have_the_levels_of_their_answers():
    answers = [Task(0, {"answer": answer}) for answer in ("600", "600", "391", "1023")]
    levels = BUILT_IN["calculator"].levels(answers)
    assert levels.blind == 0.5 and levels.optimal == 1.0 and levels.random == pytest.approx(1 / 9702)
    with pytest.raises(ValueError, match="task 1 of 1 has no answer"):
        BUILT_IN["calculator"].levels([Task(0)])


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"harbor"}))
def test_levels_want_tasks(name):
    with pytest.raises(ValueError, match="there are none"):
        BUILT_IN[name].levels([])
