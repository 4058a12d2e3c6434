"""A Slurm of two nodes for the tests of a module."""

from collections.abc import Iterator

import pytest

from tests.infra.slurm import Slurm, slurm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started
