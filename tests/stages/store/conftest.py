"""Empty stores on three file systems."""

import uuid

import pytest

from rlhf.stages.store.artifacts import Store


@pytest.fixture(params=["file", "memory", "s3"])
def store(request, tmp_path):
    """An empty store."""
    name = uuid.uuid4().hex
    url = {"file": str(tmp_path / name), "memory": f"memory://{name}"}.get(request.param)
    return Store(url or f"{request.getfixturevalue('s3')}/{name}", scratch=tmp_path / "scratch")


@pytest.fixture
def remote(s3, tmp_path):
    return Store(f"{s3}/{tmp_path.name}-{uuid.uuid4().hex}", scratch=tmp_path / "scratch")
