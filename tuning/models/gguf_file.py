"""A GGUF file's metadata and tensors, of any architecture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

if TYPE_CHECKING:
    from gguf import GGUFReader

T = TypeVar("T")


def _reader(path: Path) -> GGUFReader:
    from gguf import GGUFReader

    class Reader(GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            # Each string of the metadata is several views, which cost three times as much of numpy's class for maps.
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            # The reader would go through an array of any count, with empty values past the file's end.
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError("it ends before its values do")
            return super()._get(offset, dtype, count, override_order)

    return Reader(path)


class GGUFFile:
    """A memory-mapped GGUF file with typed access to its metadata; any architecture.

    Attributes: `path`, and `reader`, the `gguf.GGUFReader`. Opening parses all metadata (half a second for a vocabulary
    of 49,152 tokens, nearly all of it spent on the string arrays); tensor data stays on disk until it is read.

    Raises FileNotFoundError for a missing file, ValueError for one that is not GGUF or is cut short.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such file; give the path of a .gguf file")
        try:
            self.reader: GGUFReader = _reader(self.path)
        except (ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
            # The reader indexes the map without bounds checks, so a cut file surfaces as any of these.
            raise ValueError(
                f"{self.path}: not a readable GGUF file ({error}); check that the download is complete"
            ) from error

    def get(self, key: str, kind: type[T]) -> T | None:
        """The metadata value of `key`, None if absent; ValueError if it is not a `kind` (int is accepted as float).

        A float32 value is returned as the shortest decimal that rounds to it, so 1e-5 reads 1e-05 and not
        9.99999974e-06.
        """
        from gguf import GGUFValueType

        field = self.reader.get_field(key)
        if field is None:
            return None
        value: Any = field.contents()
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        # bool is a subclass of int, and a flag is never a size.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{self.path}: metadata {key} is a {type(value).__name__}, expected {kind.__name__}")
        if isinstance(value, float) and field.types[-1] == GGUFValueType.FLOAT32:
            return cast(T, float(str(np.float32(value))))
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """As `get`, but an absent key is a ValueError."""
        value = self.get(key, kind)
        if value is None:
            raise ValueError(f"{self.path}: metadata {key} is missing; the file is incomplete or of another format")
        return value
