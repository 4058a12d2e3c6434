"""A finished policy in use outside a run: what chatting with it and serving it share."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from stages.artifacts import Artifact, Store
from stages.base import Context
from stages.models import load_policy, load_tokenizer, stop_ids


@dataclasses.dataclass(frozen=True)
class Opened:
    """A policy with what turns text into its tokens."""

    artifact: Artifact
    config: Any
    """DecoderConfig."""
    params: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows what `opened` needs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("store")
    parser.add_argument("stage")
    parser.add_argument("key")
    parser.add_argument("--base", required=True, help="key of the base model, which has the tokenizer")
    return parser


def opened(args: argparse.Namespace) -> Opened:
    """The policy that the arguments name; ends the program where it is gone."""
    from tuning.models.huggingface import load_decoder

    store = Store(args.store)
    artifact, base = store.get(args.stage, args.key), store.get("base", args.base)
    if artifact is None or base is None:
        sys.exit(f"{args.stage}/{args.key[:12]} or its base model is gone from {args.store}; run the recipe again")
    scratch = Path(store.scratch) / "opened"
    ctx = Context(
        config=None,
        inputs={},
        out=scratch,
        work=scratch,
        seed=0,
        progress=lambda *a, **k: None,
        log=lambda line: print(line, file=sys.stderr),
        memory={},
    )
    config, params = load_decoder(artifact.local()) if artifact.stage == "export" else load_policy(ctx, artifact)
    return Opened(artifact, config, params, load_tokenizer(ctx, base), stop_ids(ctx, base))
