"""SGLang over HTTP: its own `/generate`.

It honours seeds with `--enable-deterministic-inference` only. Its log-probabilities are those before top_k, top_p and
min_p, so requests that use these are refused.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from rlhf.tuning.rollout.requests import Completion, RefusedRequest, Request
from rlhf.tuning.rollout.servers.protocol import (
    TAGS,
    Control,
    Policy,
    ServerLost,
    ServerRefused,
    check_samples,
    read_field,
    refuse_strings,
    sample_seed,
)
from rlhf.tuning.rollout.servers.vllm import SLEEPERS_SHARE


class SGLang:
    """SGLang. Methods as in `VLLM`."""

    name, path = "sglang", "/generate"
    counted: str | None = None

    def arguments(
        self, folder: Path, port: int, dtype: str, context: int, adapters: bool, seed: int = 0, sleeps: bool = False
    ) -> list[str]:
        arguments = ["--model-path", str(folder), "--host", "127.0.0.1", "--port", str(port)]
        arguments += ["--dtype", dtype, "--context-length", str(context), "--random-seed", str(seed)]
        arguments += ["--enable-memory-saver", "--mem-fraction-static", SLEEPERS_SHARE] if sleeps else []
        # Without it, released weights are lost.
        arguments += ["--enable-weights-cpu-backup"] if sleeps and adapters else []
        return [*arguments, *(["--enable-lora"] if adapters else [])]

    def environment(self, key: str = "") -> dict[str, str]:
        # SGLang takes a key only as an argument, which every user of the machine can read.
        return {"HF_HUB_OFFLINE": "1"}

    def body(self, request: Request, policy: Policy, seeds: bool = False) -> dict[str, Any]:
        refuse_strings(request)
        s = request.sampling
        if s.temperature > 0 and (s.top_p < 1 or s.top_k > 0 or s.min_p > 0):
            raise RefusedRequest(
                f"request {request.name or request.counter}: SGLang's log-probabilities are those before top_p, top_k "
                "and min_p; sample without them, or with another engine"
            )
        params: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "temperature": s.temperature,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(request.stop_ids),
            # SGLang ignores stop_token_ids too if this is set.
            "ignore_eos": not request.stop_ids,
        }
        each = [params] * request.samples
        if seeds:
            own = [sample_seed(31, request.seed, request.counter, i) for i in range(request.samples)]
            each = [params | {"sampling_seed": seed} for seed in own]
        body: dict[str, Any] = {
            "input_ids": [list(request.prompt)] * request.samples,
            "sampling_params": each,
            "return_logprob": True,
        }
        return body | ({"lora_path": policy.digest} if policy.adapter else {})

    def completions(self, request: Request, answer: Any) -> list[Completion]:
        answers = answer if isinstance(answer, list) else [answer]
        try:
            rows = [a["meta_info"]["output_token_logprobs"] for a in answers]
            return check_samples(request, [([r[1] for r in row], [r[0] for r in row]) for row in rows])
        except (KeyError, TypeError, IndexError) as e:
            raise ServerLost(f"its answer lacks token ids or log-probabilities ({type(e).__name__}: {e})") from e

    def answered_by(self, policy: Policy, answer: Any) -> str | None:
        answers = answer if isinstance(answer, list) else [answer]
        versions = {a["meta_info"].get("weight_version") for a in answers}
        return next((v for v in versions if v != policy.weights), policy.weights)

    def version(self, server: Control) -> str | None:
        return read_field(server, ("/server_info", "/get_server_info"), "version")

    def weights(self, server: Control, policy: Policy) -> str | None:
        return read_field(server, ("/model_info", "/get_weight_version"), "weight_version")

    def label(self, server: Control, policy: Policy) -> None:
        server.post("/update_weight_version", {"new_version": policy.weights, "abort_all_requests": False})

    def reload(self, server: Control, policy: Policy) -> None:
        body = {"model_path": str(policy.folder()), "weight_version": policy.weights, "abort_all_requests": True}
        answer = server.post("/update_weights_from_disk", body)
        if not answer.get("success"):
            raise ServerRefused(f"update_weights_from_disk: {answer.get('message')}")

    def sleep(self, server: Control, discard: bool) -> None:
        if discard:
            server.post("/update_weight_version", {"new_version": "unknown", "abort_all_requests": True})
        server.post("/release_memory_occupation", {"tags": TAGS})

    def wake(self, server: Control, tag: str) -> None:
        server.post("/resume_memory_occupation", {"tags": [tag]})

    def adapt(self, server: Control, policy: Policy, previous: str | None) -> None:
        assert policy.adapter is not None
        with contextlib.suppress(ServerRefused):
            server.post("/unload_lora_adapter", {"lora_name": policy.digest})
        server.post("/load_lora_adapter", {"lora_name": policy.digest, "lora_path": str(policy.adapter())})
        if previous not in (None, policy.digest):
            with contextlib.suppress(ServerRefused):
                server.post("/unload_lora_adapter", {"lora_name": previous})
