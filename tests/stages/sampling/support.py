"""Two policies, requests for them, and a fleet of the servers that sample; `conftest.py` has the servers."""

import dataclasses

import jax
import numpy as np

from rlhf.tuning.device import Compute
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.rollout.requests import Request, Sampling
from rlhf.tuning.rollout.servers.fleet import Fleet, Options
from rlhf.tuning.rollout.servers.kinds import KINDS
from rlhf.tuning.training.completions import token_logps

TOKENIZER = byte_tokenizer()
CONFIG = tiny(len(TOKENIZER))
PARAMS = {
    name: jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, random_params(CONFIG, seed))
    for name, seed in {"first": 3, "second": 4}.items()
}
STOPS = (TOKENIZER.eos_token_id, 97)
OPTIONS = Options(seeds=True, tolerance=1e-3, wait_seconds=3.0, start_seconds=120.0)


def requests_of(count, temperature=1.0, samples=2, max_tokens=12):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 90, rng.integers(2, 30)).tolist() for _ in range(count)]
    return [
        Request(p, max_tokens, Sampling(temperature), STOPS, seed=7, counter=i, samples=samples, name=f"p{i}")
        for i, p in enumerate(prompts)
    ]


GREEDY = requests_of(12, temperature=0.0, samples=1)


def trainer(name):
    return lambda pairs, temperature: token_logps(CONFIG, PARAMS[name], pairs, temperature, Compute(), 512)


def remote(*servers, kind="vllm", **changes):
    lines = []
    made = Fleet(KINDS[kind], servers, dataclasses.replace(OPTIONS, **changes), lines.append)
    made.lines = lines
    return made


def run(engine, requests):
    found = dict(engine.run(requests))
    return [found[i] for i in range(len(requests))]


def same(found, expected):
    """Whether greedy completions are those of the native engine."""
    assert [c.tokens for (c,) in found] == [c.tokens for c in expected]
    assert [c.stop for (c,) in found] == [c.stop for c in expected]
    for (a,), b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.logps, b.logps, atol=1e-5)
