"""Programs compiled in threads before they are needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import jax


class Ahead:
    """Threads that compile, one a key; a key names a program with its shapes."""

    def __init__(self) -> None:
        self._threads: dict[Hashable, threading.Thread] = {}

    def begin(self, key: Hashable, lowered: Callable[[], Any]) -> None:
        """Starts a thread that compiles what `lowered` returns, unless this key has one.

        JAX keeps the compiled program for the later call.
        """
        if key in self._threads:
            return
        # JAX's own context managers reach one thread alone: the other compiles for the type of this one.
        exact: bool = jax.config.jax_enable_x64  # type: ignore[attr-defined]

        def compiled() -> None:
            with jax.enable_x64(exact):
                lowered().compile()

        # A daemon: the process may exit in the middle of a compilation.
        thread = threading.Thread(target=compiled, name="compile", daemon=True)
        self._threads[key] = thread
        thread.start()

    def wait(self, key: Hashable) -> None:
        """Returns once no thread compiles this key, so that the call does not compile it a second time."""
        if key in self._threads:
            self._threads[key].join()
