"""A policy of SmolLM2-135M and its neighbours for real vLLM servers on the CPU, and what tells them apart."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rlhf.stages.base import Config as BaseConfig
from rlhf.stages.common.model_source import locate
from rlhf.tuning.device import Compute
from rlhf.tuning.models.config_json import from_hugging_face
from rlhf.tuning.models.gguf import GGUFCheckpoint
from rlhf.tuning.models.gguf_file import GGUFFile
from rlhf.tuning.models.huggingface import save_decoder, untied
from rlhf.tuning.models.tokenizer import save_tokenizer, tokenizer_from_gguf
from rlhf.tuning.rollout.requests import Request, Sampling
from rlhf.tuning.rollout.servers.child import Child
from rlhf.tuning.rollout.servers.fleet import Fleet, Options
from rlhf.tuning.rollout.servers.kinds import KINDS
from rlhf.tuning.rollout.servers.protocol import Policy
from rlhf.tuning.rollout.servers.server import RemoteServer
from rlhf.tuning.training.completions import token_logps
from tests.tuning.chat.templates import chat_prompt_ids
from tests.tuning.models.named import params_from_tensors

VERSION = "0.32.0"
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}
OPTIONS = Options(seeds=True, tolerance=2e-3)
SETTINGS = {
    "base.source": BaseConfig().source,
    "data.source": "addition",
    "data.system_prompt": "Reply with the answer only.",
    "sft": "null",
    "rl.rounds": 2,
    "rl.checkpoint_every": 2,
    "rl.rollout.prompts": 16,
    "rl.rollout.completions": 4,
    "rl.rollout.max_tokens": 8,
    "rl.rollout.shard_prompts": 2,
    "rl.score.rewards.model": "{function: matches, weight: 1.0, arguments: {pattern: '.*s.*'}}",
    "rl.update.optimizer.learning_rate": 0.0001,
    "rl.rollout.engine.kind": "vllm",
    "rl.rollout.engine.version": VERSION,
    "rl.rollout.engine.dtype": "float32",
    "rl.rollout.engine.tolerance": OPTIONS.tolerance,
    "rl.rollout.engine.environment": "{VLLM_CPU_KVCACHE_SPACE: '1'}",
    "reward": "null",
    "evaluate": "null",
    "export": "null",
}
"""Of runs that sample by vLLM."""


def command() -> list[str]:
    """The server's program in the environment of infra/vllm.sh."""
    python = Path(os.environ.get("VLLM_VENV", ".venv-vllm")).absolute() / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is not there; `make test-vllm` makes it")
    return [str(python), "-m", "vllm.entrypoints.openai.api_server"]


def noisy(params: Any, seed: int, scale: float = 0.02) -> Any:
    """Other weights: each matrix moved by a share of its size."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [x + scale * x.std() * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, moved)


@dataclasses.dataclass
class Model:
    """SmolLM2 and policies that differ from it."""

    config: Any
    params: dict[str, Any]
    tokenizer: Any
    ids: dict[str, Any]
    folder: Path
    prompts: list[list[int]]

    @property
    def stops(self) -> tuple[int, ...]:
        return (self.ids["eos_token_id"],)

    def place(self, name: str) -> Path:
        """The Hugging Face folder of a policy, as `rlhf.stages.sampling.servers` writes it on a CPU."""
        target = self.folder / name
        if not target.exists():
            save_decoder(target, *untied(self.config, self.params[name]), self.ids)
            save_tokenizer(self.tokenizer, target)
        return target

    def requests(self, count: int, temperature: float, samples: int, tokens: int) -> list[Request]:
        return [
            Request(p, tokens, Sampling(temperature), self.stops, 7, i, samples, name=f"p{i}")
            for i, p in enumerate((self.prompts * count)[:count])
        ]

    def policy(self, name: str, temperature: float = 0.8, **changes: Any) -> Policy:
        def logps(pairs: Any, t: float) -> Any:
            return token_logps(self.config, self.params[name], pairs, t, Compute(), 512)

        probe = [dataclasses.replace(r, counter=10**6 + r.counter) for r in self.requests(3, temperature, 1, 12)]

        made = Policy(name, lambda: self.place(name), logps, probe)
        return dataclasses.replace(made, **changes)


def smollm(folder: Path) -> Model:
    """SmolLM2 and two policies near it; their folders go to `folder`."""
    path = locate(BaseConfig().source)
    file = GGUFFile(path)
    checkpoint = GGUFCheckpoint(file)
    values = checkpoint.config()
    config = from_hugging_face(values, str(path))
    params = params_from_tensors(config, {name: checkpoint.read(name) for name in checkpoint.shapes})
    tokenizer = tokenizer_from_gguf(file)
    ids = {k: values[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    policies = {"first": params, "second": noisy(params, 1), "third": noisy(params, 2)}
    questions = [f"Tell me about the number {n} in a sentence." for n in range(12)]
    prompts = [chat_prompt_ids(tokenizer, [{"role": "user", "content": q}]) for q in questions]
    return Model(config, policies, tokenizer, ids, folder, prompts)


def child(folder: Path, number: int = 0, more: Sequence[str] = ()) -> Child:
    """A vLLM server that takes policies by weight transfer; its log goes to `folder`."""

    def words(model: Path, port: int) -> list[str]:
        arguments = KINDS["vllm"].arguments(model, port, "float32", 1024, False)
        return [*command(), *arguments, "--weight-transfer-config", '{"backend": "rlhf"}', *more]

    return Child(words, KINDS["vllm"].environment() | ENVIRONMENT, folder / f"log-{number}")


def remote(*servers: RemoteServer, **changes: Any) -> Any:
    """A fleet of vLLM servers, with what it logs as `lines`."""
    lines: list[str] = []
    made: Any = Fleet(KINDS["vllm"], servers, dataclasses.replace(OPTIONS, version=VERSION, **changes), lines.append)
    made.lines = lines
    return made


def gap(model: Model, name: str, requests: Any, found: Any, temperature: float) -> float:
    """Mean difference of recorded log-probabilities and those of a policy's trainer."""
    pairs = [(r.prompt, c.tokens) for r, cs in zip(requests, found, strict=True) for c in cs]
    ours = np.concatenate(token_logps(model.config, model.params[name], pairs, temperature, Compute(), 512))
    theirs = np.concatenate([c.logps for cs in found for c in cs])
    return float(np.abs(ours - theirs).mean())


def run(engine: Any, requests: Any) -> list[Any]:
    """The completions of each request, in order."""
    found = dict(engine.run(requests))
    return [found[i] for i in range(len(requests))]
