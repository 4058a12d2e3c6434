"""Float64 for tests of formulas."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def float64() -> Iterator[None]:
    """Parity is of formulas: a float32 tolerance would hide a wrong one."""
    # Here and not above: tests of data load no JAX.
    import jax

    with jax.enable_x64(True):
        yield
