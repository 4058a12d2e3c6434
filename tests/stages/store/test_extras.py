"""A file system that is not installed is an error that says which extra of this project brings it."""

import pytest
from fsspec.registry import _registry

from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.tuning.data.remote import SourceError, filesystem


def test_a_store_and_a_source_say_which_extra_to_install(monkeypatch):
    for module in ("gcsfs", "s3fs"):
        # As Python marks what cannot be imported.
        monkeypatch.setitem(__import__("sys").modules, module, None)
    for protocol in ("gs", "gcs", "s3", "s3a"):
        # fsspec keeps the classes that it has imported.
        monkeypatch.delitem(_registry, protocol, raising=False)
    for url, extra in {"gs://bucket/x": "gcs", "s3://user:abc@bucket/x": "s3"}.items():
        with pytest.raises(ArtifactError, match=rf"pip install 'rlhf-pipeline\[{extra}\]'") as error:
            Store(url)
        assert "abc" not in str(error.value)
        with pytest.raises(SourceError, match=rf"pip install 'rlhf-pipeline\[{extra}\]'"):
            filesystem(url)
