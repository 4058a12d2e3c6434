"""Programs that compile in threads before they are needed. JAX keeps the compiled program for the later call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from typing import Any

import jax

_log = logging.getLogger(__name__)


def _begun(lowered: Callable[[], Any]) -> threading.Thread:
    # The settings of now, by which JAX caches the program: its context managers reach one thread alone, and the process
    # may change them later.
    exact: bool = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    precision: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

    def compile_it() -> None:
        try:
            with jax.enable_x64(exact), jax.default_matmul_precision(precision):
                lowered().compile()
        except Exception as error:
            # The call that needs the program meets it too.
            _log.warning("a program did not compile ahead, and does so where it is called: %r", error)

    # No daemon: an exit waits for it. Python ends daemons by an exception that XLA does not bear: the process aborts.
    thread = threading.Thread(target=compile_it, name="compile", daemon=False)
    thread.start()
    return thread


class Ahead:
    """Threads that compile, one a key; a key names a program with its shapes."""

    def __init__(self) -> None:
        self._threads: dict[Hashable, threading.Thread] = {}

    def begin(self, key: Hashable, lowered: Callable[[], Any]) -> None:
        """Starts a thread that compiles what `lowered` returns, unless this key has one."""
        if key not in self._threads:
            self._threads[key] = _begun(lowered)

    def wait(self, key: Hashable) -> None:
        """Returns once no thread compiles this key, so that the call does not compile it a second time."""
        if key in self._threads:
            self._threads[key].join()
