"""Pages, docstrings and messages are plain English: words that this project overused may only become rarer.

The limits are the counts of today. Lower a limit when you lower a count; docs of other projects of the field have at
most one of each in 10,000 words.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("flows", "stages", "tuning")
WORDS = {
    "told": r"\btold\b",
    "beside": r"\bbeside\b",
    "behind": r"\bbehind\b",
    "made again": r"\bm(?:ade|ake|akes|aking) (?:it )?(?:again|anew)\b",
    "what": r"(?:^|[.;:,(]\s|\b(?:and|or|but|of|that|is|to|with|for|in|from|by)\s)what\b",
}
LIMITS = {
    "pages": {"told": 5, "beside": 25, "behind": 26, "made again": 7, "what": 130},
    "docstrings": {"told": 43, "beside": 79, "behind": 107, "made again": 23, "what": 692},
    "messages": {"told": 5, "beside": 11, "behind": 13, "made again": 15, "what": 39},
}


def pages() -> str:
    files = [p for p in ROOT.rglob("*.md") if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)]
    return "\n".join(re.sub(r"```.*?```", "", path.read_text(), flags=re.S) for path in files)


def texts(are_docstrings: bool) -> str:
    found = []
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
        strings = [n for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        found += [str(n.value) for n in strings if (id(n) in docstrings) == are_docstrings]
    return "\n".join(found)


@pytest.mark.parametrize("kind", LIMITS)
def test_overused_words_become_rarer(kind):
    text = pages() if kind == "pages" else texts(kind == "docstrings")
    counts = {name: len(re.findall(pattern, text, re.I | re.M)) for name, pattern in WORDS.items()}
    above = {name: f"{n}, the limit is {LIMITS[kind][name]}" for name, n in counts.items() if n > LIMITS[kind][name]}
    assert above == {}
