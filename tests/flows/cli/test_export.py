"""`rlhf export`: a folder that others load, with all that it was made from."""

import json
import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.support import write_files


@pytest.mark.slow
def test_export_shows_and_copies_a_folder_that_others_can_load(rlhf, smoke_store, tmp_path):
    folder = Path(rlhf("export", "--store", smoke_store).stdout.strip())
    assert (folder / "model.safetensors").is_file()
    rlhf("export", "--store", smoke_store, "--to", tmp_path / "out")
    copied = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= copied
    assert "manifest.json" not in copied
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    assert "is not empty" in rlhf("export", "--store", smoke_store, "--to", tmp_path / "out", code=2).stderr


@pytest.mark.slow
def test_a_folder_with_another_model_is_refused(rlhf_here, smoke_store, tmp_path):
    out = write_files(tmp_path / "out", **{"model.safetensors": "another"})
    done = rlhf_here("export", "--store", smoke_store, "--to", out, code=2)
    assert "exists and is not empty" in done.stderr and (out / "model.safetensors").read_text() == "another"


def test_an_export_names_everything_that_it_was_made_from(rlhf_here, smoke_store, record):
    folder = Path(rlhf_here("export", "--store", smoke_store).stdout.strip())
    history = json.loads((folder / "provenance.json").read_text())
    nodes = record(smoke_store, "first")["nodes"]
    expected = {e["key"] for n, e in nodes.items() if not n.startswith("evaluate") and n != "export"}
    assert {h["key"] for h in history} == expected
    assert all(h["versions"] and h["config"] and "seed" in h for h in history)


@pytest.mark.slow
def test_export_verify_compares_with_transformers(rlhf, smoke_store):
    pytest.importorskip("torch")
    out = rlhf("export", "--store", smoke_store, "--verify").stdout
    assert re.search(r"20 prompts: largest difference of logits in float64 \d\.\d+e-\d\d \(allowed 1e-04\)", out)
