"""A finished policy in use outside a run: what chatting with it and serving it share."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from stages.common.models import load_policy, load_tokenizer, stop_ids
from stages.contract.definition import Context
from stages.store.artifacts import Artifact, Store

TYPICAL_PROMPT = 64
"""Tokens of a first question: programs for it compile while weights are read."""
NO_POLICY = ("reward",)
"""Stages whose model gives scores."""


@dataclasses.dataclass
class Opened:
    """A policy with what turns text into its tokens. Its weights are read when an engine is made of it."""

    artifact: Artifact
    config: Any
    """DecoderConfig."""
    tokenizer: Any
    stop_ids: tuple[int, ...]
    folder: Path | None
    """Where its weights lie, a Hugging Face folder; None where they had to be made again."""
    params: Any = None
    """What was made again, until an engine has it."""

    def engine(self, limits: Any, dtype: str, **options: Any) -> Any:
        """An engine with this policy and these of `Engine`'s options. To be called once."""
        from tuning.rollout.engine.engine import Engine
        from tuning.rollout.engine.folder import load_folder
        from tuning.rollout.requests import Request

        engine = Engine(self.config, dtype, limits, **options)
        if self.folder is None:
            engine.load(self.params)
            self.params = None
            return engine
        context = limits.context or self.config.max_positions
        engine.prepare([Request([0] * max(1, min(TYPICAL_PROMPT, context - 1)), 1)])
        load_folder(engine, self.folder)
        return engine


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
    from tuning.models.huggingface import read_config

    store = Store(args.store)
    artifact, base = store.get(args.stage, args.key), store.get("base", args.base)
    if artifact is None or base is None:
        sys.exit(f"{args.stage}/{args.key[:12]} or its base model is gone from {args.store}; run the recipe again")
    if artifact.stage in NO_POLICY:
        sys.exit(
            f"{args.stage}/{args.key[:12]} gives scores, no tokens; name the node of a policy, such as sft or export"
        )
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
    places = [""] if artifact.stage == "export" else [p for p in ("model/", "state/model/") if artifact.has(p)]
    folder = artifact.local(places[0]) if places else None
    config, params = load_policy(ctx, artifact) if folder is None else (read_config(folder), None)
    return Opened(artifact, config, load_tokenizer(ctx, base), stop_ids(ctx, base), folder, params)
