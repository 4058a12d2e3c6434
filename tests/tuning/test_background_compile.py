"""What compiles beside other work is whole when that work is over, also where it fails or the process exits."""

import signal
import threading

import jax
import jax.numpy as jnp
import pytest

from rlhf.tuning.background_compile import compiling
from rlhf.tuning.precision import ROUNDED, using
from tests.support import python


class Slow:
    """A program that compiles for as long as `until` is not set."""

    def __init__(self):
        self.until, self.whole = threading.Event(), False

    def compile(self):
        self.until.wait(60)
        self.whole = True


@pytest.mark.parametrize("error", [None, ValueError])
def test_it_is_waited_for_where_the_work_ends_and_where_it_fails(error):
    program = Slow()
    try:
        with compiling(lambda: program):
            threading.Timer(0.2, program.until.set).start()
            if error:
                raise error
    except ValueError:
        pass
    assert program.whole


@pytest.mark.parametrize("exit_by, status", [("sys.exit(3)", 3), ("raise KeyboardInterrupt", -signal.SIGINT)])
def test_an_exit_comes_behind_it_and_with_its_own_status(exit_by, status):
    """In the middle of XLA, which would abort the process where its thread were ended."""
    process = python(f"""
import sys, threading, time
import jax
from rlhf.tuning.background_compile import compiling

begun = threading.Event()

@jax.jit
def many(x):
    for i in range(1500):
        x = jax.numpy.sin(x) * i + x.T
    return x

def lowered():
    found = many.lower(jax.numpy.ones((8, 8)))
    begun.set()
    return found

with compiling(lowered):
    begun.wait()
    time.sleep(1)
    {exit_by}
""")
    _, errors = process.communicate(timeout=120)
    assert "FATAL" not in errors and "terminate" not in errors
    assert process.returncode == status


def test_an_error_of_it_is_left_to_the_call_that_needs_the_program(caplog):
    function = jax.jit(lambda x: x.no_such_attribute)
    with compiling(lambda: function.lower(1.0)):
        pass
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

    with pytest.raises(KeyboardInterrupt), mixed(), compiling(lambda: rounded.lower(1.0)):
        assert begun.wait(60)
        raise KeyboardInterrupt
    left.set()
    for thread in threading.enumerate():
        if thread.name == "compile":
            thread.join()
    with mixed():
        # Kept under the precision, and so it has to be of it.
        assert rounded(1.0) == 1.0
    assert compiled("rounded") == ["compile"]


def test_it_compiles_for_the_type_of_the_thread_that_asks(compiled):
    @jax.jit
    def doubled(x):
        return x * 2

    with jax.enable_x64(True):
        x = jnp.arange(3.0)
        with compiling(lambda: doubled.lower(x)):
            pass
        assert doubled(x).dtype == "float64"
    assert compiled("doubled") == ["compile"]
