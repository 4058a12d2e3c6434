"""`rlhf.stages.serving.server` with the endpoints by which vLLM and SGLang change weights, and SGLang's `/generate`.

A program with vLLM's arguments, so that it can be started as vLLM is: the same HTTP, this project's engine behind it.
SGLang's part answers the schema of its documentation; it stands for no run against SGLang itself.
"""

import argparse
import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import jax
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from rlhf.stages.serving import app as serving
from rlhf.stages.serving.app import Guard
from rlhf.stages.serving.server import Metrics, Server
from rlhf.tuning.models.huggingface import random_params, read_config
from rlhf.tuning.models.tokenizer import load_tokenizer
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.folder import load_folder
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.live import Live
from rlhf.tuning.rollout.requests import Request as Asked
from rlhf.tuning.rollout.requests import Sampling
from rlhf.tuning.rollout.servers.transfer import pull

VERSION = "0.0.test"


class State:
    """A server's engine and what it says of its weights."""

    def __init__(self, folder: Path, context: int = 256, file: Path | None = None):
        self.config = read_config(folder)
        engine = Engine(self.config, limits=Limits(slots=8, context=context, steps=4, chunks=(32,)), top=1)
        load_folder(engine, folder)
        self.live = Live(engine)
        self.version = "default"
        self.context = context
        self.calls: list[str] = []
        self.root = ""
        self.asleep: list[str] = []
        self.slept: list[str] = []
        """Memory that it was asked to free or to take again, and loads of weights; `file` has them too."""
        self.file = file
        self.tokenizer = load_tokenizer(folder)

    def note(self, event: str) -> None:
        self.slept.append(event)
        if self.file is not None:
            self.file.write_text("\n".join(self.slept))

    def load(self, folder: str) -> None:
        """Changes the weights."""
        self.live.look(lambda engine, generation: load_folder(engine, Path(folder)))


def make_app(state: State, fail: Path | None = None) -> FastAPI:
    """The web application. fail: a file that names the path which is answered with an error."""
    app = FastAPI()

    @app.middleware("http")
    async def record(request: Request, call: Any) -> Any:
        state.calls.append(request.url.path)
        asked = request.url.path
        if fail is not None and fail.exists() and fail.read_text() in str(request.url):
            return JSONResponse({"error": "asked to fail"}, 500)
        if asked in ("/v1/completions", "/generate"):
            assert not state.asleep
        elif asked in ("/collective_rpc", "/update_weights_from_disk"):
            # Weights go to memory that is there.
            assert "weights" not in state.asleep
            state.note("load")
        return await call(request)

    @app.get("/version")
    @app.get("/server_info")
    async def version() -> Any:
        return {"version": VERSION}

    @app.get("/weight_info")
    @app.get("/model_info")
    async def weights() -> Any:
        return {"weight_version": state.version}

    @app.post("/update_weight_version")
    async def label(body: dict[str, Any]) -> Any:
        state.version = body["new_version"]
        return {"success": True}

    @app.post("/collective_rpc")
    async def reload(body: dict[str, Any]) -> Any:
        assert body["method"] == "reload_weights"
        await asyncio.to_thread(state.load, body["kwargs"]["weights_path"])
        return {"results": [None]}

    @app.post("/update_weights_from_disk")
    async def from_disk(body: dict[str, Any]) -> Any:
        if not Path(body["model_path"]).is_dir():
            return JSONResponse({"success": False, "message": "no such folder"}, 400)
        await asyncio.to_thread(state.load, body["model_path"])
        state.version = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    @app.post("/init_weight_transfer_engine")
    async def init(body: dict[str, Any]) -> Any:
        state.root = body["init_info"]["root"]
        return {}

    @app.post("/update_weights")
    async def update(body: dict[str, Any]) -> Any:
        assert state.calls[-2] == "/start_weight_update"
        info = body["update_info"]
        folder = await asyncio.to_thread(pull, state.root, info["folder"], info["files"], Path("none"))
        await asyncio.to_thread(state.load, str(folder))
        return {}

    @app.post("/start_weight_update")
    @app.post("/finish_weight_update")
    @app.post("/pause")
    @app.post("/resume")
    @app.post("/reset_prefix_cache")
    async def nothing() -> Any:
        return {}

    def release(tags: list[str], discard: bool) -> None:
        state.note(f"sleep {' '.join(tags)}{' discard' if discard else ''}")
        assert not state.asleep
        if discard:
            empty = jax.tree.map(jax.numpy.zeros_like, random_params(state.config, 0))
            state.live.look(lambda engine, generation: engine.load(empty))
        state.asleep = list(tags)

    def resume(tags: list[str]) -> None:
        state.note(f"wake {' '.join(tags)}")
        for tag in tags:
            state.asleep.remove(tag)

    @app.post("/sleep")
    async def sleep(level: int, mode: str) -> Any:
        assert mode == "abort"
        await asyncio.to_thread(release, ["weights", "kv_cache"], level == 2)
        return {}

    @app.post("/wake_up")
    async def wake(tags: str) -> Any:
        resume([tags])
        return {}

    @app.post("/release_memory_occupation")
    async def released(body: dict[str, Any]) -> Any:
        await asyncio.to_thread(release, body["tags"], True)
        return None

    @app.post("/resume_memory_occupation")
    async def resumed(body: dict[str, Any]) -> Any:
        resume(body["tags"])
        return None

    @app.post("/generate")
    async def generate(body: dict[str, Any]) -> Any:
        assert body["return_logprob"]
        pairs = zip(body["input_ids"], body["sampling_params"], strict=True)
        found = [await asyncio.to_thread(one, prompt, params) for prompt, params in pairs]
        return found

    def one(prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        stops = () if params["ignore_eos"] else tuple(params["stop_token_ids"])
        sampling = Sampling(params["temperature"])
        asked = Asked(prompt, params["max_new_tokens"], sampling, stops, seed=params["sampling_seed"])
        (done,) = state.live.submit(asked).result()
        reason = {"type": "stop", "matched": done.tokens[-1]} if done.stop == "eos" else {"type": "length"}
        rows = [[logp, token, None] for logp, token in zip(done.logps, done.tokens, strict=True)]
        about = {"output_token_logprobs": rows, "finish_reason": reason, "weight_version": state.version}
        return {"text": "", "output_ids": done.tokens, "meta_info": about}

    server = Server(state.live, state.tokenizer, "policy", (), state.context)
    app.mount("/", serving.make_app(server))
    return app


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--pids", type=Path)
    parser.add_argument("--port-file", type=Path)
    parser.add_argument("--fail", type=Path)
    parser.add_argument("--gpus", type=Path)
    parser.add_argument("--slept", type=Path)
    for name in ("--dtype", "--logprobs-mode", "--served-model-name"):
        parser.add_argument(name)
    args = parser.parse_args()
    assert args.host == "127.0.0.1"
    if args.pids is not None:
        with args.pids.open("a") as f:
            f.write(f"{os.getpid()}\n")
    if args.gpus is not None:
        with args.gpus.open("a") as f:
            f.write(f"{os.environ['CUDA_VISIBLE_DEVICES']}\n")
    app: Any = make_app(State(args.model, min(args.max_model_len, 256), args.slept), args.fail)
    if key := os.environ.get("VLLM_API_KEY"):
        app = Guard(app, Metrics(), keys=[key])
    listener = socket.create_server((args.host, args.port))
    if args.port_file is not None:
        args.port_file.write_text(str(listener.getsockname()[1]))
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
