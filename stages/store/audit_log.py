"""The trail: what has changed a store, when, by whom and with which code. It only grows.

    <store>/trail/<time>-<id>.json   one change, or the beginning or the end of a long one

An object is created in one step and never written again. A trail that cannot be written stops nothing.
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

from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.exclusive import create
from rlhf.stages.store.keys import HIDDEN, is_secret, without_userinfo
from rlhf.stages.store.pins import who

FOLDER = "trail"
PROJECT = Path(__file__).resolve().parents[2]
GIT_SECONDS = 10.0
"""Longest wait for git."""
_NAMED = re.compile(r"([\w.-]+?)(\s*[=:]\s*)([^\s,}&]+)")
"""A name and its value in an argument."""
_NAMES = re.compile(r"[\w.-]+")
_BEARER = re.compile(r"\b(Bearer|Basic|Token)\s+[^\s,}\"']+", re.IGNORECASE)


def append(store: Store, what: str, **fields: Any) -> str | None:
    """Adds what was done to the trail; returns None, or why it could not be written.

    fields: run, outcome, forced and what else there is to say, as JSON; command, if it is not that of this process.
    """
    at = datetime.datetime.now(datetime.UTC)
    event = {"at": at.isoformat(timespec="milliseconds"), "by": who(), "what": what}
    event |= {"command": without_secrets(sys.argv)} | fields | checkout(PROJECT)
    try:
        store.fs.makedirs(store.join(FOLDER), exist_ok=True)
        name = f"{at.strftime('%Y%m%dT%H%M%S%f')}-{uuid.uuid4().hex[:8]}.json"
        create(store, store.join(FOLDER, name), json.dumps(event, indent=1, ensure_ascii=False, default=str).encode())
    except Exception as e:
        return f"{store.address(FOLDER)} cannot be written ({type(e).__name__}: {e})"
    return None


def events(store: Store, most: int | None = None) -> list[dict[str, Any]]:
    """What the trail has, or the newest `most` of it, oldest first.

    An object that is no JSON is left out; where a change has ended, so is its beginning.
    """
    found: list[dict[str, Any]] = []
    ended: set[Any] = set()
    # Names begin with the time: the newest are read alone.
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
    """A command line without what it may hold of secrets: passwords of URLs, values of variables and keys."""
    shown: list[str] = []
    for word in command:
        option = shown[-1].lstrip("-").replace("-", "_") if shown and shown[-1].startswith("--") else ""
        shown.append(HIDDEN if option and is_secret(option) and not word.startswith("--") else _shown(word))
    if shown:
        # Where a program is installed says nothing of what it did.
        shown[0] = Path(shown[0]).name
    return " ".join(f"'{word}'" if re.search(r"\s", word) else word for word in shown)


def _shown(word: str) -> str:
    if word.startswith("--set="):
        return f"--set={_shown(word.removeprefix('--set='))}"
    name, equals, value = word.partition("=")
    # The variables of an engine, of which any may be a secret.
    if equals and (re.search(r"engine\b.*\benvironment\b", word) or _is_secret(name.strip()) or _holds_one(value)):
        return f"{name}={HIDDEN}"
    return _NAMED.sub(_hidden, _BEARER.sub(rf"\1 {HIDDEN}", without_userinfo(word)))


def _holds_one(value: str) -> bool:
    """Whether a mapping or list has a name of a secret anywhere: where in it the secret stands is not guessed."""
    inside = value.lstrip()[:1] in ("{", "[")
    return inside and (_BEARER.search(value) is not None or any(map(_is_secret, _NAMES.findall(value))))


def _hidden(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}{HIDDEN}" if _is_secret(found[1]) else found[0]


def _is_secret(name: str) -> bool:
    last = name.lstrip("-").rpartition(".")[2].replace("-", "_")
    return is_secret(last) or last.lower() == "authorization"


def checkout(folder: Path) -> dict[str, Any]:
    """The commit of a checkout and whether files of it differ; both None where it is none, or git does not say."""
    nothing: dict[str, Any] = {"commit": None, "dirty": None}
    if not (folder / ".git").exists():
        return nothing
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_SECONDS, check=True
            ).stdout.strip()
            for arguments in (
                ["rev-parse", "HEAD"],
                ["--no-optional-locks", "status", "--porcelain", "--untracked-files=no"],
            )
        )
    except (OSError, subprocess.SubprocessError):
        return nothing
    return {"commit": commit, "dirty": bool(changes)}
