"""vLLM over HTTP: `/v1/completions` with `return_token_ids`, as in version 0.32.

Weights reach it by its development endpoints (VLLM_SERVER_DEV_MODE=1): a reload of a folder, or its weight transfer
with the engine of `vllm_plugin`. It must run with `--logprobs-mode processed_logprobs`: without it,
log-probabilities are those before the temperature.

A sleeping server frees its GPUs for the trainer: level 2 discards weights, level 1 keeps them in host memory. vLLM for
CPU refuses `--enable-sleep-mode`, and answers the calls without an effect.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from rlhf.tuning.rollout.requests import Completion, Request
from rlhf.tuning.rollout.servers.protocol import (
    Control,
    Policy,
    ServerLost,
    ServerRefused,
    check_samples,
    read_field,
    refuse_strings,
    sample_seed,
)
from rlhf.tuning.rollout.servers.transfer import Transfer

SLEEPERS_SHARE = "0.6"
"""Share of a GPU's memory for an awake server of those that sleep; the trainer's policy has to fit next to it."""


class VLLM:
    """vLLM, and servers with the same `/v1/completions`; stateless. Methods are documented for all kinds."""

    name = "vllm"
    path = "/v1/completions"
    """The endpoint of completions."""
    counted: str | None = "/weight_info"
    """An endpoint that names the loaded weights, for kinds whose completions do not."""

    always_seeds = False
    """Whether requests have seeds also where settings ask for none: those of a kind that samples as fast with them."""

    def arguments(
        self, folder: Path, port: int, dtype: str, context: int, adapters: bool, seed: int = 0, sleeps: bool = False
    ) -> list[str]:
        """Return the command-line arguments that make it serve a model folder on loopback.

        context: longest prompt with its completion. adapters: whether it must accept LoRA adapters. seed: of requests
        without one. sleeps: whether it must be able to free its GPUs' memory.
        """
        arguments = ["--model", str(folder), "--served-model-name", "policy", "--host", "127.0.0.1"]
        arguments += ["--port", str(port), "--dtype", dtype, "--max-model-len", str(context)]
        arguments += ["--logprobs-mode", "processed_logprobs", "--seed", str(seed)]
        arguments += ["--enable-sleep-mode", "--gpu-memory-utilization", SLEEPERS_SHARE] if sleeps else []
        return [*arguments, *(["--enable-lora"] if adapters else [])]

    def environment(self, key: str = "") -> dict[str, str]:
        """Return the environment variables that it needs to change weights and to ask for a key."""
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
        # Only endpoints below /v1 ask for the key, the development endpoints do not.
        return own | {"HF_HUB_OFFLINE": "1"} | ({"VLLM_API_KEY": key} if key else {})

    def body(self, request: Request, policy: Policy, seeds: bool = False) -> dict[str, Any]:
        """Return the JSON of a request. Raises RefusedRequest for settings that it lacks or defines differently.

        seeds: whether it names a seed for its samples. vLLM draws such samples one row after another in Python, which
        takes 1 to 3 ms per step at 256 rows.
        """
        refuse_strings(request)
        s = request.sampling
        body = {
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            # Greedy samples are identical: one is requested, and repeated.
            "n": 1 if s.temperature == 0 else request.samples,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "repetition_penalty": 1.0,
            # Only the request's stop ids may end a completion.
            "ignore_eos": True,
            "stop_token_ids": list(request.stop_ids),
            "logprobs": 0,
            "return_token_ids": True,
        }
        if seeds or self.always_seeds:
            # Sample i gets seed + i.
            body["seed"] = sample_seed(48, request.seed, request.counter)
        return body | ({"model": policy.digest} if policy.adapter else {})

    def completions(self, request: Request, answer: Any) -> list[Completion]:
        """Return the samples of an answer. Raises ServerLost if it is incomplete."""
        try:
            choices = sorted(answer["choices"], key=lambda c: c["index"])
            if any(c.get("prompt_token_ids") not in (None, list(request.prompt)) for c in choices):
                raise ServerLost("its prompt has other token ids than the one sent")
            if any(c.get("token_ids") is None or c.get("logprobs") is None for c in choices):
                raise ServerLost("its answer lacks token ids or log-probabilities")
            pairs = [(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in choices]
        except (KeyError, TypeError, AttributeError) as e:
            raise ServerLost(f"its answer is not a completion ({type(e).__name__}: {e})") from e
        return check_samples(request, pairs * (request.samples if request.sampling.temperature == 0 else 1))

    def answered_by(self, policy: Policy, answer: Any) -> str | None:
        """Return the name of the weights that gave an answer of `path` or `counted`; None if it has no name."""
        return answer.get("weight_version")

    def version(self, server: Control) -> str | None:
        """Return the version of its code; None if it does not report one."""
        return read_field(server, ("/version",), "version")

    def weights(self, server: Control, policy: Policy) -> str | None:
        """Return the name of its dense weights; None if it does not report it."""
        return read_field(server, ("/weight_info",), "weight_version")

    def label(self, server: Control, policy: Policy) -> None:
        """Name the weights of a server that was started on the policy's folder."""
        server.post("/update_weight_version", {"new_version": policy.weights})

    def reload(self, server: Control, policy: Policy) -> None:
        """Make it load the dense weights and store their name."""
        # The files are written before the server stops answering.
        sent, folder = (None, policy.folder()) if policy.transfer is None else (policy.transfer(), None)
        # If the reload fails half-way, the server must not report either policy.
        server.post("/update_weight_version", {"new_version": "unknown"})
        server.post("/pause?mode=wait")
        try:
            if sent is None:
                server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            else:
                self._transfer(server, sent)
            server.post("/reset_prefix_cache")
        finally:
            server.post("/resume")
        self.label(server, policy)

    def _transfer(self, server: Control, sent: Transfer) -> None:
        """Make its workers read a policy's files, by the phases of its weight transfer."""
        server.post("/init_weight_transfer_engine", {"init_info": {"root": sent.root}})
        server.post("/start_weight_update")
        try:
            server.post("/update_weights", {"update_info": {"folder": sent.folder, "files": sent.files}})
        except (ServerLost, ServerRefused):
            # The workers that did not fail would refuse the next start.
            with contextlib.suppress(ServerLost, ServerRefused):
                server.post("/finish_weight_update")
            raise
        server.post("/finish_weight_update")

    def sleep(self, server: Control, discard: bool) -> None:
        """Make it end its requests and free its GPUs' memory. discard: without a copy of its weights on the host."""
        if discard:
            # It must not report weights that are gone.
            server.post("/update_weight_version", {"new_version": "unknown"})
        server.post(f"/sleep?level={2 if discard else 1}&mode=abort")

    def wake(self, server: Control, tag: str) -> None:
        """Make a sleeping server take memory for `weights` or `kv_cache`. Discarded weights come back as garbage."""
        server.post(f"/wake_up?tags={tag}")

    def adapt(self, server: Control, policy: Policy, previous: str | None) -> None:
        """Make it load the adapter next to its dense weights, and drop the previous one."""
        assert policy.adapter is not None
        known = {m["id"] for m in server.get("/v1/models")["data"]}
        if policy.digest not in known:
            server.post("/v1/load_lora_adapter", {"lora_name": policy.digest, "lora_path": str(policy.adapter())})
        if previous in known - {policy.digest}:
            server.post("/v1/unload_lora_adapter", {"lora_name": previous})
