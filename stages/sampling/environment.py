"""Settings of episodes: the environment, its tools, and the limits of a trajectory."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf.stages.contract.definition import StageConfig, execution_setting
from rlhf.stages.contract.sources import user_digests
from rlhf.stages.store.disk import sha256_file

ENVIRONMENT = "environment"
"""Name of the environment's own reward among reward functions."""
EPISODES = "rlhf.stages.sampling.episodes"
"""The module that plays episodes."""
PROGRAMS = "rlhf.stages.serving.programs"
"""The module that plays episodes by a program."""
AGENT_SECONDS = 600.0
"""Default wall-clock limit of a program's episode."""
PREFIXES = ("gem", "gymnasium", "openenv", "textarena", "mcp")
"""Prefixes of names that are not modules."""
FUNCTIONS = ("renderer", "parser")
"""Arguments that may name functions: of gymnasium's environments, and of custom classes."""

Value = str | int | float | bool


class Environment(StageConfig):
    """The environment of a policy: a rollout is an episode of one or many turns."""

    name: str | None = None
    """Built in (guess, frozenlake, harbor), gem:ID, gymnasium:ID, textarena:ID, openenv:URL, or a custom module:Class:
    a text environment with gymnasium's tuple, or a class that TRL's environment_factory takes; null: tools alone."""
    arguments: dict[str, Value | list[Value]] = {}
    """Keyword arguments of the environment's constructor."""
    tools: list[str] = []
    """Tools of an agent whose prompts come from the data: calculator, python, module:function with type hints and a
    docstring, or mcp:COMMAND of a server. The episode ends with the first turn that calls none."""
    agent: list[str] = []
    """Command of a program that plays an episode by itself and speaks to the OpenAI URL in OPENAI_BASE_URL, such as
    [python, agent.py]: its calls are the trajectory. It reads its task from RLHF_TASK (JSON of the prompt's columns and
    the seed), and its last line may be {"reward": 1.0}. Files among the words are part of the key, their imports are
    not. In place of name and tools."""
    agent_grades: bool = False
    """Whether the agent's program grades its episodes: it gets the prompt's `answer`, and the key for POST
    RLHF_SESSION/reward, over the descriptor RLHF_GRADER_FD, which commands of the policy do not inherit."""
    tool_arguments: dict[str, dict[str, Value]] = {}
    """Arguments of tools that the policy does not choose, by the tool's name (python: {seconds: 2})."""
    tool_format: Literal["auto", "hermes", "llama", "gemma"] = "auto"
    """Form of calls; auto: the form of the chat template's family, else JSON in <tool_call> tags (Hermes, Qwen)."""
    system_prompt: str | None = None
    """The system message; null: data.system_prompt, so that transcripts of SFT and episodes begin alike."""
    turns: Annotated[int, Field(ge=1)] = 8
    """Maximum turns of the policy in an episode; rl.rollout.max_tokens bounds each."""
    max_tokens: Annotated[int, Field(ge=2)] = 1024
    """Maximum tokens of a trajectory: first context, turns and observations."""
    observation_tokens: Annotated[int, Field(ge=1)] = 256
    """Maximum tokens of an observation; a longer one is cut, with a visible mark."""
    tries: Annotated[int, Field(ge=1, le=10)] = 2
    """Maximum starts of an episode whose environment fails; after that the episode has no reward and leaves every
    statistic."""
    max_failed_fraction: float = execution_setting(0.1, ge=0, le=1)
    """Share of the episodes, rounded up, in which the environment may fail; more fail the stage."""
    lockstep: bool = False
    """Whether all running episodes take their turns together. Then the same episodes have the same bits on one kind of
    device, and the slowest environment sets the pace."""
    reset_seconds: float = execution_setting(60.0, gt=0)
    """Wall-clock limit of a reset, the start of its process included."""
    step_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Wall-clock limit of a step, of which tool calls of a turn may take nine tenths together."""
    tool_seconds: Annotated[float, Field(gt=0)] = 10.0
    """Wall-clock limit of a tool's call, past which the policy reads an error."""
    episode_seconds: float | None = execution_setting(None, gt=0)
    """Wall-clock limit of an episode of an agent, after which it has no reward; null: ten minutes."""
    megabytes: int = execution_setting(2048, ge=16)
    """Memory limit of an environment, on top of its process's own, and of each process of an agent in total; on
    Linux."""
    processes: int = execution_setting(64, ge=1)
    """Episodes that run at the same time, each in its own process; at most the slots of the engine."""

    @model_validator(mode="after")
    def _plays(self) -> Environment:
        if self.agent:
            for name in ("name", "tools", "arguments", "lockstep"):
                if getattr(self, name):
                    raise ValueError(f"{name} is not for an agent, a program that plays by itself: leave it out")
            return self
        for name in ("agent_grades", "episode_seconds"):
            if getattr(self, name):
                raise ValueError(f"{name} is for an agent: leave it out, or name a program as the agent")
        if self.name is None and not self.tools:
            raise ValueError("name and tools are both empty: name an environment, a tool, or an agent")
        if self.name is None and self.arguments:
            raise ValueError("arguments are of an environment: name one, or say tool_arguments")
        return self

    @property
    def has_reward(self) -> bool:
        """Whether the environment itself rewards; tools alone do not."""
        return self.name is not None or bool(self.agent)


