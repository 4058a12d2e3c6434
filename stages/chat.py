"""A conversation with the policy of an artifact, in the terminal."""

from __future__ import annotations

import argparse
import sys

from stages.opened import Opened, arguments, opened
from stages.worker import configure_jax


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--system")
    args = parser.parse_args()
    configure_jax()
    talk(opened(args), args)


def talk(policy: Opened, args: argparse.Namespace) -> None:
    """Reads lines until the end of input; the whole conversation is the prompt."""
    from tuning.models.tokenizer import chat_prompt_ids
    from tuning.rollout.engine import Engine
    from tuning.rollout.sampling import Sampling

    tokenizer, eos = policy.tokenizer, policy.stop_ids
    engine = Engine(policy.config)
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
            policy.params,
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
