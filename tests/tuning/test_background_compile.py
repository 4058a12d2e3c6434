"""Programs that compile in a thread: errors, precision and types."""

import threading

import jax
import jax.numpy as jnp
import pytest

from rlhf.tuning.precision import ROUNDED, using
from rlhf.tuning.rollout.engine.engine import start


def test_an_error_of_it_is_left_to_the_call_that_needs_the_program(caplog):
    function = jax.jit(lambda x: x.no_such_attribute)
    start(lambda: function.lower(1.0)).join()
    with pytest.raises(AttributeError, match="no_such_attribute"):
        function(1.0)
    assert "did not compile ahead" in caplog.text and "no_such_attribute" in caplog.text


@pytest.mark.parametrize("mixed", [lambda: using("fast"), lambda: jax.default_matmul_precision(ROUNDED)])
def test_it_has_the_precision_of_its_beginning_whatever_the_process_goes_on_to(mixed, compiled, monkeypatch):
    monkeypatch.setattr("rlhf.tuning.precision.multiplies_bfloat16", lambda: True)
    begun, left = threading.Event(), threading.Event()

    @jax.jit
    def rounded(x):
        begun.set()
        left.wait(60)
        return x if jax.config.jax_default_matmul_precision == ROUNDED else -x

    with mixed():
        thread = start(lambda: rounded.lower(1.0))
        assert begun.wait(60)
    left.set()
    thread.join()
    with mixed():
        # Cached under the precision, and so it has to be of it.
        assert rounded(1.0) == 1.0
    assert compiled("rounded") == ["compile"]


def test_it_compiles_for_the_type_of_the_thread_that_asks(compiled):
    @jax.jit
    def doubled(x):
        return x * 2

    with jax.enable_x64(True):
        x = jnp.arange(3.0)
        start(lambda: doubled.lower(x)).join()
        assert doubled(x).dtype == "float64"
    assert compiled("doubled") == ["compile"]
