"""What compiles beside other work is whole when that work is over, also where it fails; only an exit does not wait."""

import threading

import jax
import jax.numpy as jnp
import pytest

from tuning.ahead import compiling
from tuning.precision import ROUNDED, using


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


@pytest.mark.parametrize("exit_by", [KeyboardInterrupt, SystemExit])
def test_an_exit_does_not_wait(exit_by):
    program = Slow()
    with pytest.raises(exit_by), compiling(lambda: program):
        raise exit_by
    assert not program.whole
    program.until.set()


def test_an_error_of_it_is_left_to_the_call_that_needs_the_program(capfd):
    function = jax.jit(lambda x: x.no_such_attribute)
    with compiling(lambda: function.lower(1.0)):
        pass
    with pytest.raises(AttributeError, match="no_such_attribute"):
        function(1.0)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("mixed", [lambda: using("mixed"), lambda: jax.default_matmul_precision(ROUNDED)])
def test_it_has_the_precision_of_its_beginning_whatever_the_process_goes_on_to(mixed, compiled):
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
