"""A run's report: one HTML page without scripts or outside references."""

from __future__ import annotations

from stages.artifacts import Store


def write_report(store: Store, run_name: str) -> str:
    """Placeholder until the page is written."""
    return ""
