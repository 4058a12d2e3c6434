"""A conversation with the policy of an artifact, in the terminal."""

from __future__ import annotations

import contextlib
import itertools
import sys
from typing import Any

from rlhf.stages.common.compilation import configure_jax
from rlhf.stages.serving.answers import Text
from rlhf.stages.serving.policy import Opened, open_policy
from rlhf.stages.serving.settings import Chat, ChatOptions
from rlhf.tuning.names import plain


def main() -> None:
    """Read the settings, as JSON, from the command line."""
    settings = Chat.model_validate_json(sys.argv[1])
    configure_jax()
    with contextlib.suppress(KeyboardInterrupt):
        talk(open_policy(settings.policy), settings.options, settings.system)


def talk(policy: Opened, options: ChatOptions, system_prompt: str | None) -> None:
    """Read lines until the end of input. The prompt is the conversation, without its oldest turns if it is long."""
    import jax

    from rlhf.tuning.axes import Axes
    from rlhf.tuning.device import choose
    from rlhf.tuning.rollout.engine.limits import Limits
    from rlhf.tuning.rollout.engine.placement import sampling_mesh
    from rlhf.tuning.rollout.requests import Request, Sampling

    device = choose()
    # Few steps at a time, so that the text appears while it is sampled.
    limits = Limits(slots=1, context=policy.config.max_positions, chunks=device.chunk_tokens, steps=4)
    # One conversation needs one replica.
    mesh = sampling_mesh(Axes(1, 1, options.tensor), jax.local_devices()[: options.tensor])
    engine = policy.engine(limits, device.compute.dtype, mesh)
    # An answer as long as the context would leave no room for a question.
    room = engine.context - min(options.max_tokens, engine.context // 2)
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    turns: list[dict[str, str]] = []
    terminal = sys.stdin.isatty()
    special = set(policy.tokenizer.all_special_ids) | set(policy.stop_ids)
    print("An empty line or Ctrl-D ends the conversation.", file=sys.stderr)
    for number in itertools.count():
        with contextlib.suppress(EOFError):
            question = ""
            question = input("you> " if terminal else "")
        if not question.strip():
            break
        turns.append({"role": "user", "content": question})
        prompt, dropped = _fitting(policy.tokenizer, system, turns, room)
        if prompt is None:
            turns.pop()
            print(f"that is more than the {room} tokens for a conversation; ask less at once", file=sys.stderr)
            continue
        if dropped:
            print(f"({dropped // 2} earlier exchanges no longer fit and are forgotten)", file=sys.stderr)
        sampling = Sampling(temperature=options.temperature)
        longest = min(options.max_tokens, engine.context - len(prompt))
        engine.submit(Request(prompt, longest, sampling, policy.stop_ids, counter=number))
        print("policy> " if terminal else "", end="", flush=True)
        text = Text(policy.tokenizer, special, [])
        while not engine.idle:
            for update in engine.step():
                print(plain(text.add(update.tokens, update.completion is not None)), end="", flush=True)
        print(flush=True)
        turns.append({"role": "assistant", "content": text.sent})


def _fitting(
    tokenizer: Any, system: list[dict[str, str]], turns: list[dict[str, str]], room: int
) -> tuple[list[int] | None, int]:
    """Return the ids of the conversation in at most `room` tokens, and the number of oldest turns removed for that.

    Turns are removed from `turns` an exchange at a time. The ids are None if the last turn alone is too long.
    """
    from rlhf.tuning.chat.template import Template

    template = Template(tokenizer)
    for start in range(0, len(turns), 2):
        prompt = template.ids([*system, *turns[start:]])
        if len(prompt) <= room:
            del turns[:start]
            return prompt, start
    return None, 0


if __name__ == "__main__":
    main()
