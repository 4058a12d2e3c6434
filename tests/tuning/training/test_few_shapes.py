"""A run on an accelerator compiles few programs, whatever the lengths of its completions are."""

import collections
import inspect

import jax
import numpy as np
import pytest

from rlhf.tuning.algorithms.learner import Learner, policy_step
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.rounds import run_round
from rlhf.tuning.compile_target import choosing_few_shapes, few_shapes
from rlhf.tuning.device import choose
from rlhf.tuning.models.huggingface import scalar_head_params
from rlhf.tuning.rollout.engine import programs
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.paged import programs as paged
from rlhf.tuning.rollout.engine.replicas import engine_at
from rlhf.tuning.rollout.requests import Request, Sampling
from rlhf.tuning.rows import CompletionRow, ScoreRow
from rlhf.tuning.settings import OptimizerSettings
from rlhf.tuning.shapes import DECODE_PROGRAMS, ROW_LENGTHS
from rlhf.tuning.training.completions import logps_program
from rlhf.tuning.training.step import copy
from tests.tuning.algorithms.support import rollouts, settings
from tests.tuning.tiny import CONFIG, PARAMS

PROMPTS, EACH, PROMPT, COMPLETION, ROUNDS = 6, 4, 24, 72, 20
LIMITS = Limits(context=PROMPT + COMPLETION, steps=8, chunks=(16, 64), page_tokens=16, few=True)
SETTINGS = settings(prompts_per_step=3, epochs=2, prompt_limit=PROMPT, completion_limit=COMPLETION)


@pytest.fixture
def compiled():
    """How often JAX has made a program, by the program's name."""
    counts, listening = collections.Counter(), [True]

    def add(event, seconds, fun_name="", **_):
        if listening and event == "/jax/core/compile/backend_compile_duration":
            counts[fun_name] += 1

    jax.monitoring.register_event_duration_secs_listener(add)
    yield counts
    listening.clear()


def _sizes():
    """Programs so far: steps and passes of the model in training; programs that decode, of each kind of cache."""
    compute = choose().compute
    step = policy_step(CONFIG, SETTINGS.objective, SETTINGS.optimizer, compute, None, None)
    of_step = inspect.getclosurevars(inspect.getclosurevars(step.start).nonlocals["program"]).nonlocals["programs"]
    trained = [of_step[name] for name in ("single", "add") if of_step]
    trained.append(logps_program(CONFIG, SETTINGS.temperature, compute))
    decoded = programs.decode, paged.decode, paged.mixed
    return [sum(program._cache_size() for program in some) for some in (trained, decoded)]


def _ragged_round(engine, number):
    """Rollouts and scores of a round; its stop ids, of which there are 1 to 8, decide how long completions are."""
    rng = np.random.default_rng(number)
    stops = tuple(rng.choice(97, int(rng.integers(1, 9)), replace=False).tolist())
    prompts = [rng.integers(0, 97, rng.integers(2, PROMPT)).tolist() for _ in range(PROMPTS)]
    requests = [Request(p, COMPLETION, Sampling(), stops, number, i, EACH) for i, p in enumerate(prompts)]
    found = dict(engine.run(requests))
    rows = [
        CompletionRow(place=p, prompt_id=str(p), sample=s, prompt_ids=prompts[p], token_ids=c.tokens, logprobs=c.logps)
        for p in range(PROMPTS)
        for s, c in enumerate(found[p])
    ]
    scores = [
        ScoreRow(
            place=r.place, sample=r.sample, prompt_id=r.prompt_id, total=float(np.mean(np.asarray(r.token_ids) % 2))
        )
        for r in rows
    ]
    return rows, scores


@pytest.mark.slow
def test_nothing_compiles_after_two_rounds_of_a_ragged_workload(compiled):
    assert not few_shapes()
    policy, before = Learner.start(copy(PARAMS), SETTINGS.optimizer), _sizes()
    for cache in ("slots", "paged"):
        rounds, started = [], _sizes()
        for number in range(ROUNDS):
            counted = compiled.copy()
            # An engine each round, as the stage opens it.
            engine = engine_at(None, CONFIG, limits=LIMITS, cache=cache)
            engine.load(policy.params)
            rows, scores = _ragged_round(engine, number)
            with choosing_few_shapes(True):
                data = RoundData.from_rows(rows, scores, widest=COMPLETION)
                policy = run_round(data, SETTINGS, CONFIG, policy).policy
            rounds.append(compiled - counted)
        assert 2 <= _sizes()[1] - started[1] <= DECODE_PROGRAMS
        assert rounds[0] and not any(rounds[2:]), list(enumerate(rounds))
    assert 2 <= _sizes()[0] - before[0] <= 2 * ROW_LENGTHS


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["slots", "paged"])
def test_rounds_of_any_size_decode_with_six_programs(cache):
    """The ladders of a CPU give slots up to 30 of these, and pages 10."""
    limits = Limits(slots=200, context=500, steps=4, chunks=(16, 64), page_tokens=16, few=True)
    engine = engine_at(None, CONFIG, limits=limits, cache=cache)
    shapes, rng = set(), np.random.default_rng(0)
    for _ in range(4 * ROUNDS):
        live, length = int(200 ** rng.random()), int(rng.integers(1, 497))
        if cache == "slots":
            engine._pool.resize(engine._pool.rows_for(live), length + limits.steps)
            shapes.add((len(engine._pool.slots), engine._pool.capacity))
            engine._pool.abandon()
        else:
            shapes |= {("decode", engine._rows_of(live)), ("mixed", engine._rows_of(live, mixed=True))}
    assert len(shapes) == {"slots": 6, "paged": 5}[cache] <= DECODE_PROGRAMS


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "online-dpo"])
def test_a_round_trains_the_same_with_few_shapes(algorithm):
    # Pairs of equal rewards would teach nothing.
    rows, scores = rollouts(PARAMS, 0)
    config = settings(algorithm, optimizer=OptimizerSettings("sgd", learning_rate=0.1), completion_limit=COMPLETION)
    if algorithm == "online-dpo":
        some = [i for i, row in enumerate(rows) if row.sample < 2]
        rows, scores = [rows[i] for i in some], [scores[i] for i in some]
    found = []
    for few in (False, True):
        critic = None
        if config.needs_critic:
            critic = Learner.start(scalar_head_params(CONFIG, copy(PARAMS)), config.critic.optimizer)
        policy, reference = Learner.start(copy(PARAMS), config.optimizer), PARAMS if config.needs_reference else None
        with choosing_few_shapes(few):
            data = RoundData.from_rows(rows, scores, widest=COMPLETION if few else 0)
            found.append(run_round(data, config, CONFIG, policy, critic, reference=reference))
    fitted, padded = found
    assert fitted.metrics["grad_norm"] > 0
    assert padded.metrics["grad_norm"] == pytest.approx(fitted.metrics["grad_norm"], rel=1e-4)
    for one, other in zip(*(jax.tree.leaves(result.policy.params) for result in found), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
