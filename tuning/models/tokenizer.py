"""Tokenizers: build one from a GGUF file, save and load it, and encode chat prompts and completions.

Importing this module is cheap: `transformers` and `tokenizers` are imported inside the functions, and neither needs
torch. A tokenizer here is always a `transformers.PreTrainedTokenizerFast`.

Source: the pre-tokenizers follow llama.cpp (src/llama-vocab.cpp, llm_tokenizer_bpe). `transformers`' own GGUF loader
drops the digit splitting of the "smollm" type, so it is not used.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlhf.tuning.models.gguf_file import GGUFFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# tokenizer.ggml.token_type values (gguf.TokenType).
_CONTROL: Final = 3
_USER_DEFINED: Final = 4

# Written by transformers into tokenizer_config.json: how the tokenizer was loaded, not what it is.
_LOAD_STATE: Final = ("is_local", "local_files_only", "name_or_path")


def tokenizer_from_gguf(path: str | Path | GGUFFile) -> PreTrainedTokenizerFast:
    """Build the byte-level BPE tokenizer that a GGUF file, given as a path or already open, describes.

    Control tokens become special tokens, user-defined tokens are matched whole but are not special. The chat template
    and the bos, eos, unk and pad tokens come from the metadata, each None where it has none; model_max_length is the
    context length. Bytes without a token in the vocabulary are dropped on encoding, as in llama.cpp.

    Raises FileNotFoundError for a missing file; ValueError, naming file and field, for one that is not GGUF, for a
    tokenizer.ggml.model other than gpt2, for an unsupported tokenizer.ggml.pre, for automatic bos, eos or space
    prefixes, and for metadata that is missing or inconsistent.
    """
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers import pre_tokenizers as pre
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    file = path if isinstance(path, GGUFFile) else GGUFFile(path)
    # Byte-level BPE. Another pre-tokenizer needs a test against llama.cpp or the original tokenizer.json.
    for key, supported in (("model", "gpt2"), ("pre", "smollm")):
        if (value := file.require(f"tokenizer.ggml.{key}", str)) != supported:
            raise ValueError(f"{file.path}: tokenizer.ggml.{key} is {value!r}; supported: {supported}")
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if file.get(f"tokenizer.ggml.{key}", bool):
            raise ValueError(f"{file.path}: tokenizer.ggml.{key} is true; supported: false")

    tokens: list[str] = file.require("tokenizer.ggml.tokens", list)
    types: list[int] = file.require("tokenizer.ggml.token_type", list)
    merges: list[str] = file.require("tokenizer.ggml.merges", list)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} entries, {len(vocabulary)} of them distinct, and "
            f"token_type has {len(types)}; all three must agree"
        )
    pairs: Any = [tuple(line.split(" ", 1)) for line in merges]
    try:
        core = Tokenizer(BPE(vocab=vocabulary, merges=pairs))
    except Exception as error:  # tokenizers raises a bare Exception for a merge outside the vocabulary
        raise ValueError(f"{file.path}: tokenizer.ggml.merges does not fit the vocabulary ({error})") from error
    digits, letters = pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False, use_regex=True)
    core.pre_tokenizer = pre.Sequence([digits, letters])
    core.decoder = decoders.ByteLevel()
    typed = list(zip(tokens, types, strict=True))
    core.add_special_tokens([AddedToken(token, normalized=False) for token, kind in typed if kind == _CONTROL])
    core.add_tokens([AddedToken(token, normalized=False) for token, kind in typed if kind == _USER_DEFINED])

    def token_of(name: str) -> str | None:
        key = f"tokenizer.ggml.{name}_token_id"
        index = file.get(key, int)
        if index is None:
            return None
        if not 0 <= index < len(tokens):
            raise ValueError(f"{file.path}: {key} is {index}, outside the vocabulary of {len(tokens)} tokens")
        return tokens[index]

    architecture = file.require("general.architecture", str)
    build: Any = PreTrainedTokenizerFast  # its constructor is untyped
    tokenizer: PreTrainedTokenizerFast = build(
        tokenizer_object=core,
        bos_token=token_of("bos"),
        eos_token=token_of("eos"),
        unk_token=token_of("unknown"),
        pad_token=token_of("padding"),
        model_max_length=file.require(f"{architecture}.context_length", int),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = file.get("tokenizer.chat_template", str)
    return tokenizer


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Load a saved tokenizer from a local folder, never from the hub; tokenizer.json is used as it stands.

    Raises FileNotFoundError if the folder has no tokenizer.json.
    """
    from transformers import PreTrainedTokenizerFast

    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{folder}: no tokenizer.json: save a fast tokenizer there with its save_pretrained")
    # Not AutoTokenizer: with a config.json next to it, that may pick a class that rebuilds the pre-tokenizer.
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> None:
    """Write the tokenizer as files that `load_tokenizer` and `AutoTokenizer` of transformers 4 and 5 read.

    The same tokenizer gives the same bytes, also after it was loaded from elsewhere or used with padding or
    truncation. Creates the folder; replaces the tokenizer files that are in it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # transformers sets both on every call, and the state of the last call would be saved.
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    if not tokenizer.chat_template:
        # save_pretrained leaves the template of an earlier tokenizer in place, and loading would pick it up.
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(str(folder))
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    for key in _LOAD_STATE:
        config.pop(key, None)
    # Names of transformers 5 that release 4 does not know; both know these.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


CHAT_DATE: Final = "2024-07-26"
"""The day that chat templates read as today's: Llama's default. `base.chat_date` sets another one."""
_DATE_KEY: Final = "chat_template_date"
# Directives of strftime, which templates pass to `strftime_now`.
_DIRECTIVES: Final = ("-d", "-m", "-y", "-H", "-I", "-M", *"aAwdbBmyYHIpMSfjUWcxXGuV")


def with_template(
    tokenizer: PreTrainedTokenizerFast,
    template: str | None,
    defaults: Mapping[str, Any] | None,
    date: str,
) -> None:
    """Give the tokenizer another chat template, values that its template reads by default, and a date.

    `defaults` become part of the template, so that every program that loads the tokenizer renders with them. A value
    that a caller passes replaces its default.

    Raises ValueError for defaults without a template, and for one that a caller cannot pass.
    """
    if template is not None:
        tokenizer.chat_template = template
    if defaults:
        _check_options(tokenizer, defaults)
        given: Any = tokenizer.chat_template
        if not given:
            raise ValueError("the tokenizer has no chat template that could read base.chat_template_kwargs")
        lines = (
            f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}"
            for name, value in defaults.items()
        )
        # The empty expression keeps a line break at the template's beginning, which Jinja removes after a block.
        prefix = "".join(lines) + "{{ '' }}"
        named = {name: prefix + text for name, text in given.items()} if isinstance(given, dict) else prefix + given
        tokenizer.chat_template = named
    if date != CHAT_DATE:
        tokenizer.init_kwargs[_DATE_KEY] = date


def _literal(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def render(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    header: bool = False,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The text of the messages under the chat template: the only call of a template in this project (R31).

    `header`: whether the text ends in the header of the assistant's turn. `options`: values that the template reads,
    such as `enable_thinking`. The template's clock (`strftime_now`) reads the tokenizer's date.

    Raises ValueError without messages, without a chat template, and for an option with a reserved name; errors of a
    template, such as jinja2.TemplateError, pass.
    """
    if not messages:
        raise ValueError("messages is empty; give at least one message with role and content")
    text: Any = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=[dict(tool) for tool in tools] or None,
        add_generation_prompt=header,
        tokenize=False,
        chat_template=template_of(tokenizer, bool(tools)),
        **_check_options(tokenizer, options or {}),
    )
    return str(text)


