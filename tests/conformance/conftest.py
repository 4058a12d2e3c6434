"""Float64 and quick compilation for the conformance cases only, and the count of cases at the end of the run."""

from collections import Counter
from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    quick = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", quick)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: Counter[str] = Counter()
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if "conformance/test_vectors.py::test_case[" in report.nodeid:
                text = str(report.longrepr) if outcome == "skipped" else ""
                counts["peer quirks" if "peer_quirk" in text else outcome] += 1
    if counts:
        listed = ", ".join(f"{n} {name}" for name, n in counts.items())
        terminalreporter.write_line(f"conformance cases: {counts.total()}: {listed}")
