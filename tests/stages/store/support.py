"""A store as another machine sees it."""

import uuid
from pathlib import Path

from rlhf.stages.store.artifacts import Store


def fresh(store: Store, tmp_path: Path) -> Store:
    """The same store as another machine sees it."""
    return Store(store.url, scratch=tmp_path / uuid.uuid4().hex)