def template_of(tokenizer: PreTrainedTokenizerFast, tools: bool) -> str:
    """The text of the chat template, its clock set to the tokenizer's date. Raises ValueError where there is none."""
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; name a file with one in base.chat_template")
    template: Any = tokenizer.get_chat_template(None, [{}] if tools else None)
    return _dated(str(template), str(tokenizer.init_kwargs.get(_DATE_KEY, CHAT_DATE)))


@functools.lru_cache(maxsize=16)
def _dated(template: str, date: str) -> str:
    if "strftime_now" not in template:
        return template
    # transformers 5.23 replaces functions among a template's values by text, so the clock is a macro.
    day = datetime.datetime.fromisoformat(date)
    steps = "".join(f" | replace('%{code}', {day.strftime('%' + code)!r})" for code in _DIRECTIVES)
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{steps} }}}}{{%- endmacro %}}{{{{ '' }}}}{template}"


def _check_options(tokenizer: PreTrainedTokenizerFast, options: Mapping[str, Any]) -> Mapping[str, Any]:
    # The names are only read where there are options: this runs once a rendering.
    reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} if options else ()
    if wrong := [name for name in options if name in reserved or not name.isidentifier()]:
        raise ValueError(f"chat_template_kwargs: {wrong[0]!r} is not a value that a chat template can be given")
    return options


