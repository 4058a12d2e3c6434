"""Programs that compile in threads before they are needed. JAX keeps the compiled program for the later call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import jax

_log = logging.getLogger(__name__)


def start(lowered: Callable[[], Any]) -> threading.Thread:
    """Starts a thread that compiles what `lowered` returns. Join it before the call, which else compiles too."""
    # Of now, as JAX keeps the program under them: its own context managers reach one thread alone, and the process may
    # go on to other settings.
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
