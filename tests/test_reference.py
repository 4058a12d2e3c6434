"""The pages of docs/reference: generated ones are up to date, and the others name everything that they list."""

from __future__ import annotations

from docs.generate import COMMAND, pages


def test_generated_pages_are_up_to_date():
    for file, text in pages().items():
        assert file.read_text() == text, f"{file.name} is out of date: run `{COMMAND}`"
