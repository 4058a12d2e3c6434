"""A conversation with the policy of an artifact, in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from stages.serving.api import Text
from stages.serving.policy import Opened, arguments, opened
from stages.worker.process import configure_jax


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--system")
    args = parser.parse_args()
    configure_jax()
    with contextlib.suppress(KeyboardInterrupt):
        talk(opened(args), args)


def talk(policy: Opened, args: argparse.Namespace) -> None:
    """Reads lines until the end of input; the conversation is the prompt, as much of it as fits."""
    from tuning.device import choose
    from tuning.rollout.engine.limits import Limits
    from tuning.rollout.requests import Request, Sampling

    device = choose()
    limits = Limits(slots=1, context=policy.config.max_positions, chunks=device.chunk_tokens, steps=4)
    engine = policy.engine(limits, device.compute.dtype)
    # An answer as long as the context would leave no room for a question.
    room = engine.context - min(args.max_tokens, engine.context // 2)
    system = [{"role": "system", "content": args.system}] if args.system else []
    turns: list[dict[str, str]] = []
    terminal = sys.stdin.isatty()
    special = set(policy.tokenizer.all_special_ids) | set(policy.stop_ids)
    print("An empty line or Ctrl-D ends the conversation.", file=sys.stderr)
    for number in range(10_000):
        try:
            question = input("you> " if terminal else "")
        except EOFError:
            break
        if not question.strip():
            break
        turns.append({"role": "user", "content": question})
        prompt, left_out = _fitting(policy.tokenizer, system, turns, room)
        if prompt is None:
            turns.pop()
            print(f"that is more than the {room} tokens for a conversation; ask less at once", file=sys.stderr)
            continue
        if left_out:
            print(f"({left_out // 2} earlier exchanges no longer fit and are forgotten)", file=sys.stderr)
        sampling = Sampling(temperature=args.temperature)
        longest = min(args.max_tokens, engine.context - len(prompt))
        engine.submit(Request(prompt, longest, sampling, policy.stop_ids, counter=number))
        print("policy> " if terminal else "", end="", flush=True)
        text = Text(policy.tokenizer, special, [])
        while not engine.idle:
            for update in engine.step():
                print(text.add(update.tokens, update.completion is not None), end="", flush=True)
        print(flush=True)
        turns.append({"role": "assistant", "content": text.sent})


def _fitting(
    tokenizer: Any, system: list[dict[str, str]], turns: list[dict[str, str]], room: int
) -> tuple[list[int] | None, int]:
    """Token ids of the conversation in at most `room` tokens, and how many of the oldest turns had to leave for it.

    What leaves is removed from `turns`, an exchange at a time; None where the last alone is too long.
    """
    from tuning.models.tokenizer import chat_prompt_ids

    for start in range(0, len(turns), 2):
        prompt = chat_prompt_ids(tokenizer, [*system, *turns[start:]])
        if len(prompt) <= room:
            del turns[:start]
            return prompt, start
    return None, 0


if __name__ == "__main__":
    main()