def turn_end(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The id that ends a turn of the assistant (R23).

    It is the first control token that the chat template writes after the text of an assistant's last turn. Where the
    template writes none there, or no such turn, or is missing, it is the tokenizer's EOS, which may be None.
    """
    eos: Any = tokenizer.eos_token_id
    return _turn_end(tokenizer, str(tokenizer.chat_template or ""), eos)


# By template and EOS too: both can be set on a tokenizer in use.
@functools.lru_cache(maxsize=8)
def _turn_end(tokenizer: PreTrainedTokenizerFast, template: str, eos: int | None) -> int | None:
    if not template:
        return eos
    text = _probe_chat(tokenizer)
    if text is None:
        # A template for prompts alone. Conversations are refused where they are rendered, with their record.
        return eos
    _, found, after = text.rpartition(PROBE)
    control = control_ids(tokenizer)
    ids = tokenizer.encode(after, add_special_tokens=False) if found else []
    return next((index for index in ids if index in control), eos)


def _probe_chat(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """One exchange under the chat template; None where the template refuses it."""
    from jinja2 import TemplateError

    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": PROBE}]
    try:
        return render(tokenizer, turns)
    except TemplateError:
        return None


def always_written(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Ids of BOS and EOS, and those that the chat template writes around any text."""
    text = (_probe_chat(tokenizer) if tokenizer.chat_template else None) or ""
    ends: set[Any] = {tokenizer.bos_token_id, tokenizer.eos_token_id} - {None}
    return {*tokenizer.encode(text, add_special_tokens=False)} | ends


# Plain letters, which no template trims, splits or escapes.
PROBE: Final = "theanswerofthisprobe"


def control_ids(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Ids of the control tokens."""
    return frozenset(index for index, token in tokenizer.added_tokens_decoder.items() if token.special)


def begins_with_bos(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether the tokenizer itself puts its BOS before a text; many have one that only their chat template uses."""
    # Not the empty text: where BOS and EOS are one token, its only token may be the EOS.
    ids = tokenizer.encode("a", add_special_tokens=True)
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def eos_ids(tokenizer: PreTrainedTokenizerFast, generation_config: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """Every id that ends a completion, sorted: generation_config's eos_token_id, the tokenizer's EOS, and `turn_end`.

    `generation_config` is the content of generation_config.json; its eos_token_id is an int, a list of them, or
    absent. The result is empty where none of the three names one.

    Raises ValueError for an eos_token_id of another type.
    """
    stop: Any = (generation_config or {}).get("eos_token_id")
    extra = [] if stop is None else list(stop) if isinstance(stop, (list, tuple)) else [stop]
    if not all(isinstance(index, int) and not isinstance(index, bool) for index in extra):
        raise ValueError(f"generation_config eos_token_id is {stop!r}; expected an int or a list of ints")
    own: set[Any] = {tokenizer.eos_token_id, turn_end(tokenizer)} - {None}
    return tuple(sorted({*extra} | own))
