"""What vLLM's and SGLang's HTTP servers are asked and what their answers mean: token ids in, token ids out.

vLLM: `/v1/completions` with `return_token_ids`, and the development endpoints (VLLM_SERVER_DEV_MODE=1) that change
weights; as in version 0.32. Start it with `--logprobs-mode processed_logprobs`, else its log-probabilities are those
before the temperature. SGLang: `/generate`; it honours seeds with `--enable-deterministic-inference` only, and its
log-probabilities are those before top_p and the like, which are therefore refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tuning.rollout.requests import Completion, RefusedRequest, Request


class ServerLost(RuntimeError):
    """A server cannot be reached, fails or gives what is no answer; another may do better, or the same one later."""


class ServerRefused(RuntimeError):
    """A server understands the request and declines it; asking again does not help."""


class StalePolicy(RuntimeError):
    """A server has other weights than those wanted, or its log-probabilities say so; nothing is sampled from it."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The policy that servers are to have."""

    digest: str
    """Its name: servers keep it beside the weights."""
    folder: Callable[[], Path]
    """Makes, where it is not there yet, the Hugging Face folder of the dense weights, where servers can read it."""
    logps: Callable[[Sequence[tuple[Sequence[int], Sequence[int]]], float], list[list[float]]]
    """The trainer's log-probabilities of (prompt, completion) token ids at a temperature."""
    probe: Sequence[Request]
    """What each server is asked before it counts."""
    base: str = ""
    """Name of the dense weights under an adapter."""
    adapter: Path | None = None
    """A folder in PEFT's format over `base`; None where the policy is dense."""

    @property
    def weights(self) -> str:
        """Name of the dense weights that `folder` holds."""
        return self.base or self.digest


@dataclasses.dataclass(frozen=True)
class Start:
    """How a server is started."""

    folder: Path
    """The model, as a Hugging Face folder."""
    dtype: str
    context: int
    """Longest prompt with its completion, in tokens."""
    adapters: bool
    """Whether it will be given adapters."""


class Control(Protocol):
    """Calls that wait for their answer; they raise ServerLost and ServerRefused."""

    def get(self, path: str) -> Any: ...
    def post(self, path: str, body: Any = None) -> Any: ...


def sample_seed(bits: int, *counters: int) -> int:
    """A seed of so many bits that depends on the counters alone (R15)."""
    text = ":".join(map(str, counters))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - bits)


class Engine(Protocol):
    """One kind of server."""

    name: str
    path: str
    """Where completions are made."""
    counted: str | None
    """A path that tells whose weights are loaded, where answers do not."""

    def arguments(self, start: Start, port: int) -> list[str]:
        """What its command is given to serve a folder on loopback."""

    def environment(self) -> dict[str, str]:
        """Variables that it needs for changing weights."""

    def body(self, request: Request, policy: Policy) -> dict[str, Any]:
        """What is sent for a request. Raises RefusedRequest for what it cannot do, or would do otherwise."""

    def completions(self, request: Request, answer: Any) -> list[Completion]:
        """The samples. Raises ServerLost where the answer is not whole."""

    def answered_by(self, policy: Policy, answer: Any) -> str | None:
        """Whose weights an answer of `path` or `counted` comes from; None where it does not say."""

    def version(self, server: Control) -> str | None:
        """The version of its code; None where it does not say."""

    def weights(self, server: Control) -> str | None:
        """Name of the dense weights that it has; None where it does not say."""

    def label(self, server: Control, policy: Policy) -> None:
        """Gives a server that was started on the policy's folder the name of its weights."""

    def reload(self, server: Control, policy: Policy, folder: Path) -> None:
        """Has it load the dense weights and remember their name."""

    def adapt(self, server: Control, policy: Policy, previous: str | None) -> None:
        """Has it load the adapter beside its dense weights, and forget the previous one."""


