"""Optional packages of this project: which extra installs the file system of a URL."""

from __future__ import annotations

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


def remedy(url: str, error: Exception) -> str:
    """The remedy for an ImportError of fsspec for this URL."""
    extra = EXTRAS.get(url.partition("://")[0])
    return str(error) if extra is None else f"its file system is not installed: pip install 'rlhf-pipeline[{extra}]'"
