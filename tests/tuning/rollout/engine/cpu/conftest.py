"""A compiler for processors that have less than this one: shorter vectors, no matrix unit."""

import pytest

from tuning.cpu import kernels

WITHOUT = {
    "avx2": "-mno-avx512f",
    "sse": "-mno-avx512f -mno-avx2 -mno-avx -mno-fma",
    "no matrix unit": "-mno-amx-tile -mno-amx-bf16",
}


@pytest.fixture(scope="session")
def shorter_vectors(request, tmp_path_factory):
    if "avx512f" not in kernels._processor():
        pytest.skip("this processor has no longer ones")
    flags, compiler = WITHOUT[request.param], tmp_path_factory.mktemp("compiler") / "cc"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec echo {flags}\nexec cc "$@" {flags}\n')
    compiler.chmod(0o755)
    return str(compiler)
