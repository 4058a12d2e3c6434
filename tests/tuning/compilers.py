"""Compilers for processors other than this one: shorter vectors, without a matrix unit, or with one that is denied."""

from pathlib import Path

FLAGS = {
    "avx2": "-mno-avx512f",
    "sse": "-mno-avx512f -mno-avx2 -mno-avx -mno-fma",
    "no matrix unit": "-mno-amx-tile -mno-amx-bf16",
    "a matrix unit": "-mamx-tile -mamx-bf16",
}


def compiler_for(what: str, folder: Path) -> str:
    """A command with some of `FLAGS`, made in the folder; kernels of one have names of their own."""
    flags, compiler = FLAGS[what], folder / "cc"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec echo {flags}\nexec cc "$@" {flags}\n')
    compiler.chmod(0o755)
    return str(compiler)
