"""A base model is the snapshot of its revision with every end that it names; one that is missing says how to get it."""

import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlhf.stages import base
from rlhf.stages.base import Config, run, source_digests
from rlhf.stages.common.model_source import HUB_FILES, SourceMissing, _state, locate, token_ids_of
from rlhf.stages.store.disk import make_room
from rlhf.tuning.models import huggingface
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.config import UnsupportedModel, tiny
from rlhf.tuning.models.tokenizer import CHAT_DATE, load_tokenizer, render, save_tokenizer
from tests.stages.support import context


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


def test_a_url_is_fetched_once_for_each_of_its_states(tmp_path, monkeypatch):
    import fsspec

    monkeypatch.setenv("RLHF_SCRATCH", str(tmp_path / "scratch"))
    fs, reads = fsspec.filesystem("memory"), []
    fs.pipe({"/models/tiny/config.json": b"{}", "/models/tiny/more/a.jinja": b"1", "/models/one.gguf": b"GGUF"})
    get = type(fs).get_file
    monkeypatch.setattr(type(fs), "get_file", lambda self, *a, **k: reads.append(a[0]) or get(self, *a, **k))
    url = "memory://models/tiny"
    first = locate(url)
    count = len(reads)
    assert locate(url + "/") == locate(url) == first and len(reads) == count > 1
    assert sorted(source_digests(Config(source=url))) == ["config.json", "more/a.jinja"]
    assert list(source_digests(Config(source="memory://models/one.gguf"))) == ["one.gguf"]
    # A file that no model is read from is not fetched, and a signed address is no other state.
    fs.pipe("/models/tiny/optimizer.pt", b"large")
    assert locate(url) == first and not (first / "optimizer.pt").exists()
    assert _state({"size": 1, "ETag": "a", "url": "b"}) == _state({"size": 1, "ETag": "a", "url": "c"})
    assert _state({"size": 1, "blob_id": "a"}) != _state({"size": 1, "blob_id": "b"})
    with pytest.raises(OSError, match="tells no version of a file"):
        _state({"size": 1, "name": "a"})
    fs.pipe("/models/tiny/config.json", b"[]")
    second = locate(url)
    assert (second / "config.json").read_text() == "[]" and first.exists()
    # On a full disk those that nobody has used for a while make room, as what a kill has left does.
    left, live = first.parents[1] / ".killed.part", first.parents[1] / ".live.part"
    for begun in (left, live):
        begun.mkdir()
    for old in (first.parent, *first.parent.rglob("*"), left, live):
        os.utime(old, (0, 0))
    # A long download.
    (live / "model.safetensors").write_text("written now")
    os.utime(live, (0, 0))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0, total=1))
    fs.pipe("/models/tiny/config.json", b"3")
    assert (locate(url) / "config.json").read_text() == "3"
    assert second.exists() and live.exists() and not first.exists() and not left.exists()
    with pytest.raises(SourceMissing, match="^base.source: memory://models/none cannot be read: FileNotFoundError"):
        locate("memory://models/none")


def test_half_a_copy_is_no_model(tmp_path, monkeypatch):
    import fsspec

    monkeypatch.setenv("RLHF_SCRATCH", str(tmp_path / "scratch"))
    fs = fsspec.filesystem("memory")
    fs.pipe({f"/models/half/{name}": b"{}" for name in ("config.json", "a.jinja", "tokenizer.json")})
    url = "memory://models/half"
    copy = locate(url)
    (copy / "a.jinja").unlink()
    (copy / "config.json").write_text("{")
    assert sorted(source_digests(Config(source=url))) == ["a.jinja", "config.json", "tokenizer.json"]
    assert (copy / "config.json").read_text() == "{}"
    # A kill while the copy makes room for another.
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0, total=1))
    for old in (copy.parent, *copy.parent.rglob("*")):
        os.utime(old, (0, 0))
    monkeypatch.setattr(shutil, "rmtree", lambda folder, **options: os.unlink(folder / "half" / "a.jinja"))
    make_room(copy.parents[2], 1)
    assert not copy.exists() and len(list(copy.parents[1].glob(".*.part/half/*"))) == 2
    # A download whose folder is gone in the middle.
    get = type(fs).get_file

    def gone(self, source, target, **options):
        if source.endswith("tokenizer.json"):
            os.unlink(os.path.join(os.path.dirname(target), "a.jinja"))
        return get(self, source, target, **options)

    monkeypatch.undo()
    monkeypatch.setenv("RLHF_SCRATCH", str(tmp_path / "other"))
    monkeypatch.setattr(type(fs), "get_file", gone)
    with pytest.raises(SourceMissing, match="its copy has other files, or of other sizes"):
        locate(url)
    assert not list((tmp_path / "other" / "models").rglob("half"))


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


@pytest.mark.parametrize("value", ["2", 2.0, True, ["2"], {"id": 2}])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_token_id_of_another_type_is_refused_with_file_and_field(tmp_path, value, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ValueError, match=rf"{name}: eos_token_id is .*, expected a token id or a list of them"):
        token_ids_of(tmp_path)


