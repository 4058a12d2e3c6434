"""A case compiled in this process, whose environment is `tests.aot.__main__.environment`."""

import hashlib
import importlib.metadata
import time
from pathlib import Path
from typing import Any

from tests.aot.account import account, loops
from tests.aot.bounds import row
from tests.aot.cases import Case
from tests.aot.programs import lowered

OPTIONS = {
    # Products in turn with parts of their operands are as many collectives as parts: as one each, they can be counted.
    "tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"},
    "gpu": {},
}
COMPILERS = {"tpu": "libtpu", "gpu": "jax-cuda13-plugin"}


def found(case: Case, unless: str = "", text: Path | None = None) -> dict[str, Any] | None:
    """The row of a case; None where its program is still the one with this digest."""
    start = time.process_time()
    program, ideal = lowered(case)
    digest = _digest(case, program.as_text())
    if digest == unless:
        return None
    compiled = program.compile(compiler_options=OPTIONS[case.platform])
    hlo = compiled.as_text()
    if text is not None:
        text.write_text(hlo)
    known = row(account(compiled), ideal, time.process_time() - start, digest)
    return known | ({"kernels": max(loops(hlo).values())} if (case.platform, case.program) == ("gpu", "decode") else {})


def _digest(case: Case, program: str) -> str:
    """Of all that decides what the compiler makes."""
    compiler = importlib.metadata.version(COMPILERS[case.platform])
    parts = [program, compiler, importlib.metadata.version("jaxlib"), case.topology, str(OPTIONS[case.platform])]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
