"""A conversation with the policy of an artifact, in the terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from stages.artifacts import Store
from stages.base import Context
from stages.models import load_policy, load_tokenizer, stop_ids
from stages.worker import configure_jax


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("stage")
    parser.add_argument("key")
    parser.add_argument("--base", required=True)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--system")
    args = parser.parse_args()
    configure_jax()
    store = Store(args.store)
    artifact, base = store.get(args.stage, args.key), store.get("base", args.base)
    if artifact is None or base is None:
        sys.exit(f"{args.stage}/{args.key[:12]} or its base model is gone from {args.store}; run the recipe again")
    ctx = Context(
        config=None,
        inputs={},
        out=Path(store.scratch) / "chat",
        work=Path(store.scratch) / "chat",
        seed=0,
        progress=lambda *a, **k: None,
        log=lambda line: print(line, file=sys.stderr),
        memory={},
    )
    talk(ctx, artifact, base, args)


def talk(ctx: Context, artifact: Any, base: Any, args: argparse.Namespace) -> None:
    """Reads lines until the end of input; the whole conversation is the prompt."""
    from tuning.models.huggingface import load_decoder
    from tuning.models.tokenizer import chat_prompt_ids
    from tuning.rollout.engine import Engine
    from tuning.rollout.sampling import Sampling

    if artifact.stage == "export":
        config, params = load_decoder(artifact.local())
    else:
        config, params = load_policy(ctx, artifact)
    tokenizer, eos = load_tokenizer(ctx, base), stop_ids(ctx, base)
    engine = Engine(config)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    print("An empty line or Ctrl-D ends the conversation.", file=sys.stderr)
    for turn in range(10_000):
        try:
            text = input("you> " if sys.stdin.isatty() else "")
        except EOFError:
            break
        if not text.strip():
            break
        messages.append({"role": "user", "content": text})
        [[answer]] = engine.generate(
            params,
            [chat_prompt_ids(tokenizer, messages)],
            samples=1,
            max_tokens=args.max_tokens,
            sampling=Sampling(temperature=args.temperature),
            eos_ids=eos,
            seed=0,
            counters=[turn],
        )
        reply = tokenizer.decode([t for t in answer.tokens if t not in eos])
        messages.append({"role": "assistant", "content": reply})
        print(f"policy> {reply}" if sys.stdin.isatty() else reply, flush=True)


if __name__ == "__main__":
    main()
