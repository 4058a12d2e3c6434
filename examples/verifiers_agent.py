"""Environments of the package verifiers, unchanged: this program plays one episode of one.

verifiers 0.4 and this project need different versions of `openai` and `mcp`, so that it gets a Python of its own:

    python -m venv vf && vf/bin/pip install -r vf.txt        # vf.txt: verifiers==0.4.0, uv==0.12.0, and the taskset
    vf/bin/python verifiers_agent.py vf.toml vf.txt 200 > tasks.jsonl          # the first 200 tasks as prompts

`vf.toml` is verifiers' own configuration of an environment:

    taskset = {id = "glossary"}
    agent = {harness = {id = "null"}, runtime = {type = "subprocess"}}

The recipe names both files, so that keys contain them; the program refuses another version than vf.txt pins:

    name: verifiers
    base: {source: "random:tiny"}
    data: {source: tasks.jsonl, sft_fraction: 0}
    sft: null
    environment:
      agent: [vf/bin/python, verifiers_agent.py, vf.toml, vf.txt]
      turns: 4
      max_tokens: 1024
      megabytes: 8192
    rl: {rounds: 2, rollout: {prompts: 4, completions: 4, max_tokens: 16}}
    evaluate: {problems: 8, samples: 1, max_tokens: 16}

    rlhf run verifiers.yaml

The policy's commands would run next to the environment's answers, so that harnesses which execute code need another
runtime than `subprocess`. A failed episode ends this program with an error, and has no reward.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import json
import os
import random
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

PINNED = re.compile(r"([\w.-]+)(?:\[[^]]*\])?==([^\s;]+)")


def environment(settings: str, pins: str) -> Any:
    """The environment of a configuration; raises SystemExit for other versions, and for code next to the answers."""
    for name, version in PINNED.findall(Path(pins).read_text()):
        if (found := importlib.metadata.version(name)) != version:
            raise SystemExit(f"{pins} has {name}=={version}, and {found} is installed: install the file again")
    from verifiers.v1.utils.loaders import harness_class, load_environment, resolve_env_config

    config = resolve_env_config(tomllib.loads(Path(settings).read_text()))
    for role, harness in config.agent_harnesses().items():
        if harness_class(harness.id).EXECUTES_CODE and getattr(config, role).runtime.type == "subprocess":
            raise SystemExit(
                f"{settings}: the harness {harness.id} of {role} runs commands of the policy on this machine, where "
                'they can read the answers: take the harness "null", or the runtime "docker"'
            )
    return load_environment(config)


async def play(made: Any, task: dict[str, Any]) -> float:
    """Plays an episode of a task; returns its reward. Raises SystemExit where the environment fails."""
    import verifiers.v1 as vf

    random.seed(task["seed"])
    one = next(iter(made.taskset.include(idx=[task["index"]])))
    if one.key != task["key"]:
        raise SystemExit(f"task {task['index']} is another one than in the data: write tasks.jsonl again")
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with made.serving():
        episode = await made.run_episode(one, vf.ModelContext(client=client, model="policy"))
    errors = [*episode.errors, *itertools.chain.from_iterable(trace.errors for trace in episode.traces)]
    if not episode.ok:
        raise SystemExit("; ".join(f"{error.type}: {error.message}" for error in errors))
    return float(sum(trace.reward for trace in episode.traces if trace.agent.trainable))


def main(settings: str, pins: str, count: str = "") -> None:
    # Harnesses are scripts that uv starts.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    made = environment(settings, pins)
    if not count:
        print(json.dumps({"reward": asyncio.run(play(made, json.loads(os.environ["RLHF_TASK"])))}))
    for task in itertools.islice(made.taskset, int(count or 0)):
        prompt = task.data.prompt_text or task.data.name or f"task {task.data.idx}"
        metadata = {"index": task.data.idx, "key": task.key}
        print(json.dumps({"id": f"task-{task.data.idx}", "prompt": prompt, "metadata": metadata}))


if __name__ == "__main__":
    main(*sys.argv[1:])
