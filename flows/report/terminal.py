"""Consoles that are safe for foreign texts, and survive the end of their reader."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.text import Text

from rlhf.tuning.names import plain


def log_width() -> int | None:
    """Return the width of output to a file: Rich's default of 80 is too narrow for a round. None on a terminal."""
    return None if sys.stdout.isatty() else 160


class PlainConsole(Console):
    """A console that replaces control characters, with which a completion could rewrite the terminal."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As `Console.render`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


class LastingConsole(PlainConsole):
    """A console that becomes silent after its reader has ended (`| head`, a `tee`). Rich would exit."""

    line_start = ""
    """The text before each line; with one there is no live display, so that lines of several consoles can alternate."""

    @property
    def is_terminal(self) -> bool:
        """As `Console.is_terminal`."""
        return super().is_terminal and not self.line_start

    def print(self, *objects: Any, **options: Any) -> None:
        """As `Console.print`."""
        if self.line_start:
            with self.capture() as found:
                super().print(*objects, **options)
            objects = (Text.from_ansi(textwrap.indent(found.get(), self.line_start, bool)),)
            options = {"soft_wrap": True, "end": ""}
        super().print(*objects, **options)

    def _write_buffer(self) -> None:
        try:
            super()._write_buffer()
        except OSError as error:
            # A closed terminal, or a full disk.
            raise BrokenPipeError from error

    def on_broken_pipe(self) -> None:
        """Send the rest of the output to /dev/null."""
        self.quiet = True
        # A test's file has no descriptor.
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), self.file.fileno())
