"""A base model is the snapshot of its revision with every end that it names; one that is missing says how to get it."""

import json

import pytest

from stages.base import HUB_FILES, Config, SourceMissing, locate, source_digests, token_ids_of


def test_a_hub_model_is_its_snapshot_of_that_revision(tmp_path, monkeypatch):
    calls = []

    def snapshot_download(repository, **options):
        calls.append((repository, options))
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert locate("hub:org/name@v2") == tmp_path
    assert calls == [("org/name", {"revision": "v2", "allow_patterns": HUB_FILES})]
    assert list(source_digests(Config(source="hub:org/name"))) == ["config.json"]
    assert calls[1][1]["revision"] is None


def test_a_name_of_the_hub_without_its_prefix_is_told_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceMissing, match=r"HuggingFaceTB/Smol-1 does not exist; .* is hub:HuggingFaceTB/Smol-1$"):
        locate("HuggingFaceTB/Smol-1")
    with pytest.raises(SourceMissing, match=r"\./a/b does not exist$|a/b does not exist$"):
        locate("./a/b")


@pytest.mark.parametrize("name", ["org/no-such-model", "not//a-name"])
def test_without_the_hub_the_error_says_what_to_do(name, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SourceMissing, match=f"^base.source: {name} is not .*\n*hf download {name} --local-dir FOLDER"):
        locate(f"hub:{name}")


@pytest.mark.parametrize(
    "config, generation, expected", [(2, None, 2), (2, [7, 2], [2, 7]), ([2, 3], 3, [2, 3]), (None, None, None)]
)
def test_every_end_that_config_or_generation_config_names_is_kept(tmp_path, config, generation, expected):
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert token_ids_of(tmp_path) == {"bos_token_id": 1} | ({} if expected is None else {"eos_token_id": expected})
