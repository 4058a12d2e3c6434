"""What is held, and what waits, around the swap of a pushed policy."""

import contextlib
import dataclasses
import gc
import json
import threading
import time
import weakref

import pytest
from flax import nnx

from stages.serving.server import Server
from stages.serving.weights import Begun, Committed, PushBusy, Pushes
from tests.stages.serving.support import CONFIG, CONTEXT, LIMITS, STOPS, TOKENIZER
from tuning.models.huggingface import random_params, tensors_from_params
from tuning.rollout.engine.engine import Engine
from tuning.rollout.engine.live import EngineStopped, Live
from tuning.rollout.engine.staged import Unfit
from tuning.rollout.frames import Fingerprint, buckets
from tuning.rollout.requests import Request, Sampling

CONFIG_JSON = json.loads(json.dumps(dataclasses.asdict(CONFIG)))
TENSORS = list(tensors_from_params(nnx.to_pure_dict(random_params(CONFIG, 4))))


@pytest.fixture
def live():
    engine = Engine(CONFIG, limits=LIMITS, top=5)
    engine.load(random_params(CONFIG, 3))
    with contextlib.closing(Live(engine)) as live:
        yield live


@pytest.fixture
def pushes(live):
    return Pushes(Server(live, TOKENIZER, "tiny", STOPS, CONTEXT, "old"))


@contextlib.contextmanager
def draining(pushes, live):
    """Within, a push waits for a request under way; behind it the push is the policy."""
    push, found = sent(pushes)
    ended = threading.Event()
    # Some forty steps, behind each of which the engine is held up.
    stream = live.submit(Request([5, 6, 7], 150, Sampling(temperature=0)), lambda: ended.wait(0.5))
    committing = threading.Thread(target=pushes.commit, args=(push, Committed(fingerprint=found)))
    committing.start()
    try:
        while not any(order.swaps for order in list(live._orders)):
            assert committing.is_alive()
            time.sleep(0.001)
        yield
        assert committing.is_alive() and live.generation == 0
    finally:
        ended.set()
        stream.result()
        committing.join()


def sent(pushes, tensors=TENSORS):
    """(ID, fingerprint) of a push of these tensors that has arrived."""
    push, seen = pushes.begin(Begun(policy="new", config=CONFIG_JSON))["push"], Fingerprint()
    for bucket in buckets(tensors, 20_000, seen):
        pushes.add(push, bucket)
    return push, seen.hexdigest()


@pytest.mark.parametrize("fault", ["missing", "fingerprint", "engine"])
def test_a_push_that_was_refused_holds_no_weights(pushes, live, fault):
    push, found = sent(pushes, TENSORS[:-1] if fault == "missing" else TENSORS)
    arrays = [weakref.ref(array) for array in pushes._now.staged._arrays.values()]
    if fault == "engine":
        live.close()
    kind = {"missing": Unfit, "fingerprint": ValueError, "engine": EngineStopped}[fault]
    # Asked again it is refused again: the error is kept for that, and nothing with it.
    for _ in range(2):
        with pytest.raises(kind):
            pushes.commit(push, Committed(fingerprint="0" * 64 if fault == "fingerprint" else found))
    gc.collect()
    assert len(arrays) > 3 and not any(array() is not None for array in arrays)


def test_what_is_held_is_told_while_a_push_waits_for_requests_under_way(pushes, live):
    before = pushes.told()
    with draining(pushes, live):
        assert pushes.told() == before
    assert (pushes.told()["policy"], live.generation) == ("new", 1)


def test_who_asks_for_weights_that_others_swap_is_told_to_ask_again(live):
    """Its thread is one of those that all routes share."""
    pushes = Pushes(Server(live, TOKENIZER, "tiny", STOPS, CONTEXT, "old"), reading_seconds=0.1)
    with draining(pushes, live), pytest.raises(PushBusy, match="ask again"):
        pushes.told()
    assert pushes.told()["policy"] == "new"
