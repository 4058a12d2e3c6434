"""The accelerator in use against float64 on the host's processor, against itself, and its sampler against its trainer.

`make test-device` runs them where there is one; with JAX_PLATFORMS=cpu they hold on a CPU as well.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlhf.stages.worker.client import worker_environment
from tests.device.program import PROMPTS, SAMPLES, TOKENS
from tests.support import QUICK

pytestmark = pytest.mark.device

ROOT = Path(__file__).parents[2]


def _computed(folder: Path, dtype: str, platform: str | None = None) -> dict[str, np.ndarray]:
    out = folder / f"{dtype}-{platform}.npz"
    # As stages compute: on a GPU sums are in one order for a flag.
    env = worker_environment() | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    env["XLA_FLAGS"] = env["XLA_FLAGS"].replace(QUICK, "")
    if platform:
        env["JAX_PLATFORMS"] = platform
    command = [sys.executable, "-m", "tests.device.program", str(out), dtype]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    with np.load(out) as found:
        return dict(found)


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    return _computed(tmp_path_factory.mktemp("exact"), "float64", "cpu")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def found(request, tmp_path_factory):
    values = _computed(tmp_path_factory.mktemp(request.param), request.param)
    if "JAX_PLATFORMS" not in os.environ and str(values["device"]).startswith("cpu"):
        pytest.fail("JAX finds no accelerator here; JAX_PLATFORMS=cpu checks the processor")
    return request.param, values


LOGP = {"float32": 2e-5, "bfloat16": 2e-2}
"""What a token's log-probability may be off, on average."""
NORM = {"float32": 1e-5, "bfloat16": 2e-2}
"""Most that a gradient's norm may be off, relative."""
MOVED = {"float32": 5e-7, "bfloat16": 2e-4}
"""What a weight may be off after two steps of 1e-3, on average."""
KL = {"float32": 1e-10, "bfloat16": 1e-3}
"""Most that the sampler may be from the trainer, in nats a token."""


@pytest.mark.parametrize(("name", "least"), [("logps", 300), ("long_logps", 180)])
def test_log_probabilities_are_those_of_float64(found, exact, name, least):
    dtype, values = found
    tokens = exact[name] < 0
    off = np.abs(values[name] - exact[name])[tokens]
    print(values["device"], dtype, name, "off by", off.mean(), "most", off.max())
    assert len(off) > least and (values[name][~tokens] == 0).all()
    assert off.mean() <= LOGP[dtype] and off.max() <= 20 * LOGP[dtype]


def test_gradients_are_those_of_float64(found, exact):
    dtype, values = found
    for name in ("norms", "long_norms"):
        print(values["device"], dtype, name, values[name], exact[name])
        np.testing.assert_allclose(values[name], exact[name], rtol=NORM[dtype])
    # AdamW moves a weight by the learning rate whichever way its gradient points: one of no gradient may go either way.
    leaves = [name for name in exact if name.startswith("after/")]
    off = np.concatenate([np.abs(values[name] - exact[name]).ravel() for name in leaves])
    print(values["device"], dtype, "weights off by", off.mean(), "most", off.max())
    assert len(leaves) > 5 and off.max() <= 4.1e-3 and off.mean() <= MOVED[dtype]


def test_the_sampler_gives_tokens_the_trainers_probabilities(found):
    dtype, values = found
    assert values["tokens"].shape == (PROMPTS * SAMPLES, TOKENS)
    off = values["trainer"] - values["sampler"]
    kl = float(np.mean(np.expm1(off) - off))
    print(values["device"], dtype, "mismatch KL", kl, "most", np.abs(off).max())
    assert kl <= KL[dtype]


def test_what_is_computed_twice_has_the_same_bits(found):
    _, values = found
    assert [name for name, same in values.items() if name.startswith("again/") and not same] == []
