"""Settings of stages that sample: the engine, its place, and the completions to draw."""

from __future__ import annotations

import os
import shlex
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rlhf.stages.common.settings import Compute
from rlhf.stages.contract.definition import StageConfig, execution_setting
from rlhf.stages.sampling.environment import Environment, modules_of, source_digests
from rlhf.stages.store.keys import HIDDEN, SHOWN, KeyForm, program_and_words, variables_by_digest, without_userinfo
from rlhf.tuning.shapes import DECODE_PROGRAMS

NATIVE = ("quantization", "kv_cache_dtype", "cache")
"""Settings of the engine in the worker, and its arguments."""

SERVERS = "rlhf.stages.sampling.servers"
"""The module that samples by HTTP servers."""


class EngineSettings(StageConfig):
    """The engine that samples rollouts: this project's own, or HTTP servers that are somewhere or are started here."""

    kind: Literal["native", "vllm", "sglang"] = "native"
    """native: in the worker, with the trainer's model code, or with `url` by rlhf serve; vllm, sglang:
    these servers, or any with the same API."""
    quantization: Literal["none", "int8"] = "none"
    """How the native engine stores the weight matrices of layers. Its samples are slightly off the policy, for which
    rl.update.correction accounts."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Type of its cached keys and values, with the same effect; auto: that of computation."""
    cache: Literal["auto", "slots", "paged"] = execution_setting("auto")
    """Layout of the key-value cache: slots of equal length, or pages that completions take as they grow. auto: pages on
    a TPU or GPU whose kernel supports the model, else slots. Samples agree up to rounding."""
    version: str | None = None
    """The servers' version: part of the key of rollouts, and compared with the version that they report."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type that started servers compute in, and of the weights that all are given. A native server that computes in
    another is refused."""
    arguments: list[str] = []
    """Additional arguments of started servers (--tensor-parallel-size, 2)."""
    url: str | list[str] | None = execution_setting(None)
    """Addresses of running servers (http://host:8000); null: they are started here."""
    command: Annotated[str | list[str] | None, KeyForm(program_and_words)] = None
    """Command that starts a server, in its own environment (.venv-vllm/bin/python -m
    vllm.entrypoints.openai.api_server); --model, --port and others are added. Its words are in the key of rollouts,
    but for the folder of the program."""
    environment: Annotated[dict[str, str], KeyForm(variables_by_digest)] = {}
    """Variables of started servers. Their digests are in the key of rollouts, but for names that say they are secrets
    (HF_TOKEN, OPENAI_API_KEY). Records have `***` with the digest in place of the value. `***` takes the variable of
    that name from where rlhf runs, and with a digest only the same value."""
    servers: int = execution_setting(1, ge=1)
    """Servers to start. Several divide this machine's NVIDIA GPUs, or those that CUDA_VISIBLE_DEVICES in `environment`
    lists: each gets as many as the sizes of its parallelism in `arguments` take."""
    sleep: bool = execution_setting(False)
    """Whether started servers give their GPUs' memory back after each stage that samples, and the trainer its moments
    and other models while they sample: for servers on the trainer's GPUs (vLLM's sleep mode, SGLang's memory saver)."""
    sync: Literal["auto", "transfer", "weights", "adapter", "restart", "none"] = execution_setting("auto")
    """How they get a new policy: transfer, files of `folder` by vLLM's weight transfer (with this project's plugin) or
    by rlhf serve; weights, a reload of `folder`; the adapter alone; by a restart; or not from here. auto: transfer for
    native servers and where `folder` is a URL, else weights, and a restart where that fails."""
    folder: str | None = execution_setting(None)
    """Folder for the weights, under the same path for this machine and the servers, or a URL that both reach
    (s3://bucket/policies); null: in the store's scratch."""
    concurrency: int = execution_setting(64, ge=1)
    """Prompts at one server at a time."""
    timeout: float = execution_setting(600.0, gt=0)
    """Seconds that a response may take."""
    start_seconds: float = execution_setting(900.0, gt=0)
    """Seconds that a server may take to become healthy."""
    wait_seconds: float = execution_setting(60.0, gt=0)
    """Seconds to wait for a lost server to come back."""
    tries: int = execution_setting(4, ge=1)
    """Servers, or starts of one, that a prompt may lose."""
    seeds: bool = False
    """Whether each request to a server has its own seed: a repeated round then draws the same samples, up to the
    rounding of other batches. vLLM takes 1 to 3 ms per step longer at 256 rows. Native servers always get seeds."""
    tolerance: float = execution_setting(0.1, gt=0)
    """Mean difference between a server's log-probabilities and the trainer's above which the server is taken to hold
    another policy. Seen with SmolLM2 on vLLM: 0.03 in bfloat16, 1e-5 in float32."""
    key_variable: str | None = execution_setting(None)
    """Environment variable that holds the servers' API key."""

    @field_validator("environment")
    @classmethod
    def _known(cls, variables: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        if info.context == SHOWN:
            return variables
        hidden = {n: v.removeprefix(HIDDEN) for n, v in variables.items() if v.startswith(HIDDEN)}
        here = {n: os.environ[n] for n in hidden if n in os.environ}
        digests = variables_by_digest(here)
        for n, recorded in hidden.items():
            if n not in here or (recorded and digests.get(n) != recorded):
                other = ", and here it has another" if n in here else ""
                raise ValueError(f"the value of {n} is not recorded{other}: export {n}, or set it in the recipe")
        return variables | here

    @model_validator(mode="after")
    def _meaningful(self) -> EngineSettings:
        if self.in_worker:
            own = type(self).model_fields
            changed = [n for n in own if n not in ("kind", *NATIVE) and getattr(self, n) != own[n].default]
            if changed:
                raise ValueError(
                    f"{changed[0]} has no meaning with kind native in the worker; say kind: vllm or sglang, or url: "
                    "where rlhf serve is"
                )
            return self
        for name in NATIVE:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is of kind native in the worker; give servers `arguments`")
        for url in self.urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ValueError(f"url is {without_userinfo(url)!r}; expected an address such as http://host:8000")
        if (self.url is None) == (self.command is None):
            raise ValueError("say url, where servers are, or command, which starts one; not both")
        if self.version is None:
            found = "/server_info" if self.kind == "sglang" else "/version"
            raise ValueError(f"version is missing; a server tells it at {found} (version: '0.32.0')")
        for name, plain in (("servers", 1), ("arguments", []), ("environment", {}), ("sleep", False)):
            if self.command is None and getattr(self, name) != plain:
                raise ValueError(f"{name} is of servers that are started here: say command in place of url")
        if self.command is None and self.sync == "restart":
            raise ValueError("sync restart is for servers that are started here: say command in place of url")
        if self.sleep and self.sync not in ("auto", "weights", "adapter"):
            raise ValueError(
                f"a server that sleeps gets new weights when it wakes up, not by sync {self.sync}: say auto"
            )
        if self.kind == "native" and (self.command is not None or self.sync not in ("auto", "none")):
            raise ValueError("native servers are at url, and read whole policies: leave command and sync out")
        if self.transfers and (self.command is not None or self.kind == "sglang" or self.folder is None):
            raise ValueError(
                "sync transfer is for vllm and native servers at url: set url, and folder to a folder or URL that they "
                "and this machine reach"
            )
        if "://" in (self.folder or "") and not self.transfers:
            raise ValueError(f"sync {self.sync} needs a folder that is a path: {without_userinfo(self.folder or '')}")
        return self

    @property
    def in_worker(self) -> bool:
        """Whether the engine is this project's own, in the worker."""
        return self.kind == "native" and self.url is None and self.command is None

    @property
    def transfers(self) -> bool:
        """Whether servers read policies as files below `folder`."""
        shared = self.kind == "native" or "://" in (self.folder or "")
        return self.sync == "transfer" or (self.sync == "auto" and shared)

    @property
    def urls(self) -> list[str]:
        """Where the servers are."""
        return [self.url] if isinstance(self.url, str) else list(self.url or [])

    @property
    def words(self) -> list[str]:
        """The command in words."""
        return shlex.split(self.command) if isinstance(self.command, str) else list(self.command or [])


class SamplingConfig(StageConfig):
    """Settings of all stages that sample a round's prompts."""

    max_tokens: Annotated[int, Field(ge=1)] = 64
    """Maximum tokens of a completion, EOS included; in an environment, of a turn."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a completion, for the native engine in the worker; rewards see the text before the first one.
    All sampled tokens are trained."""
    shard_prompts: Annotated[int, Field(ge=1)] = 32
    """Prompts of one shard: an interrupted round keeps its finished shards."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """How the policy's kernels are rounded before sampling; the recipe takes it from rl.update.lora, for the round
    that begins with a policy which is not of that adapter yet."""
    engine: EngineSettings = EngineSettings()
    """The sampler."""
    environment: Environment | None = None
    """Set by the recipe from its section environment."""
    compute: Compute = Compute()
    """How to compute."""

    @property
    def programs(self) -> int:
        """The most programs that decode where `few_shapes` holds; 0: servers sample."""
        return DECODE_PROGRAMS if self.engine.in_worker else 0

    @model_validator(mode="after")
    def _stops_here(self) -> Self:
        if self.stop and not self.engine.in_worker:
            raise ValueError(f"stop is for the native engine in the worker, not for {self.engine.kind} servers")
        return self


class Rollout(SamplingConfig):
    """Sampling of one round. Training samples with top_p = 1 and top_k = 0: ratios stay unbiased."""

    round: Annotated[int, Field(ge=0)] = 0
    """Number of the round: its stretch of the order of prompts."""
    first: Annotated[int, Field(ge=0)] | None = None
    """Its position in that order, after rounds of other numbers of prompts; null: after rounds of the same number."""
    order_seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Seed of the order in which the rounds draw the prompts; null: from the recipe's seed."""
    prompts: Annotated[int, Field(ge=1)] = 32
    """Prompts of a round."""
    completions: Annotated[int, Field(ge=1)] = 8
    """Completions of each prompt: the group size."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; training uses the same value."""


def loads(config: SamplingConfig) -> tuple[str, ...]:
    """Return the modules that the stage loads by name, for servers and for episodes."""
    servers = () if config.engine.in_worker else (SERVERS,)
    return (*servers, *modules_of(config.environment))


def sources(config: SamplingConfig) -> dict[str, str]:
    """Digests of the code of a user's environment."""
    return {} if config.environment is None else source_digests(config.environment)