def test_a_config_with_a_byte_order_mark_is_read_and_one_that_is_cut_off_is_named(tmp_path):
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"eos_token_id": 2}')
    assert token_ids_of(tmp_path) == {"eos_token_id": 2}
    for text, message in (('{"eos_tok', "not readable as JSON"), ("[1]", "expected a JSON object, got list")):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=f"generation_config.json: {message}"):
            token_ids_of(tmp_path)


@pytest.fixture
def imported(tmp_path):
    """Runs the stage on a folder; returns the folder it made and its log."""

    def run(source):
        lines = []
        ctx = context(Config(source=str(source)), tmp_path / f"out-{source.name}", tmp_path, log=lines.append)
        base.run(ctx)
        return ctx.out, "\n".join(lines)

    return run


def folder(path, tokenizer, tied=True, vocabulary=None):
    config = tiny(vocabulary or len(tokenizer))
    huggingface.save_decoder(path, config, huggingface.random_params(config, 0), {"eos_token_id": 1})
    save_tokenizer(tokenizer, path)
    return path


@pytest.mark.parametrize("kind", ["other", "same", "same in another type"])
def test_a_head_that_differs_from_the_embeddings_is_kept_although_the_config_says_tied(imported, tmp_path, kind):
    source = folder(tmp_path / kind.replace(" ", "-"), byte_tokenizer())
    tensors = load_file(source / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].copy()
    if kind == "other":
        # One element of the last row.
        head[-1, -1] += 1
    tensors["lm_head.weight"] = head.astype(np.float64) if kind == "same in another type" else head
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    out, log = imported(source)
    written, config = load_file(out / "model" / "model.safetensors"), huggingface.read_config(out / "model")
    assert ("lm_head.weight differs from the embeddings" in log) == (kind == "other")
    assert config.tie_embeddings == (kind != "other") == ("lm_head.weight" not in written)
    if kind == "other":
        np.testing.assert_array_equal(written["lm_head.weight"], head)
        # The same where a folder is read directly.
        found, params = huggingface.load_decoder(source)
        assert not found.tie_embeddings
        np.testing.assert_array_equal(params["head"][...], head)


def test_a_token_without_a_row_in_the_model_is_refused_where_every_chat_has_it_and_named_elsewhere(imported, tmp_path):
    tokenizer = byte_tokenizer()
    rows = len(tokenizer)
    tokenizer.add_tokens(["<|extra|>"])
    out, log = imported(folder(tmp_path / "spare", tokenizer, vocabulary=rows))
    assert f"'<|extra|>' ({rows})" in log and f"{rows} rows" in log
    template = tokenizer.chat_template
    tokenizer.chat_template = template.replace("<|im_start|>", "<|extra|><|im_start|>")
    assert tokenizer.chat_template != template
    with pytest.raises(UnsupportedModel, match=rf"token '<\|extra\|>' has the id {rows}, the model has {rows} rows"):
        imported(folder(tmp_path / "in-template", tokenizer, vocabulary=rows))
    tokenizer.chat_template, tokenizer.eos_token = template, "<|extra|>"
    with pytest.raises(UnsupportedModel, match=r"token '<\|extra\|>'.*resize_token_embeddings"):
        imported(folder(tmp_path / "as-eos", tokenizer, vocabulary=rows))


def test_files_that_no_model_is_read_from_are_in_no_key(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    before = source_digests(Config(source=str(tmp_path)))
    (tmp_path / "README.md").write_text("a card")
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "consolidated.pth").write_bytes(b"weights")
    assert source_digests(Config(source=str(tmp_path))) == before
    (tmp_path / "special_tokens_map.json").write_text("{}")
    assert set(source_digests(Config(source=str(tmp_path)))) == {"config.json", "special_tokens_map.json"}


def test_another_chat_template_is_in_the_key_by_its_content(tmp_path):
    file, same = tmp_path / "a.jinja", tmp_path / "b.jinja"
    file.write_text("{{ messages }}")
    same.write_text("{{ messages }}")
    first, second = (source_digests(Config(source="random:tiny", chat_template=str(path))) for path in (file, same))
    assert first == second != source_digests(Config(source="random:tiny"))
    file.write_text("{{ messages }}!")
    assert source_digests(Config(source="random:tiny", chat_template=str(file))) != first
    with pytest.raises(SourceMissing, match="^base.chat_template: .*c.jinja is not a file; give the path of a Jinja"):
        source_digests(Config(source="random:tiny", chat_template=str(tmp_path / "c.jinja")))


def test_the_date_of_chats_is_a_day():
    assert Config().chat_date == CHAT_DATE
    with pytest.raises(ValueError, match="chat_date"):
        Config(chat_date="today")


def test_the_template_its_values_and_its_date_are_in_the_tokenizer(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ strftime_now('%Y') }}{{ enable_thinking }}{{ messages[0].content }}")
    settings = {"chat_template": str(tmp_path / "t.jinja"), "chat_template_kwargs": {"enable_thinking": False}}
    ctx = SimpleNamespace(
        config=Config(source="random:tiny", chat_date="2031-01-02", **settings), seed=0, out=tmp_path, log=print
    )
    run(ctx)
    made = load_tokenizer(tmp_path / "tokenizer")
    assert render(made, [{"role": "user", "content": "Hi"}]) == "2031FalseHi"
