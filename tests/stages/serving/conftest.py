"""A served model that has been taught one conversation with a tool, for all tests of the server."""

import jax
import numpy as np
import optax
import pytest

from rlhf.stages.serving.sessions import Sessions
from rlhf.tuning.device import Compute
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.shapes import bucket
from rlhf.tuning.training.batch import Group, choose_rows, micro_batches
from rlhf.tuning.training.forward import logps_and_entropy
from tests.stages.serving.support import CONFIG, conversation, living, served, serving


@pytest.fixture(scope="session")
def params():
    """Parameters under which the policy's turns of the conversation are greedy."""
    first, call, between, answer = conversation()
    group = Group(first, [[*call, *between, *answer]], [0])
    width = bucket(len(group.completions[0]))
    [batch] = micro_batches([group], layout=choose_rows([[group]], 256), completion_tokens=width)
    arrays, mask_CT = batch.arrays(), np.zeros((len(batch.ids_C), width))
    row = int(np.flatnonzero(batch.ids_C == 0)[0])
    mask_CT[row, : len(call)] = 1
    mask_CT[row, len(call) + len(between) : len(group.completions[0])] = 1
    graph, optimizer = decoder_graph(CONFIG), optax.adam(3e-3)

    def loss(params):
        return -(logps_and_entropy(graph, params, arrays, 1.0, Compute())[0] * mask_CT).sum()

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    params = random_params(CONFIG, 3)
    state = optimizer.init(params)
    for _ in range(400):
        params, state, value = step(params, state)
        # Then each token has a probability over one half.
        if value < np.log(2):
            return params
    raise AssertionError(f"the conversation was not learnt: {value}")


@pytest.fixture(scope="session")
def live(params):
    with living(params) as live:
        yield live


@pytest.fixture(scope="session")
def url(live):
    with serving(served(live, "the-digest", sessions=Sessions(max_sessions=3, tokens=5000))) as url:
        yield url


@pytest.fixture(scope="session")
def client(url):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
