"""Consoles: texts of others, their width where no terminal gives one, and what happens when their reader goes away."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from rlhf.tuning.names import plain


def log_width() -> int | None:
    """Columns of output that is no terminal: Rich takes 80, less than the line of a round. None on a terminal."""
    return None if sys.stdout.isatty() else 160


class PlainConsole(Console):
    """A console that shows control characters of texts, since a completion could rewrite the terminal with them."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As `Console.render`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


class LastingConsole(PlainConsole):
    """A console that falls silent when nobody reads it any more (`| head`, a `tee` that ended). Rich would exit."""

    def _write_buffer(self) -> None:
        try:
            super()._write_buffer()
        except OSError as error:
            # A closed terminal, a full disk of a log.
            raise BrokenPipeError from error

    def on_broken_pipe(self) -> None:
        """Sends the rest of the output to /dev/null."""
        self.quiet = True
        # A file of a test has no descriptor.
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), self.file.fileno())
