"""An agent program: it plays one episode through an OpenAI-compatible URL, and prints its reward.

The task: find a number from 1 to 7 in three turns. After each guess the program answers "higher" or "lower".

In a rollout or an evaluation each episode is one process of this program. Its calls are recorded token by token, and
the policy is trained on them. This recipe, `agent.yaml` in the same folder, trains a tiny random model:

    name: agent
    base: {source: "random:tiny"}
    data: {source: episodes, source_args: {count: 64}, sft_fraction: 0}
    sft: null
    environment: {agent: [python, agent.py], turns: 3, max_tokens: 256, episode_seconds: 120}
    rl: {rounds: 2, rollout: {prompts: 4, completions: 4, max_tokens: 8}}
    evaluate: {problems: 8, samples: 1, max_tokens: 8}

    rlhf run agent.yaml
    rlhf episodes

Simplifications: one game, no tools, no system message. A real agent uses its own client library; any that reads
OPENAI_BASE_URL and OPENAI_API_KEY works.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from typing import Any

LAST, TURNS = 7, 3
QUESTION = f"Guess a number from 1 to {LAST}. Reply with a number only."


def reply(messages: list[dict[str, str]]) -> str:
    """The policy's reply to a conversation."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def observation(text: str, hidden: int) -> str:
    """The answer to a guess."""
    number = re.search(r"\d+", text)
    if number is None:
        return "That is not a number."
    guess = int(number[0])
    return "right" if guess == hidden else "higher" if guess < hidden else "lower"


def play(task: dict[str, Any]) -> float:
    """Plays one episode; 1.0 if the policy finds the number."""
    hidden = 1 + task["seed"] % LAST
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(TURNS):
        text = reply(messages)
        seen = observation(text, hidden)
        if seen == "right":
            return 1.0
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": seen}]
    return 0.0


if __name__ == "__main__":
    reward = play(json.loads(os.environ["RLHF_TASK"]))
    print(json.dumps({"reward": reward, "success": reward == 1.0}))
