"""The trail: an append-only log of changes of a store, with time, user, command and code.

    <store>/trail/<time>-<id>.json   one change, or the beginning or the end of a long one

An object is created in one step and never written again. A failure to write the trail stops no command.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.stages.store import readonly
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.exclusive import create
from rlhf.stages.store.keys import HIDDEN, is_secret, without_userinfo
from rlhf.stages.store.pins import who

FOLDER = "trail"
PROJECT = Path(__file__).resolve().parents[2]
_NAMES = re.compile(r"""(?<=[\s\[,"'])--?([\w-]+)|([\w.-]+)["']?\s*[=:]|[\[,]\s*["']?([\w-]+)(?=["']?\s*,)""")
"""Names of values in an argument: options, names before a colon or an equals sign, and items of lists before others."""
_HIDES = re.compile(r"\b(Bearer|Basic|Token)\s+[^\s,}\"']|engine\b.*\benvironment\b", re.IGNORECASE)
"""Headers with a secret, and variables of an engine, of which any may be a secret."""


def append(store: Store, what: str, **fields: Any) -> str | None:
    """Append a change to the trail; return None, or the reason of a failure.

    fields: run, outcome, forced and others, as JSON; command, if it is not that of this process.
    """
    at = datetime.datetime.now(datetime.UTC)
    event = {"at": at.isoformat(timespec="milliseconds"), "by": who(), "what": what}
    event |= {"command": without_secrets(sys.argv)} | fields | checkout(PROJECT)
    try:
        readonly.refuse(store)
        store.fs.makedirs(store.join(FOLDER), exist_ok=True)
        name = f"{at.strftime('%Y%m%dT%H%M%S%f')}-{uuid.uuid4().hex[:8]}.json"
        create(store, store.join(FOLDER, name), json.dumps(event, indent=1, ensure_ascii=False, default=str).encode())
    except Exception as e:
        return f"{store.address(FOLDER)} cannot be written ({type(e).__name__}: {e})"
    return None


def events(store: Store, most: int | None = None) -> list[dict[str, Any]]:
    """Return the entries of the trail, or the newest `most` of them, oldest first.

    It skips objects that are not valid JSON, and the beginning of a change that has ended.
    """
    found: list[dict[str, Any]] = []
    ended: set[Any] = set()
    # Names begin with the time, so only the newest are read.
    for name in reversed(store.names(FOLDER)):
        if most is not None and len(found) >= most:
            break
        event = None
        with contextlib.suppress(ArtifactError):
            event = store.read_json(FOLDER, name) if name.endswith(".json") else None
        if not isinstance(event, dict) or not isinstance(event.get("at"), str):
            continue
        if event.get("state") == "finished" and "change" in event:
            ended.add(event["change"])
        if event.get("state") != "begun" or event.get("change") not in ended:
            found.append(event)
    return sorted(reversed(found), key=lambda event: event["at"])


def without_secrets(command: Sequence[str]) -> str:
    """Return a command line without the values of secrets, and without user and password of URLs."""
    words: list[str] = []
    for word in command:
        option = words[-1] if words and words[-1].startswith("--") else ""
        if _is_secret(option) and not word.startswith("--"):
            words.append(HIDDEN)
        elif _HIDES.search(word) or any(map(_is_secret, map("".join, _NAMES.findall(word)))):
            name = re.match(r"(--set=)?[^=\s]+=", word)
            words.append(f"{name[0] if name else ''}{HIDDEN}")
        else:
            words.append(without_userinfo(word))
    # The folder of the program tells nothing.
    words[:1] = [Path(word).name for word in words[:1]]
    return " ".join(f"'{word}'" if re.search(r"\s", word) else word for word in words)


def _is_secret(name: str) -> bool:
    return is_secret(name.rpartition(".")[2].replace("-", "_"))


def checkout(folder: Path) -> dict[str, Any]:
    """Return the commit of a checkout and whether files of it differ; both None if git does not know the folder."""
    # Git also looks in the folders above.
    if (folder / ".git").exists():
        command = ["git", "--no-optional-locks", "-C", str(folder), "describe", "--always", "--dirty"]
        command += ["--exclude=*", "--abbrev=40"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            commit, _, dirty = done.stdout.strip().partition("-")
            return {"commit": commit, "dirty": bool(dirty)}
    return {"commit": None, "dirty": None}