def modules_of(environment: Environment | None) -> tuple[str, ...]:
    """Return the project's modules that play in it, which stages load by name: only these stages have them in their
    keys."""
    if environment is None:
        return ()
    if environment.agent:
        return (EPISODES, PROGRAMS)
    built_in = environment.name if environment.name and ":" not in environment.name else None
    return (EPISODES, *([f"rlhf.tuning.agents.environments.{built_in}"] if built_in else []))


def source_digests(environment: Environment) -> dict[str, str]:
    """Return hashes of the code of the user's environment and tools, of files that their settings name, and versions of
    their packages; not of files that these open themselves, nor of the server at a URL.

    Raises ValueError, naming the setting, for a missing module; nothing is executed.
    """
    digests: dict[str, str] = {}
    for word in environment.agent:
        if Path(word).is_file():
            digests[f"file:{word}"] = sha256_file(Path(word))
        elif word.endswith(".py"):
            raise ValueError(f"environment.agent: there is no file {word} in {Path.cwd()}")
    for where, name in [("environment.name", environment.name), *(("environment.tools", t) for t in environment.tools)]:
        kind, colon, rest = (name or "").partition(":")
        if colon and kind not in PREFIXES:
            digests |= user_digests(str(name), where)
        elif kind in PREFIXES:
            digests |= _package(kind)
        if kind == "mcp" and "://" not in rest:
            try:
                words = shlex.split(rest)
            except ValueError as error:
                raise ValueError(f"environment.tools: {name!r} is not a command: {error}") from error
            digests |= {f"environment.tools {word}": sha256_file(Path(word)) for word in words if Path(word).is_file()}
    kind, _, rest = (environment.name or "").partition(":")
    if kind == "gymnasium" and ":" in rest:
        # gymnasium imports the module of MODULE:ID, which registers the id.
        digests |= user_digests(rest, "environment.name")
    if rest and (kind == "gymnasium" or kind not in PREFIXES):
        for name in FUNCTIONS:
            if isinstance(value := environment.arguments.get(name), str) and ":" in value:
                digests |= user_digests(value, f"environment.arguments.{name}")
    return digests


def _package(kind: str) -> dict[str, str]:
    from rlhf.stages.contract.fingerprint import library_versions

    name = {"gem": "gem-llm", "openenv": "websockets"}.get(kind, kind)
    return {f"package:{n}": v for n, v in library_versions((name,)).items()}
