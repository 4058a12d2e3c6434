"""One store for the folder, float64 in JAX while a test of it runs, and the figures of agreement at the end."""

from collections.abc import Iterator
from importlib.util import find_spec

import jax
import pytest

from rlhf.stages.common.compilation import configure_jax
from rlhf.tuning.precision import using
from tests.oracle.agreement import FIGURES
from tests.oracle.product import DTYPE, Product

if find_spec("torch") is None:
    # It is of the group `parity`.
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def product(tmp_path_factory: pytest.TempPathFactory) -> Product:
    """The product's side, with models that all tests share."""
    configure_jax()
    return Product(tmp_path_factory.mktemp("oracle"))


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    """Tests of other folders may share the process: they get their float32, optimised programs and threads back."""
    import torch

    # Two threads wait for each other longer than they work on matrices of this size.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    quick = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    with using(DTYPE):
        yield
    jax.config.update("jax_disable_most_optimizations", quick)
    torch.set_num_threads(threads)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How far the oracle is from the product in each case, with `-v`."""
    if FIGURES and terminalreporter.verbosity >= 0:
        terminalreporter.write_sep("=", "agreement with the oracle: of parameters, of their change")
        for label, far, change in FIGURES:
            terminalreporter.write_line(f"{far:9.1e} {change:9.1e}  {label}")
