"""The kind of device is known without loading JAX, and JAX is asked once where a plugin may bring another."""

import pytest

from rlhf.stages.worker import devices
from tests.support import finish, python

ASK = "import sys; from rlhf.stages.worker.devices import device_kind; print(device_kind(), 'jax' in sys.modules)"


@pytest.mark.slow
def test_jax_is_asked_once_where_there_is_a_plugin(tmp_path, monkeypatch):
    (tmp_path / "path" / "jax_plugins").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "path")
    monkeypatch.setenv("RLHF_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert devices.device_kind.__wrapped__() == devices.CPU
    (answer,) = (tmp_path / "scratch" / "devices").iterdir()
    assert answer.read_text() == devices.CPU
    # The next process reads the answer.
    answer.write_text("gpu:Abacus")
    assert devices.device_kind.__wrapped__() == "gpu:Abacus"
    # Another choice of devices is another question.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert devices.device_kind.__wrapped__() == devices.CPU
    devices.forget()
    monkeypatch.delenv("JAX_PLATFORMS")
    devices.forget()
    assert not answer.exists()


def test_the_kind_of_device_is_told_without_jax():
    assert finish(python(ASK)).split() == [devices.device_kind(), "False"]
