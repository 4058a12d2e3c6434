"""Settings of the programs that use a finished policy. `rlhf` derives its options from them and passes them as JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhf.stages.contract.definition import StageConfig


class PolicyPlace(StageConfig):
    """Which artifact holds the policy."""

    store: str
    """Folder or URL of the store."""
    stage: str
    """The stage that made the artifact."""
    key: str
    """Its key."""
    digest: str
    """Its digest: the key may have been made anew since."""
    base: str
    """Key of the base model, which has the tokenizer."""


class ChatOptions(StageConfig):
    """Options of `rlhf chat`."""

    temperature: Annotated[float, Field(ge=0)] = 0.7
    """0 is greedy."""
    max_tokens: Annotated[int, Field(ge=1)] = 128
    """Longest answer in tokens."""
    tensor: Annotated[int, Field(ge=1)] = 1
    """Devices over which the policy is divided."""


class Chat(StageConfig):
    """A conversation with a policy."""

    policy: PolicyPlace
    options: ChatOptions = ChatOptions()
    system: str | None = None
    """The system prompt."""


class ServeOptions(StageConfig):
    """Options of `rlhf serve`."""

    host: str = "127.0.0.1"
    """Address to listen at; the default is this machine alone."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port to listen at."""
    api_key_file: str | None = None
    """File of keys, one a line, besides RLHF_API_KEY. Requests send one as a bearer token; --host may ask for them."""
    requests: Annotated[int, Field(ge=1)] = 256
    """Requests answered at once; further ones get status 429."""
    request_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Time for a request from its head to the end of its answer."""
    body_megabytes: Annotated[float, Field(gt=0, le=1024)] = 4.0
    """Largest body of a request."""
    follow: bool = False
    """Serve what a name such as champion stands for from now on: a promotion or rollback replaces the policy."""
    take_weights: str | None = None
    """Folder or URL with policies of the same model: clients may name another one of them (POST /weights)."""
    context: Annotated[int, Field(ge=0)] = 0
    """Longest prompt with its answer in tokens, at most the model's positions; 0: 4,096."""
    slots: Annotated[int, Field(ge=0)] = 0
    """Answers made side by side; 0: the device decides."""
    tensor: Annotated[int, Field(ge=1)] = 1
    """Devices over which the policy is divided; all devices together hold as many replicas as there is room for."""
    quantization: Literal["none", "int8"] = "none"
    """Of the weight matrices of layers."""
    sessions: Annotated[int, Field(ge=1)] = 1024
    """Recorded sessions that are held; with more, those that were not used for longest are dropped."""
    session_tokens: Annotated[int, Field(ge=1)] = 2**22
    """Tokens that they may have together."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Keys and values; auto: as computed."""
    cache: Literal["auto", "slots", "paged"] = "auto"
    """Where keys and values are: slots of equal length, or pages; auto: pages on a TPU whose kernel takes the model."""


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
    """The name that it was asked for by, which requests may use too."""
