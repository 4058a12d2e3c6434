"""A trace of JAX's profiler covers the stretch of a stage's progress that its settings name, and no more."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from rlhf.stages import sft
from rlhf.stages.common.settings import Compute
from rlhf.stages.store.keys import config_content
from rlhf.stages.worker.process import FOLDER, profiled
from tests.stages.support import context


@pytest.mark.slow
@pytest.mark.parametrize(("stretch", "inside"), [((0, 1), [0]), ((1, 3), [1, 2]), ((2, 9), [2, 3])])
def test_the_steps_of_the_stretch_are_in_the_trace(tmp_path, stretch, inside):
    seen, log = [], []
    config = sft.Config(compute=Compute(profile=list(stretch)))
    progress = lambda done, total, unit, **metrics: seen.append((done, metrics))  # noqa: E731
    ctx = context(config, tmp_path, log=log.append, progress=progress)
    with profiled(ctx):
        for step in range(4):
            with jax.profiler.TraceAnnotation(f"step number {step}"):
                jnp.ones(8).sum().block_until_ready()
            ctx.progress(step + 1, 4, "step", loss=0.5)
    assert seen == [(i + 1, {"loss": 0.5}) for i in range(4)]
    (trace,) = (tmp_path / FOLDER / "plugins" / "profile").glob("*/perfetto_trace.json.gz")
    assert next(trace.parent.glob("*.xplane.pb")).stat().st_size and len(log) == 1
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert [i for i in range(4) if f"step number {i}" in names] == inside


def test_progress_that_leaps_over_a_stretch_is_traced_from_there(tmp_path):
    log = []
    ctx = context(sft.Config(compute=Compute(profile=[10, 12])), tmp_path, log=log.append)
    with profiled(ctx):
        for done in (8, 16, 24):
            ctx.progress(done, 24, "prompt")
    assert len(log) == 1


def test_a_stretch_changes_no_key_and_is_in_order():
    assert config_content(sft.Config(compute=Compute(profile=[1, 2]))) == config_content(sft.Config())
    for stretch in ([2, 2], [-1, 3], [1]):
        with pytest.raises(ValueError, match="profile"):
            Compute(profile=stretch)
