"""What a program prints never ends it, whatever the encoding of the console or the log."""

import io
import sys

import pytest

from rlhf.flows.report.console import ConsoleReporter
from rlhf.stages.worker.interpreter import escape_output


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1"])
def test_characters_that_the_console_lacks_are_escaped(monkeypatch, encoding):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    escape_output()
    ConsoleReporter().line("5 of 7 records kept (field `x\N{CAT FACE}`), \u05e9")
    print("\N{CAT FACE}", flush=True)
    assert written.getvalue().decode(encoding) == (
        "  5 of 7 records kept (field `x\\U0001f431`), \\u05e9\n\\U0001f431\n"
    )


def test_output_that_is_no_file_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    escape_output()
    assert sys.stdout is None
