"""Compilers for processors that have less than this one: shorter vectors, no matrix unit."""

from pathlib import Path

WITHOUT = {
    "avx2": "-mno-avx512f",
    "sse": "-mno-avx512f -mno-avx2 -mno-avx -mno-fma",
    "no matrix unit": "-mno-amx-tile -mno-amx-bf16",
}


def compiler_without(what: str, folder: Path) -> str:
    """A command of `WITHOUT`, made in the folder; kernels of one have names of their own."""
    flags, compiler = WITHOUT[what], folder / "cc"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec echo {flags}\nexec cc "$@" {flags}\n')
    compiler.chmod(0o755)
    return str(compiler)
