"""A server on loopback, the folders of two policies, and what the native engine samples from them."""

import dataclasses

import pytest

from rlhf.tuning.models.huggingface import save_decoder
from rlhf.tuning.models.tokenizer import save_tokenizer
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.servers.protocol import Policy
from rlhf.tuning.rollout.servers.server import RemoteServer
from rlhf.tuning.rollout.servers.transfer import Transfer, digests
from tests.stages.sampling.http_server import State, make_app
from tests.stages.sampling.support import CONFIG, GREEDY, PARAMS, TOKENIZER, remote, requests_of, trainer
from tests.stages.support import running


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found, root = {}, tmp_path_factory.mktemp("models")
    for name, params in PARAMS.items():
        found[name] = root / name
        save_decoder(found[name], CONFIG, params, {})
        save_tokenizer(TOKENIZER, found[name])
    return found


@pytest.fixture(scope="module")
def native():
    """Greedy completions of GREEDY by the native engine."""
    found = {}
    for name, params in PARAMS.items():
        engine = Engine(CONFIG, limits=Limits(slots=4, context=256))
        engine.load(params)
        done = dict(engine.run(GREEDY))
        found[name] = [done[i][0] for i in range(len(GREEDY))]
    return found


@pytest.fixture
def policy(folders):
    def make(name, temperature=1.0, **changes):
        probe = [dataclasses.replace(r, samples=1, counter=1000 + i) for i, r in enumerate(requests_of(2, temperature))]
        made = Policy(name, lambda: folders[name], trainer(name), probe)
        return dataclasses.replace(made, **changes)

    return make


@pytest.fixture
def shared(folders, policy):
    """Makes policies that servers read below the folder of both."""

    def make(name, **changes):
        folder = folders[name]
        sent = Transfer(str(folder.parent), name, digests(folder))
        return policy(name, **{"transfer": lambda: sent, "dtype": "float32"} | changes)

    return make


@pytest.fixture
def state(folders):
    state = State(folders["first"])
    yield state
    state.live.close()


@pytest.fixture
def fleet(url, policy):
    """Makes fleets of the server with the policy `first`."""

    def make(**changes):
        made = remote(RemoteServer(url), **changes)
        made.load(policy("first"))
        return made

    return make


@pytest.fixture
def url(state):
    with running(make_app(state)) as url:
        yield url
