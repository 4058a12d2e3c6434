"""Rollouts by HTTP servers (`rlhf.tuning.rollout.servers`): the policy that they get, as files, a folder or an adapter.

Servers that are started here live as long as the worker: the next round gives them new weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec

from rlhf.stages.common.models import ADAPTER, below, load_rounded, load_tokenizer, stop_ids, token_ids
from rlhf.stages.contract.definition import Context
from rlhf.stages.sampling.settings import EngineSettings
from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.store.keys import digest
from rlhf.stages.store.leases import is_alive, process_folder
from rlhf.tuning.allowed import check_key
from rlhf.tuning.atomic import whole_folder

# Completions, and tokens of each, that show whether a server has the policy.
PROBES = 4
PROBE_TOKENS = 16
USUAL_CONTEXT = 4096
"""Tokens of a started server's context, unless the model has fewer or a round needs more."""


_started: dict[str, tuple[int, list[Any]]] = {}
"""Context and servers that this worker has started, by the digest of their settings; one entry at a time, because two
would not fit the devices."""
_transfers: dict[Path, Any] = {}
"""The newest policy that servers read as files, by its folder here."""
_loading = threading.Lock()
"""Held while a policy is loaded or written: servers get theirs side by side, from one copy and one folder."""
_at_rest = contextlib.ExitStack()
"""Ends the present stage's use of servers."""
_places: set[str] = set()
"""Folders and URLs below which this worker stores weights for servers."""


def open_engine(ctx: Context, settings: EngineSettings, quantize: str, context: int, requests: Sequence[Any]) -> Any:
    """A `Fleet` whose servers have the stage's policy; the first of `requests` are the probes that prove it."""
    from rlhf.tuning.rollout.servers.fleet import Fleet, Options
    from rlhf.tuning.rollout.servers.kinds import KINDS

    names = ("sync", "concurrency", "tries", "start_seconds", "wait_seconds", "tolerance", "version", "seeds")
    policy = _policy(ctx, settings, quantize, requests)
    positions = load_rounded(ctx, ctx.inputs["policy"], quantize)[0].max_positions
    # `context` is bucketed and may exceed the positions.
    servers = _servers(ctx, settings, min(context, positions), min(positions, max(USUAL_CONTEXT, context)))
    remote = Fleet(KINDS[settings.kind], servers, Options(**{n: getattr(settings, n) for n in names}), ctx.log)
    if settings.sleep:
        # Written from the devices, before the servers need their memory.
        policy.folder()
        _at_rest.callback(_off_devices(ctx.memory, f"decoder:{ctx.inputs['policy'].digest}"))
    _at_rest.callback(remote.sleep if settings.sleep else remote.close)
    remote.load(policy)
    ctx.metrics_line(servers=len(remote.gaps), logprob_gap=max(remote.gaps.values()))
    return remote


def rest() -> None:
    """Leave the servers, or lay them to sleep and move the values back. The worker calls it after each stage."""
    _at_rest.close()


def _off_devices(memory: dict[str, Any], stays: str) -> Callable[[], None]:
    """Move the arrays of a worker's memory to the host, but for values whose names begin with `stays`.

    Returns a function that moves them back. An array that several values share stays one. Arrays on the devices of
    several processes are not moved.
    """
    import jax

    from rlhf.tuning.device import return_memory

    values = {name: value for name, value in memory.items() if not name.startswith(stays)}
    arrays = {id(x): x for x in jax.tree.leaves(values) if isinstance(x, jax.Array) and x.is_fully_addressable}
    copies = jax.device_get(arrays)
    places = [(copies[i], x.sharding) for i, x in arrays.items()]
    memory |= jax.tree.map(lambda x: copies.get(id(x), x), values)
    del values, arrays
    return_memory()

    def back() -> None:
        found = {id(copy): jax.device_put(copy, place) for copy, place in places}
        memory.update(jax.tree.map(lambda x: found.get(id(x), x), dict(memory)))

    return back


def end_all() -> None:
    """End the servers that were started here and remove their weights. The worker calls it at its end; a kill of the
    worker ends the servers too."""
    for name in list(_started):
        _end(name)
    for place in _places:
        # Each client of an object store has its own errors.
        with contextlib.suppress(Exception):
            fs, path = fsspec.core.url_to_fs(place)
            fs.rm(path, recursive=True)


def _end(name: str) -> None:
    servers = _started.pop(name)[1]
    # All at a time: a worker has seconds to end.
    for server in servers:
        server.child.leave()
    for server in servers:
        server.child.end()


