"""The Markdown pages of the project and their fenced blocks."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from tests.support import PACKAGES, ROOT

PAGES = sorted(
    page.relative_to(ROOT)
    for place in ("*.md", "docs/**/*.md", "examples/*.md", "tests/**/*.md", *(f"{p}/**/*.md" for p in PACKAGES))
    for page in ROOT.glob(place)
)
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    options: list[str]
    text: str

    @property
    def file(self) -> str | None:
        return next((o.removeprefix("file=") for o in self.options if o.startswith("file=")), None)

    @property
    def runs(self) -> bool:
        return "no-run" not in self.options


def text_of(page: Path) -> str:
    return (ROOT / page).read_text()


def blocks_of(page: Path) -> list[Block]:
    return [Block(language, options.split(), text) for language, options, text in FENCE.findall(text_of(page))]


def commands_of(block: Block) -> list[list[str]]:
    """The command lines of a shell block, comments left out, continued lines joined."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]
