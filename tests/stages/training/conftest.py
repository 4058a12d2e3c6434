"""A random base model, and pairs, labels and completions for it."""

from typing import Any

import pytest

from rlhf.stages import base as base_model
from rlhf.stages.common.compilation import configure_jax
from tests.stages.training.support import Folder, data, perform, rows_of


@pytest.fixture(scope="module")
def memory() -> dict[str, Any]:
    """What a worker keeps from stage to stage; compiled programs are kept for the next session, as in a worker."""
    configure_jax()
    return {}


@pytest.fixture(scope="module")
def base(tmp_path_factory, memory) -> Folder:
    config = base_model.Config(source="random:tiny")
    return perform(base_model, config, tmp_path_factory.mktemp("base"), memory)[1]


@pytest.fixture
def judged(tmp_path) -> Folder:
    names = {"preference": 32, "heldout_preference": 12, "labelled": 48, "heldout_labelled": 24, "sft": 32}
    return data(tmp_path / "data", **{n: rows_of(n, c, 500 * n.startswith("heldout")) for n, c in names.items()})