def _servers(ctx: Context, settings: EngineSettings, context: int, room: int) -> list[Any]:
    """Return running servers at their URLs, or those of this worker, which are started if none fits.

    context: tokens that they need. room: tokens that they get if they are started.
    """
    from rlhf.tuning.device import choose
    from rlhf.tuning.rollout.servers.child import gpus_of_servers
    from rlhf.tuning.rollout.servers.server import RemoteServer

    key = ""
    if settings.key_variable is not None:
        key = os.environ.get(settings.key_variable, "")
        if not key:
            raise ValueError(f"rl.rollout.engine.key_variable: {settings.key_variable} is not set; export it")
        for url in settings.urls:
            check_key(settings.key_variable, url)
    options: dict[str, Any] = {"timeout": settings.timeout, "retries": settings.tries, "key": key}
    if settings.command is None:
        return [RemoteServer(url, **options) for url in settings.urls]
    # A server restarts for other values of these settings, which a running one cannot change.
    same = {"kind", "command", "arguments", "environment", "servers", "dtype", "sleep"}
    wanted = digest(settings.model_dump(mode="json", include=same) | {"adapters": settings.sync == "adapter"})
    # Ended before others start: the devices would not hold both.
    for name in [n for n, (started, _) in _started.items() if n != wanted or started < context]:
        _end(name)
    if wanted not in _started:
        words = [*settings.words, *settings.arguments]
        gpus = gpus_of_servers(words, settings.servers, os.environ | settings.environment)
        if choose().platform == "gpu" and not settings.sleep and "CUDA_VISIBLE_DEVICES" not in settings.environment:
            ctx.log(
                "the servers and the trainer have the same GPUs: set rl.rollout.engine.sleep, or list others as "
                "CUDA_VISIBLE_DEVICES in rl.rollout.engine.environment"
            )
        _started[wanted] = room, [_server(ctx, settings, room, i, own, options) for i, own in enumerate(gpus)]
    return _started[wanted][1]


def _server(
    ctx: Context, settings: EngineSettings, context: int, number: int, gpus: Sequence[str], options: dict[str, Any]
) -> Any:
    """A server that this worker starts, on all GPUs if none is named; its output goes to a log next to its weights."""
    from rlhf.tuning.device import choose
    from rlhf.tuning.rollout.servers.child import Child
    from rlhf.tuning.rollout.servers.kinds import KINDS
    from rlhf.tuning.rollout.servers.protocol import sample_seed
    from rlhf.tuning.rollout.servers.server import RemoteServer

    kind, starts = KINDS[settings.kind], itertools.count()
    # Servers for CPU refuse the arguments.
    sleeps = settings.sleep and choose().platform == "gpu"

    def command(folder: Path, port: int) -> list[str]:
        # Servers, and starts of one, would else draw the same random numbers.
        seed = sample_seed(31, ctx.seed, number, next(starts))
        arguments = kind.arguments(folder, port, settings.dtype, context, settings.sync == "adapter", seed, sleeps)
        return [*settings.words, *arguments, *settings.arguments]

    log = _place(ctx, settings) / f"{settings.kind}-{number}.log"
    # Other users of this machine reach the port too.
    key = options["key"] or secrets.token_urlsafe(32)
    environment = kind.environment(key) | settings.environment
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    options = options | {"key": environment.get("VLLM_API_KEY", options["key"])}
    return RemoteServer(child=Child(command, environment, log), **options)


def _place(ctx: Context, settings: EngineSettings) -> Path:
    """The folder of this worker's weights for servers; they are copied from there to a URL."""
    local = settings.folder if settings.folder and "://" not in settings.folder else None
    place = Path(_own(local or str(ctx.inputs["policy"].store.scratch / "engines")))
    place.mkdir(parents=True, exist_ok=True)
    return place


def _own(root: str) -> str:
    """This worker's folder below a folder or URL. Those of dead workers of this machine are removed."""
    fs, path = fsspec.core.url_to_fs(root)
    for old in fs.ls(path, detail=False) if fs.exists(path) else ():
        if is_alive(old.rstrip("/").rpartition("/")[2]) is False:
            # It is another user's, or another worker removes it too.
            with contextlib.suppress(OSError):
                fs.rm(old, recursive=True)
    own = f"{path}/{process_folder()}"
    _places.add(fs.unstrip_protocol(own))
    return own


