"""The tool `search`: the best documents of a local collection by BM25 (Robertson and Zaragoza, 2009).

Sixty lines of our own: the index is built once in the process that episodes are forked from and shared by them, needs
no arrays, and ties are in the order of the documents, which the packages for BM25 leave to a sort of floats.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

K1, B = 1.5, 0.75
"""Weight of repeated words, and of a document's length: the paper's usual values."""
SUFFIXES = (".txt", ".md")


@dataclasses.dataclass(frozen=True)
class Document:
    """A text that can be found."""

    title: str
    text: str


class Index:
    """Documents, and the words that they hold. Raises ValueError without documents."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        counts = [collections.Counter(words(f"{d.title} {d.text}")) for d in documents]
        self._lengths = [count.total() for count in counts]
        self._mean = max(1.0, sum(self._lengths) / len(documents))
        self._places: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
        for number, count in enumerate(counts):
            for word, times in count.items():
                self._places[word].append((number, times))

    def best(self, query: str, most: int) -> list[Document]:
        """At most `most` documents that hold a word of the query, the best first."""
        scores: dict[int, float] = collections.defaultdict(float)
        for word in dict.fromkeys(words(query)):
            places = self._places.get(word, [])
            weight = math.log(1 + (len(self.documents) - len(places) + 0.5) / (len(places) + 0.5))
            for number, times in places:
                length = 1 - B + B * self._lengths[number] / self._mean
                scores[number] += weight * times * (K1 + 1) / (times + K1 * length)
        found = heapq.nsmallest(most, scores, key=lambda number: (-scores[number], number))
        return [self.documents[number] for number in found]


def words(text: str) -> list[str]:
    """Words of a text for comparison."""
    return re.findall(r"\w+", text.lower())


def files(path: Path) -> list[Path]:
    """The files that hold the documents of a file or of a folder, in the order of the documents."""
    if not path.is_dir():
        return [path]
    return sorted(p for p in path.rglob("*") if p.suffix in (*SUFFIXES, ".jsonl") and p.is_file())


def documents(path: Path) -> Iterator[Document]:
    """Documents of a JSONL file with `text` (or `contents`) and `title`, or of a folder of such and of text files."""
    if path.is_dir():
        for file in files(path):
            yield from documents(file)
    elif path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                yield _document(line, f"{path}, line {number}", f"{path.stem} {number}")
    else:
        yield Document(path.stem, path.read_text(encoding="utf-8"))


def _document(line: str, place: str, name: str) -> Document:
    """The document of a line of JSON; `name` is its title where it has none."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: expected a JSON object ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected a JSON object, got {line[:40]!r}")
    text = record.get("text", record.get("contents"))
    if not isinstance(text, str):
        raise ValueError(f"{place}: no `text`: expected it, or `contents`, to be a text")
    title = next((record[key] for key in ("title", "id") if record.get(key) is not None), name)
    if not isinstance(title, str | int) or isinstance(title, bool):
        raise ValueError(f"{place}, field `title`: expected a text or a number, got {title!r:.40}")
    return Document(str(title), text)


@functools.lru_cache(maxsize=4)
def _index(path: str) -> Index:
    if not Path(path).exists():
        raise ValueError(f"tool search: {path} does not exist: expected a JSONL file, or a folder of texts")
    found = list(documents(Path(path)))
    if not found:
        raise ValueError(f"tool search: no documents in {path}: expected files {', '.join(SUFFIXES)} or .jsonl")
    return Index(found)


def make(path: str, top: int = 3, characters: int = 1000) -> Callable[[str], str]:
    """The tool.

    Args:
        path: a JSONL file, or a folder of .txt, .md and .jsonl files.
        top: documents that one search returns.
        characters: of each of them.
    """
    index = _index(path)

    def search(query: str) -> str:
        """Searches the documents for words.

        Args:
            query: Words that the documents should hold.
        """
        found = index.best(query, top)
        return "\n\n".join(f"[{d.title}]\n{d.text[:characters]}" for d in found) or "nothing found"

    return search
