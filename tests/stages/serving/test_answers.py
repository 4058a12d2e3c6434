"""Log-probabilities of an answer: the bytes of its tokens are those of its text, also where a character has several."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from stages.serving.answers import Text, chat_logprobs
from stages.serving.api import Message
from tests.tuning.chat.templates import smollm
from tuning.models.byte_tokenizer import byte_tokenizer

TEXT = "naïve 🦙 — 漢字\n"


def sentencepiece():
    """Bytes as SentencePiece has them, and a few words."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁naive—", "\n"]
    core = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>"))
    strip = decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@pytest.mark.parametrize("make", [byte_tokenizer, smollm, sentencepiece])
def test_the_bytes_of_tokens_are_those_of_their_text(make):
    tokenizer = make()
    if tokenizer is None:
        pytest.skip("the package of SmolLM2 is not installed")
    text = TEXT.replace(" ", "▁") if make is sentencepiece else TEXT
    tokens = tokenizer.encode(text, add_special_tokens=False)
    rows = chat_logprobs(Text(tokenizer, set(), []), tokens, [-1.0] * len(tokens), [], 0)["content"]
    # Some token is a part of a character alone.
    assert "\ufffd" in [row["token"] for row in rows]
    assert bytes(byte for row in rows for byte in row["bytes"]).decode() == TEXT


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": None}, {"type": "text", "text": ["a"]}])
def test_a_part_without_text_is_refused_and_no_word_none_is_read(part):
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert Message(role="user", content=parts).text == "a b"
    with pytest.raises(ValueError, match="a part of type 'text' needs a string in `text`"):
        _ = Message(role="user", content=[*parts, part]).text


@pytest.mark.parametrize(
    ("said", "stop", "shown"), [("4\nQuestion: x", "Question:", "4\n"), ("Answer: 3", "Answer:", "")]
)
@pytest.mark.parametrize("step", [1, 4, 6])
def test_no_part_of_a_stop_string_is_sent(said, stop, shown, step):
    tokenizer = byte_tokenizer()
    tokens, text, sent = tokenizer.encode(said, add_special_tokens=False), Text(tokenizer, set(), [stop, "x" * 20]), ""
    for i in range(0, len(tokens), step):
        sent += text.add(tokens[i : i + step], i + step >= len(tokens))
    assert sent == text.sent == shown
