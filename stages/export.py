"""The policy as a Hugging Face folder that transformers, vLLM and others load, with a card of its provenance."""

from __future__ import annotations

import json
import shutil
from typing import Any, Literal

from rlhf.stages.common.models import ADAPTER, load_policy, load_tokenizer, stop_ids, token_ids
from rlhf.stages.contract.definition import Context, Reads, Stage, StageConfig
from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.store.keys import published


class Config(StageConfig):
    """The exported folder."""

    name: str = "policy"
    """Name of the model in its model card."""
    dtype: Literal["base", "float32", "bfloat16", "float16"] = "base"
    """Type of the exported weights; base: the type of each tensor in the base model. Training always uses float32
    weights."""


def lineage(artifact: Artifact) -> list[dict[str, Any]]:
    """Return the artifact and its ancestors, nearest first, each once."""
    history: dict[str, dict[str, Any]] = {}
    queue, seen = [artifact], {artifact.key}
    while queue:
        current = queue.pop(0)
        manifest = current.manifest
        names = ("stage", "key", "digest", "seed", "config", "inputs", "versions", "device")
        history[current.key] = {name: manifest[name] for name in names} | {"config": published(manifest["config"])}
        for ref in manifest["inputs"].values():
            if ref["key"] in seen:
                continue
            parent = current.store.with_digest(ref["stage"], ref["key"], ref["digest"])
            # An ancestor that is no longer stored ends its branch of the history.
            if parent is not None:
                seen.add(parent.key)
                queue.append(parent)
    return list(history.values())


def run(ctx: Context) -> dict[str, Any]:
    """Write the Hugging Face folder, `provenance.json` and the card; return size and fingerprint."""
    from rlhf.tuning.models import huggingface, identity, tokenizer
    from rlhf.tuning.models.tensors import Tensors

    policy, base = ctx.inputs["policy"], ctx.inputs["tokenizer"]
    config, params = load_policy(ctx, policy)
    ids = token_ids(base)
    dtype, types = ctx.config.dtype, None
    if dtype == "base":
        dtype = json.loads(base.local("model/config.json").read_bytes())["torch_dtype"]
        with Tensors(base.local("model/")) as tensors:
            types = tensors.types
    huggingface.save_decoder(ctx.out, config, params, ids, dtype=dtype, types=types)
    tokenizer.save_tokenizer(load_tokenizer(ctx, base), ctx.out)
    # Every id that ends a completion: other engines must stop where training did (R10).
    generation = {k: v for k, v in ids.items() if v is not None} | {"eos_token_id": list(stop_ids(ctx, base))}
    (ctx.out / "generation_config.json").write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n")
    if policy.has(f"{ADAPTER}/"):
        shutil.copytree(policy.local(f"{ADAPTER}/"), ctx.out / ADAPTER)
    history = lineage(policy)
    (ctx.out / "provenance.json").write_text(json.dumps(history, indent=1, sort_keys=True) + "\n")
    (ctx.out / "README.md").write_text(_card(ctx.config.name, policy, history), encoding="utf-8")
    for stray in ctx.out.glob(".*.part"):
        shutil.rmtree(stray, ignore_errors=True)
    size = sum(file.stat().st_size for file in ctx.out.glob("*.safetensors"))
    ctx.log(f"exported {ctx.config.name}: {size / 1e6:.1f} MB of safetensors")
    return {"bytes": size, "fingerprint": identity.fingerprint(params)}


def _card(name: str, policy: Artifact, history: list[dict[str, Any]]) -> str:
    """Return the README of the folder: stages, keys and digests, the oldest first."""
    lines = [f"# {name}", "", "Made by rlhf-pipeline. `provenance.json` holds configs, seeds and versions.", ""]
    lines += ["| stage | key | output digest |", "|---|---|---|"]
    lines += [f"| {h['stage']} | {h['key'][:12]} | {h['digest'][:12]} |" for h in reversed(history)]
    if policy.has(f"{ADAPTER}/"):
        lines += ["", f"`{ADAPTER}/` holds the adapter of the last stage in PEFT's format, merged in these weights."]
    return "\n".join([*lines, "", f"Policy digest: {policy.digest}", ""])


STAGE = Stage(
    "export",
    1,
    Config,
    run,
    draws=lambda config: False,
    work="data",
    section="export",
    title="export",
    reads={"policy": Reads("policy"), "tokenizer": Reads("tokenizer")},
    headline=(lambda metrics: f"{metrics['bytes'] / 1e6:.1f} MB",),
)
