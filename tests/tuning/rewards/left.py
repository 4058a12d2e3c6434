"""Processes that a test has marked by a word of their command."""

import psutil


def running(word: str) -> list[psutil.Process]:
    """Those that have it."""
    return [p for p in psutil.process_iter(["cmdline"]) if word in (p.info["cmdline"] or [])]
