"""Brings a ready reward model into the store: a Hugging Face folder becomes `model/` and `tokenizer/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf.stages.common.model_source import file_digests, locate, token_ids_of
from rlhf.stages.contract.definition import Context, Stage, StageConfig


class Config(StageConfig):
    """Where the model comes from."""

    source: str
    """As `base.source`, of a sequence classifier with one label."""


def run(ctx: Context) -> dict[str, Any]:
    """Writes `model/` and `tokenizer/`; returns the number of parameters. Raises UnsupportedModel."""
    from rlhf.tuning.models.config import UnsupportedModel
    from rlhf.tuning.models.huggingface import copy_decoder
    from rlhf.tuning.models.tokenizer import load_tokenizer, save_tokenizer

    source = ctx.config.source
    folder = locate(source) or Path(source)
    tokenizer = load_tokenizer(folder)
    if not tokenizer.chat_template:
        raise UnsupportedModel(f"{folder}: the tokenizer has no chat template; add the file chat_template.jinja")
    _, count = copy_decoder(folder, ctx.out / "model", token_ids_of(folder), scalar=True)
    save_tokenizer(tokenizer, ctx.out / "tokenizer")
    ctx.log(f"{source}: a reward model of {count / 1e6:.1f} M parameters")
    return {"parameters": count}


STAGE = Stage(
    "scorer",
    1,
    Config,
    run,
    sources=lambda config: file_digests(config.source),
    computes=lambda config: False,
    draws=lambda config: False,
    processes=lambda config: "primary",
    work="data",
    title="ready reward model",
    headline=(lambda metrics: f"{metrics['parameters'] / 1e6:.1f} M parameters",),
)