def _policy(ctx: Context, settings: EngineSettings, quantize: str, requests: Sequence[Any]) -> Any:
    """The stage's policy in the form that servers load."""
    from rlhf.tuning.rollout.servers.protocol import Policy

    artifact: Artifact = ctx.inputs["policy"]
    lora: Any = artifact.manifest["config"].get("lora") if artifact.stage == "update" else None
    adapts, adapter = settings.sync == "adapter" and lora is not None, None
    base, kind = (below(artifact), lora["quantize"]) if adapts else (artifact, quantize)
    if adapts:
        adapter = functools.partial(_adapter, ctx, settings, artifact)
    # Counters that no prompt has: a probe must not repeat the draw of a rollout.
    probe = [
        dataclasses.replace(r, max_tokens=min(r.max_tokens, PROBE_TOKENS), samples=1, counter=2**31 + i)
        for i, r in enumerate(requests[:PROBES])
    ]
    return Policy(
        digest=_name(artifact, quantize),
        folder=functools.partial(_folder, ctx, settings, base, kind),
        logps=_logps(ctx, quantize),
        probe=probe,
        vocabulary=load_rounded(ctx, artifact, quantize)[0].vocab_size,
        transfer=functools.partial(_transfer, ctx, settings, base, kind) if settings.transfers else None,
        dtype=settings.dtype,
        base=_name(base, kind) if adapts else "",
        adapter=adapter,
    )


def _adapter(ctx: Context, settings: EngineSettings, artifact: Artifact) -> Path:
    """The policy's adapter as a folder, which replaces the folder of the policy before it."""
    with _loading:
        place = _place(ctx, settings)
        target = place / f"{ADAPTER}-{artifact.digest[:16]}"
        if not target.exists():
            for old in place.glob(f"{ADAPTER}-*"):
                shutil.rmtree(old)
            with whole_folder(target) as partial:
                shutil.copytree(artifact.local(f"{ADAPTER}/"), partial, dirs_exist_ok=True)
        return target


def _name(artifact: Artifact, quantize: str) -> str:
    """The name under which servers know a policy: its digest, and how its kernels are rounded."""
    return artifact.digest if quantize == "none" else f"{artifact.digest}-{quantize}"


def _folder(ctx: Context, settings: EngineSettings, artifact: Artifact, quantize: str) -> Path:
    """The policy as a Hugging Face folder, which replaces the folder of the policy before it."""
    from rlhf.tuning.device import choose
    from rlhf.tuning.models import huggingface, tokenizer

    with _loading:
        place = _place(ctx, settings)
        target = place / f"model-{artifact.digest[:16]}-{quantize}"
        if target.exists():
            return target
        # Removed before the new one is written: a model may fill the disk.
        for old in place.glob("model-*"):
            shutil.rmtree(old)
        config, params = load_rounded(ctx, artifact, quantize)
        if choose().platform == "cpu" and settings.kind != "native" and not config.family.startswith("gemma"):
            # vLLM's CPU kernels keep a packed copy of the LM head, which a reload renews only if the head is not tied.
            # Its Gemma has tied heads alone: there the probe finds the old head, and the server is restarted.
            config, params = huggingface.untied(config, params)
        base = ctx.inputs["tokenizer"]
        generation = token_ids(base) | {"eos_token_id": list(stop_ids(ctx, base))}
        with whole_folder(target) as partial:
            huggingface.save_decoder(partial, config, params, token_ids(base), dtype=settings.dtype)
            tokenizer.save_tokenizer(load_tokenizer(ctx, base), partial)
            (partial / "generation_config.json").write_text(json.dumps(generation, sort_keys=True) + "\n")
        return target


def _transfer(ctx: Context, settings: EngineSettings, artifact: Artifact, quantize: str) -> Any:
    """The policy's files below `folder`, where this worker writes them first if that is a URL."""
    from rlhf.tuning.rollout.servers.transfer import Transfer, digests

    source = _folder(ctx, settings, artifact, quantize)
    assert settings.folder is not None
    with _loading:
        if source not in _transfers:
            if "://" in settings.folder:
                fs, _ = fsspec.core.url_to_fs(settings.folder)
                own = _own(settings.folder)
                # Removed before the new one is written, as in `_folder`.
                if fs.exists(own):
                    fs.rm(own, recursive=True)
                fs.put(f"{source}/", f"{own}/{source.name}/", recursive=True)
            _transfers.clear()
            _transfers[source] = Transfer(settings.folder, f"{source.parent.name}/{source.name}", digests(source))
        return _transfers[source]


def _logps(ctx: Context, quantize: str) -> Callable[[Sequence[tuple[Sequence[int], Sequence[int]]], float], Any]:
    """The trainer's log-probabilities, for `Policy.logps`."""

    def logps(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[list[float]]:
        from rlhf.tuning.device import choose
        from rlhf.tuning.training.completions import token_logps

        config, params = load_rounded(ctx, ctx.inputs["policy"], quantize)
        device = choose(ctx.config.compute.dtype)
        return token_logps(config, params, pairs, temperature, device.compute, device.row_tokens_per_step)

    return logps
