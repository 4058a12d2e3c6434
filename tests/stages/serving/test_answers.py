"""Text of an answer as its tokens arrive, and their log-probabilities."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlhf.stages.serving.answers import Text, chat_logprobs
from rlhf.stages.serving.api import Message
from rlhf.stages.serving.server import Server
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from tests.tuning.chat.templates import smollm

TEXT = "naïve 🦙 — 漢字\n"


def sentencepiece():
    """Bytes as SentencePiece has them, and a few words."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁naive—", "\n"]
    core = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>"))
    strip = decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("make", [byte_tokenizer, smollm, sentencepiece])
def test_a_text_in_pieces_is_the_whole_text_and_few_tokens_are_decoded_again(make, step):
    tokenizer = make()
    if tokenizer is None:
        pytest.skip("the package of SmolLM2 is not installed")
    said = (TEXT * 50).replace(" ", "▁") if make is sentencepiece else TEXT * 50
    tokens, decoded = tokenizer.encode(said, add_special_tokens=False), []
    text = Text(tokenizer, set(), ["\x00never"])
    decode = text.decode
    text.decode = lambda tokens: decoded.append(len(tokens)) or decode(tokens)
    sent = "".join(text.add(tokens[i : i + step], i + step >= len(tokens)) for i in range(0, len(tokens), step))
    assert sent == text.sent == tokenizer.decode(tokens)
    # Of each update, not of the whole answer.
    assert max(decoded) < 30


def test_log_probabilities_have_the_bytes_of_tokens_that_are_characters():
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    rows = chat_logprobs(Text(tokenizer, set(), []), tokens, [-1.0] * len(tokens), [], 0)["content"]
    assert "\ufffd" in [row["token"] for row in rows]
    for row in rows:
        assert row["bytes"] == (None if row["token"] == "\ufffd" else list(row["token"].encode()))


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": None}, {"type": "text", "text": ["a"]}])
def test_a_part_without_text_is_refused_and_no_word_none_is_read(part):
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert Message(role="user", content=parts).text == "a b"
    with pytest.raises(ValueError, match="expected parts of type 'text' with a string in `text`"):
        Message(role="user", content=[*parts, part])


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


def test_a_text_begins_with_the_bos_that_documents_have():
    tokenizer = sentencepiece()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    core, bos = tokenizer.backend_tokenizer, tokenizer.bos_token_id
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    server = Server(SimpleNamespace(generation=0), tokenizer, "tiny", (tokenizer.eos_token_id,), 200)
    space, letter = tokenizer.convert_tokens_to_ids(["▁", "n"])
    assert server._prompt_ids("n") == [bos, space, letter] == tokenizer.encode("n")
    assert server._prompt_ids([letter]) == [letter]
    # Without a BOS of its own the tokenizer adds none.
    core.post_processor = None
    assert server._prompt_ids("n") == [space, letter]
