"""The data files of any folder, of a folder that `datasets` saved, and of a clone of a data set on the hub.

A source with several splits or configurations is refused by their names.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError

from rlhf.tuning.data.remote import SourceError, again

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words of paths that name a split, as in `datasets.data_files`."""
ModelT = TypeVar("ModelT", bound=BaseModel)
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")


CARD_BYTES = 2**20
"""Limit of the bytes of a card that are read."""


class _Splits(BaseModel):
    splits: list[str] = Field(min_length=1)


class _File(BaseModel):
    filename: str


class _State(BaseModel):
    files: list[_File] = Field(alias="_data_files")
    indices: list[Any] | None = Field(None, alias="_indices_data_files")


def _read(kind: type[ModelT], fs: Any, path: str) -> ModelT:
    """Read a file that `datasets` wrote. Raises SourceError for another form."""
    try:
        return kind.model_validate_json(fs.cat_file(path))
    except ValidationError as error:
        raise SourceError(f"{path} is not of `datasets`: {error}") from None


def files_of(fs: Any, folder: str, source: str, suffixes: tuple[str, ...]) -> list[str]:
    """Return the data files below a folder; for a folder saved by `datasets`, the files that its state lists."""
    listed = again(lambda: fs.find(folder), source)
    names = {name[len(folder) + 1 :]: name for name in listed}
    if "dataset_dict.json" in names:
        splits = _read(_Splits, fs, names["dataset_dict.json"]).splits
        if len(splits) > 1:
            raise SourceError(
                f"source {source!r} holds the splits {', '.join(splits)}: name one, as {source}/{splits[0]}"
            )
        if not any(name.startswith(f"{splits[0]}/") for name in names):
            raise SourceError(f"source {source!r} lists the split {splits[0]!r}, and has no folder of that name")
        return files_of(fs, f"{folder}/{splits[0]}", source, suffixes)
    if "state.json" in names:
        state = _read(_State, fs, names["state.json"])
        # An index selects and orders rows of the data files; reading them alone would give other rows.
        if state.indices:
            raise SourceError(f"source {source!r} has an index next to its data: save it after `flatten_indices()`")
        wanted = [entry.filename for entry in state.files]
        if missing := [name for name in wanted if name not in names]:
            raise SourceError(f"{names['state.json']} lists {missing[0]!r}, which is not in the folder: save it again")
        return [names[name] for name in wanted]
    if "README.md" in names:
        _check_configurations(fs.cat_file(names["README.md"], end=CARD_BYTES), source)
    hidden = (".", "_")
    shown = [name for name in names if not any(step.startswith(hidden) for step in name.split("/"))]
    return [
        names[name]
        for name in shown
        if name.lower().endswith(suffixes) and name.rpartition("/")[2] not in _DESCRIPTIONS
    ]


def _check_configurations(card: bytes, source: str) -> None:
    """Raise SourceError if the card of a data set describes several configurations."""
    header = re.match(rb"---\r?\n(.*?)\n---", card, re.DOTALL)
    try:
        # This loader leaves out merges (`<<`), which could multiply a small card.
        configs = yaml.load(header[1], Loader=yaml.BaseLoader)["configs"] if header else []
        names = [name for config in configs if isinstance(name := config["config_name"], str)]
    except (yaml.YAMLError, LookupError, TypeError, RecursionError):
        # The card is for people: an unreadable header describes no configurations.
        return
    if len(names) > 1:
        raise SourceError(
            f"source {source!r} holds the configurations {', '.join(names)}: name one by its folder or a pattern "
            "(README.md lists their files)"
        )


def check_one_split(paths: Iterable[str], source: str) -> None:
    """Raise SourceError if a source's files belong to several splits by their names: a test split would be trained.

    The last word of a path that names a split counts, below the folder that all paths share.
    """
    paths = list(paths)
    shared = posixpath.commonpath(paths) if len(paths) > 1 else ""
    example: dict[str, str] = {}
    for path in paths if shared else ():
        words = re.split(r"[^a-z]+", path.removeprefix(shared).lower())
        if named := [_SPLITS[word] for word in words if word in _SPLITS]:
            example.setdefault(named[-1], path)
    if len(example) > 1:
        name = next(iter(example.values()))
        raise SourceError(
            f"source {source!r} holds the splits {', '.join(sorted(example))}: name one by a folder or a pattern that "
            f"matches its files alone, such as {name}"
        )
