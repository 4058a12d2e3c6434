"""Settings of the programs that use a finished policy. `rlhf` derives its options from them and passes them as JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhf.stages.contract.definition import StageConfig


class PolicyPlace(StageConfig):
    """The artifact of the policy."""

    store: str
    """Folder or URL of the store."""
    stage: str
    """The stage of the artifact."""
    key: str
    """Its key."""
    digest: str
    """Its digest: the key may have been recomputed since."""
    base: str
    """Key of the base model, which has the tokenizer."""


class ChatOptions(StageConfig):
    """Options of `rlhf chat`."""

    temperature: Annotated[float, Field(ge=0)] = 0.7
    """0 is greedy."""
    max_tokens: Annotated[int, Field(ge=1)] = 128
    """Longest answer in tokens."""
    tensor: Annotated[int, Field(ge=1)] = 1
    """Devices over which the policy is sharded."""


class Chat(StageConfig):
    """A conversation with a policy."""

    policy: PolicyPlace
    options: ChatOptions = ChatOptions()
    system: str | None = None
    """The system prompt."""


class ServeOptions(StageConfig):
    """Options of `rlhf serve`."""

    host: str = "127.0.0.1"
    """Address to listen at; the default serves this machine alone."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port to listen at."""
    api_key_file: str | None = None
    """File of keys, one a line, in addition to RLHF_API_KEY. Requests send one as bearer token; --host may need one."""
    requests: Annotated[int, Field(ge=1)] = 256
    """Concurrent requests; further ones get status 429."""
    request_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Longest time of a request, from its head to the end of its answer."""
    body_megabytes: Annotated[float, Field(gt=0, le=1024)] = 4.0
    """Largest body of a request."""
    follow: bool = False
    """Keep serving the current entry of a name such as champion: a promotion or rollback replaces the policy."""
    take_weights: str | None = None
    """Folder or URL with policies of the same model, which clients may load by name (POST /weights)."""
    context: Annotated[int, Field(ge=0)] = 0
    """Longest prompt with its answer in tokens, at most the model's positions; 0: 4,096."""
    slots: Annotated[int, Field(ge=0)] = 0
    """Completions sampled at a time; 0: the device decides."""
    tensor: Annotated[int, Field(ge=1)] = 1
    """Devices over which the policy is sharded; all devices together hold as many replicas as fit."""
    quantization: Literal["none", "int8"] = "none"
    """Quantization of the weight matrices of layers."""
    sessions: Annotated[int, Field(ge=1)] = 1024
    """Recorded sessions in memory; beyond that, the least recently used ones are dropped."""
    session_tokens: Annotated[int, Field(ge=1)] = 2**22
    """Tokens of all sessions together; a call counts 128 in addition to its tokens."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Type of keys and values; auto: as computed."""
    cache: Literal["auto", "slots", "paged"] = "auto"
    """Layout of keys and values: slots of equal length, or pages; auto: pages where a kernel has the model."""


class Named(StageConfig):
    """An entry of a name of the registry."""

    name: str
    entry: int


class Serve(StageConfig):
    """A server of a policy."""

    policy: PolicyPlace
    options: ServeOptions = ServeOptions()
    name: str
    """The model's name in the API."""
    named: Named | None = None
    """The name in the command, which requests may use too."""
