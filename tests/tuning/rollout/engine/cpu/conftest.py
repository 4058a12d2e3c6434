"""Kernels built for less than this processor."""

import pytest

from rlhf.tuning.cpu import kernels
from tests.tuning.compilers import compiler_for


@pytest.fixture(scope="session")
def shorter_vectors(request, tmp_path_factory):
    if "avx512f" not in kernels._processor():
        pytest.skip("this processor has no longer ones")
    return compiler_for(request.param, tmp_path_factory.mktemp("compiler"))