class VLLM:
    """vLLM, and what speaks its `/v1/completions`."""

    name, path = "vllm", "/v1/completions"
    counted: str | None = "/weight_info"

    def arguments(self, start: Start, port: int) -> list[str]:
        words = ["--model", str(start.folder), "--served-model-name", "policy", "--host", "127.0.0.1"]
        words += ["--port", str(port), "--dtype", start.dtype, "--max-model-len", str(start.context)]
        words += ["--logprobs-mode", "processed_logprobs"]
        return [*words, "--enable-lora"] if start.adapters else words

    def environment(self) -> dict[str, str]:
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
        return own | {"HF_HUB_OFFLINE": "1"}

    def body(self, request: Request, policy: Policy) -> dict[str, Any]:
        _refuse_strings(request)
        s = request.sampling
        body = {
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            # Sample i gets the seed + i. Greedy samples are one and the same.
            "n": 1 if s.temperature == 0 else request.samples,
            "seed": sample_seed(48, request.seed, request.counter),
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "repetition_penalty": s.repetition_penalty,
            # The request's stop ids are all there are.
            "ignore_eos": True,
            "stop_token_ids": list(request.stop_ids),
            "logprobs": 0,
            "return_token_ids": True,
        }
        return body | ({"model": policy.digest} if policy.adapter else {})

    def completions(self, request: Request, answer: Any) -> list[Completion]:
        try:
            choices = sorted(answer["choices"], key=lambda c: c["index"])
            for choice in choices:
                if choice.get("prompt_token_ids") not in (None, list(request.prompt)):
                    raise ServerLost("its prompt has other token ids than the one sent")
            if any(c.get("token_ids") is None or c.get("logprobs") is None for c in choices):
                raise ServerLost("its answer lacks token ids or log-probabilities")
            pairs = [(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in choices]
        except (KeyError, TypeError) as e:
            raise ServerLost(f"its answer is no completion ({type(e).__name__}: {e})") from e
        return _checked(request, pairs * (request.samples if request.sampling.temperature == 0 else 1))

    def answered_by(self, policy: Policy, answer: Any) -> str | None:
        return answer.get("weight_version")

    def version(self, server: Control) -> str | None:
        with contextlib.suppress(ServerRefused):
            return str(server.get("/version")["version"])
        return None

    def weights(self, server: Control) -> str | None:
        with contextlib.suppress(ServerRefused):
            return server.get("/weight_info").get("weight_version")
        return None

    def label(self, server: Control, policy: Policy) -> None:
        server.post("/update_weight_version", {"new_version": policy.weights})

    def reload(self, server: Control, policy: Policy, folder: Path) -> None:
        # First the name: a reload that fails half-way leaves no server that claims to have the policy.
        server.post("/update_weight_version", {"new_version": "unknown"})
        server.post("/pause?mode=wait")
        try:
            server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            server.post("/reset_prefix_cache")
        finally:
            server.post("/resume")
        self.label(server, policy)

    def adapt(self, server: Control, policy: Policy, previous: str | None) -> None:
        assert policy.adapter is not None
        known = {m["id"] for m in server.get("/v1/models")["data"]}
        if policy.digest not in known:
            server.post("/v1/load_lora_adapter", {"lora_name": policy.digest, "lora_path": str(policy.adapter)})
        if previous in known - {policy.digest}:
            server.post("/v1/unload_lora_adapter", {"lora_name": previous})


class SGLang:
    """SGLang's own API."""

    name, path = "sglang", "/generate"
    counted: str | None = None

    def arguments(self, start: Start, port: int) -> list[str]:
        words = ["--model-path", str(start.folder), "--host", "127.0.0.1", "--port", str(port)]
        words += ["--dtype", start.dtype, "--context-length", str(start.context)]
        return [*words, "--enable-lora"] if start.adapters else words

    def environment(self) -> dict[str, str]:
        return {"HF_HUB_OFFLINE": "1"}

    def body(self, request: Request, policy: Policy) -> dict[str, Any]:
        _refuse_strings(request)
        s = request.sampling
        if s.temperature > 0 and (s.top_p < 1 or s.top_k > 0 or s.min_p > 0):
            raise RefusedRequest(
                f"request {request.name or request.counter}: SGLang's log-probabilities are those before top_p, top_k "
                "and min_p; sample without them, or with another engine"
            )
        params: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "temperature": s.temperature,
            "repetition_penalty": s.repetition_penalty,
            "stop_token_ids": list(request.stop_ids),
            # With it SGLang ignores stop_token_ids too.
            "ignore_eos": not request.stop_ids,
        }
        seeds = [sample_seed(31, request.seed, request.counter, i) for i in range(request.samples)]
        body: dict[str, Any] = {
            "input_ids": [list(request.prompt)] * request.samples,
            "sampling_params": [params | {"sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
        }
        return body | ({"lora_path": policy.digest} if policy.adapter else {})

    def completions(self, request: Request, answer: Any) -> list[Completion]:
        answers = answer if isinstance(answer, list) else [answer]
        try:
            rows = [a["meta_info"]["output_token_logprobs"] for a in answers]
            return _checked(request, [([int(r[1]) for r in row], [float(r[0]) for r in row]) for row in rows])
        except (KeyError, TypeError, IndexError) as e:
            raise ServerLost(f"its answer lacks token ids or log-probabilities ({type(e).__name__}: {e})") from e

    def answered_by(self, policy: Policy, answer: Any) -> str | None:
        answers = answer if isinstance(answer, list) else [answer]
        found = {a["meta_info"].get("weight_version") for a in answers}
        return next((v for v in found if v != policy.weights), policy.weights)

    def version(self, server: Control) -> str | None:
        for path in ("/server_info", "/get_server_info"):
            with contextlib.suppress(ServerRefused):
                return server.get(path).get("version")
        return None

    def weights(self, server: Control) -> str | None:
        for path in ("/model_info", "/get_weight_version"):
            with contextlib.suppress(ServerRefused):
                return server.get(path).get("weight_version")
        return None

    def label(self, server: Control, policy: Policy) -> None:
        server.post("/update_weight_version", {"new_version": policy.weights, "abort_all_requests": False})

    def reload(self, server: Control, policy: Policy, folder: Path) -> None:
        body = {"model_path": str(folder), "weight_version": policy.weights, "abort_all_requests": True}
        found = server.post("/update_weights_from_disk", body)
        if not found.get("success"):
            raise ServerRefused(f"update_weights_from_disk: {found.get('message')}")

    def adapt(self, server: Control, policy: Policy, previous: str | None) -> None:
        assert policy.adapter is not None
        with contextlib.suppress(ServerRefused):
            server.post("/unload_lora_adapter", {"lora_name": policy.digest})
        server.post("/load_lora_adapter", {"lora_name": policy.digest, "lora_path": str(policy.adapter)})
        if previous not in (None, policy.digest):
            with contextlib.suppress(ServerRefused):
                server.post("/unload_lora_adapter", {"lora_name": previous})


ENGINES: dict[str, Engine] = {"vllm": VLLM(), "sglang": SGLang()}


def _refuse_strings(request: Request) -> None:
    if request.find_stop is not None:
        raise RefusedRequest(f"request {request.name or request.counter}: stop strings are for the native engine alone")


def _checked(request: Request, found: Sequence[tuple[list[int], list[float]]]) -> list[Completion]:
    """Completions of (token ids, log-probabilities) that are as many and as long as asked for."""
    if len(found) != request.samples:
        raise ServerLost(f"it gave {len(found)} samples of {request.samples}")
    done = []
    for tokens, logps in found:
        if len(tokens) != len(logps) or not tokens or not all(x is not None and math.isfinite(x) for x in logps):
            raise ServerLost(f"it gave {len(tokens)} tokens with {len(logps)} log-probabilities, or one is not finite")
        ended = tokens[-1] in request.stop_ids
        if not ended and len(tokens) != request.max_tokens:
            raise ServerLost(f"a sample ended after {len(tokens)} of {request.max_tokens} tokens without a stop id")
        done.append(Completion(list(tokens), [min(float(x), 0.0) for x in logps], "eos" if ended else "length"))
    return done
