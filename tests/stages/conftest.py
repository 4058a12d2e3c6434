"""A store with what a run leaves."""

import pytest

from tests.stages.gate.support import Lab


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)
