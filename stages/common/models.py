"""Models of artifacts, kept in the worker's memory by content."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from rlhf.stages.contract.definition import Context
from rlhf.stages.contract.registry import stage
from rlhf.stages.store.artifacts import Artifact

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf.tuning.device import Device
    from rlhf.tuning.models.config import DecoderConfig
    from rlhf.tuning.rollout.engine.pool import Limits

MEMORY_SHARE = 0.35
"""Share of the device's memory for values that are kept between stages."""
TRAINER = "trainer:"
"""Prefix of the names in the worker's memory of an update's inputs other than its policy."""
ADAPTER = "adapter"
"""The folder of an artifact that holds an adapter, as PEFT loads it."""


def remember(ctx: Context, name: str, value: Any) -> Any:
    """Keeps a value that holds arrays; the least recently used leave when a device's share is full.

    What stays, however large: the value itself, since the stage needs it, and the policy and trainer of the newest
    update (`held`), which could only be had again by training once more.
    """
    from rlhf.tuning.device import memory_bytes

    # Popped and set again, it is the last: the order of insertion is that of use.
    ctx.memory.pop(name, None)
    ctx.memory[name] = value
    stays = {name, *held(ctx.memory)}
    for old in [n for n, kept in ctx.memory.items() if n not in stays and bytes_by_device(kept)]:
        if max(bytes_by_device(ctx.memory).values(), default=0) <= MEMORY_SHARE * memory_bytes():
            break
        del ctx.memory[old]
    return value


def held(memory: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the newest update's policy and trainer among values that are kept; none where no update is."""
    newest = next((name for name in reversed(list(memory)) if name.startswith(TRAINER)), None)
    return () if newest is None else (newest, newest.replace(TRAINER, "decoder:", 1))


def bytes_by_device(tree: Any) -> dict[Any, int]:
    """Bytes of a tree's arrays in the memory of each device of this process; one that is there twice counts once."""
    import jax

    from rlhf.tuning.device import HOST_MEMORY

    arrays = {id(leaf): leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)}
    found: dict[Any, int] = collections.Counter()
    for array in arrays.values():
        if array.sharding.memory_kind == HOST_MEMORY:
            continue
        # Without touching the values: an array that was donated has none.
        part = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for device in array.sharding.addressable_devices:
            found[device] += part
    return found


def recall(ctx: Context, name: str) -> Any | None:
    """Return a cached value, now the most recently used; None if it is not cached."""
    if name not in ctx.memory:
        return None
    value = ctx.memory.pop(name)
    ctx.memory[name] = value
    return value


def cached(ctx: Context, name: str, load: Callable[[], Any]) -> Any:
    """Return the cached value of this name, or the value of `load`, which is then cached."""
    value = recall(ctx, name)
    return remember(ctx, name, load()) if value is None else value


def mesh_of(ctx: Context) -> Mesh | None:
    """The mesh of the stage's settings, else one over all devices; None for a single device, and where no stage runs.

    Raises ValueError where the settings ask for other devices than there are.
    """
    if ctx.config is None:
        return None
    from rlhf.tuning.axes import Axes
    from rlhf.tuning.mesh import over_devices

    compute = getattr(ctx.config, "compute", None)
    return over_devices(Axes() if compute is None else compute.mesh)


def load_policy(ctx: Context, artifact: Artifact) -> tuple[Any, Any]:
    """Return (DecoderConfig, parameters) of a base, SFT or update artifact.

    The `restore` of its stage merges an adapter, or rebuilds a policy whose weights are not stored.
    """
    from rlhf.tuning.models.huggingface import load_decoder

    def load() -> tuple[Any, Any]:
        if (folder := _weights(artifact)) is not None:
            return load_decoder(artifact.local(folder), mesh_of(ctx))
        # By name, not by import: how a policy is restored is no part of what samples or scores it.
        restore = stage(artifact.stage).restore
        if restore is None:
            raise RuntimeError(f"{artifact.url} has no folder model, and its stage cannot restore a policy")
        return restore(ctx, artifact)

    return cached(ctx, f"decoder:{artifact.digest}", load)


def _weights(artifact: Artifact) -> str | None:
    """Return the folder of an artifact's weights; None if it stores none."""
    return next(filter(artifact.has, ("model/", "state/model/")), None)


def load_rounded(ctx: Context, artifact: Artifact, kind: str) -> tuple[Any, Any]:
    """As `load_policy`, with kernels rounded to `kind` (`lora.quantize`), as an adapter over them sees them."""
    from rlhf.tuning.models.lora import rounded

    if kind == "none":
        return load_policy(ctx, artifact)

    def load() -> tuple[Any, Any]:
        config, params = load_base(ctx, artifact)
        return config, rounded(config, "decoder", params, kind)

    return cached(ctx, f"decoder:{artifact.digest}:{kind}", load)


def load_frozen(ctx: Context, artifact: Artifact, kind: str = "none") -> tuple[Any, Any]:
    """As `load_rounded`, for weights that the stage only reads: matrices are in its type of computation.

    A smaller type than that of weights halves the memory, and changes no product: each casts its matrix.
    """
    from rlhf.tuning.models.huggingface import load_decoder
    from rlhf.tuning.models.tensors import narrowed

    dtype = _smaller(ctx)
    if dtype is None:
        return load_rounded(ctx, artifact, kind)

    def load() -> tuple[Any, Any]:
        folder = _weights(artifact)
        if kind == "none" and folder is not None and f"decoder:{artifact.digest}" not in ctx.memory:
            return load_decoder(artifact.local(folder), mesh_of(ctx), dtype)
        config, params = load_rounded(ctx, artifact, kind)
        return config, narrowed(params, dtype)

    return cached(ctx, f"decoder:{artifact.digest}:{kind}:{dtype}", load)


def load_base(ctx: Context, artifact: Artifact) -> tuple[Any, Any]:
    """As `load_policy`, for weights that go under an adapter: matrices stay in the type of computation if the files
    have them in it, which changes no value. One copy then serves training, the reference and merging."""
    from rlhf.tuning.models.tensors import Tensors

    folder, dtype = _weights(artifact), _smaller(ctx)
    if folder is None or dtype is None:
        return load_policy(ctx, artifact)
    with Tensors(artifact.local(folder)) as tensors:
        if any(tensors.types[name] != dtype for name, shape in tensors.shapes.items() if len(shape) > 1):
            return load_policy(ctx, artifact)
    policy = load_frozen(ctx, artifact)
    # A sampler of this process may have left the same weights in the larger type.
    ctx.memory.pop(f"decoder:{artifact.digest}", None)
    return policy


def _smaller(ctx: Context) -> str | None:
    """The stage's type of computation where it is smaller than that of weights; None without a type."""
    import jax.numpy as jnp

    from rlhf.tuning.device import choose
    from rlhf.tuning.precision import real

    if not hasattr(ctx.config, "compute"):
        return None
    dtype = choose(ctx.config.compute.dtype).compute.dtype
    return dtype if jnp.dtype(dtype).itemsize < real().itemsize else None


def load_scorer(ctx: Context, artifact: Artifact, *, frozen: bool = False) -> tuple[Any, Any]:
    """(DecoderConfig, ScalarHead parameters) of a reward artifact; `frozen` as in `load_frozen`."""
    from rlhf.tuning.models.huggingface import load_scalar_head
    from rlhf.tuning.models.tensors import narrowed

    dtype = _smaller(ctx) if frozen else None
    name = f"scorer:{artifact.digest}" if dtype is None else f"scorer:{artifact.digest}:{dtype}"

    def load() -> tuple[Any, Any]:
        # By name, as in `load_policy`.
        restore = None if artifact.has("model/") else stage(artifact.stage).restore
        if restore is None:
            return load_scalar_head(artifact.local("model/"), mesh_of(ctx), dtype)
        config, params = restore(ctx, artifact)
        return config, params if dtype is None else narrowed(params, dtype)

    return cached(ctx, name, load)


_firsts: dict[str, Artifact] = {}
"""By URL and digest of an artifact the first round of its updates: each walks only over the rounds since the last."""


def below(artifact: Artifact) -> Artifact:
    """Return the artifact that training started from: the policy before the stage, or the first round of its updates.

    Raises RuntimeError, naming both, if it is not stored any more.
    """
    name = f"{artifact.url} {artifact.digest}"
    first = _firsts.get(name, artifact)
    while True:
        inputs = first.manifest["inputs"]
        ref = inputs.get("policy") or inputs["base"]
        parent = first.store.with_digest(ref["stage"], ref["key"], ref["digest"])
        if parent is None:
            raise RuntimeError(
                f"{first.url} was trained from {ref['stage']}/{ref['key'][:12]}, which is gone from "
                f"{first.store.shown}: restore it from a backup, or run the recipe again"
            )
        one, two = first.manifest["config"], parent.manifest["config"]
        if not first.stage == parent.stage == "update" or one.get("lora") != two.get("lora"):
            _firsts[name] = first
            return parent
        first = _firsts.get(f"{parent.url} {parent.digest}", parent)


def save_model(ctx: Context, kind: Literal["decoder", "scorer"], config: DecoderConfig, params: Any) -> None:
    """Writes a trained model below `model/`, and keeps it in the worker's memory for the next stage.

    A stage with `lora` stores its adapter alone (`rlhf.stages.training.adapters`).
    """
    from rlhf.tuning.models.huggingface import save_decoder

    if getattr(ctx.config, "lora", None) is None:
        save_decoder(ctx.out / "model", config, params, token_ids(ctx.inputs["tokenizer"]))
    remember(ctx, f"{kind}:new", (config, params))


def limits_of(compute: Any, device: Device, context: int = 0, replicas: int = 1, few: bool = False) -> Limits:
    """The size of each engine by settings and device; `context` in tokens, where it is known beforehand; `few` as in
    `Limits`."""
    # `compute` has no type: export imports this module, and an edit of training's settings must not change its key.
    from rlhf.tuning.rollout.engine.limits import FREE_SHARE, Limits

    # 0: the device decides. The setting is of all replicas together.
    slots = -(-compute.rollout_rows // replicas) or device.rollout_rows
    return Limits(
        slots=slots,
        context=context,
        cache_bytes=device.cache_bytes,
        cache_share=FREE_SHARE,
        chunks=device.chunk_tokens,
        few=few,
    )


def load_tokenizer(ctx: Context, artifact: Artifact) -> Any:
    """The tokenizer of a base artifact."""
    from rlhf.tuning.models.tokenizer import load_tokenizer as load

    # Without arrays it takes none of the device's share.
    name = f"tokenizer:{artifact.part_digest(('tokenizer/',))}"
    if name not in ctx.memory:
        ctx.memory[name] = load(artifact.local("tokenizer/"))
    return ctx.memory[name]


def token_ids(base: Artifact) -> dict[str, Any]:
    """Return bos, eos and pad ids of the base model's config, for the configs of its descendants."""
    values = _config(base)
    return {k: values[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if values.get(k) is not None}


def vocabulary(base: Artifact) -> int:
    """Return the number of rows of the base model's embeddings."""
    return int(_config(base)["vocab_size"])


def positions(base: Artifact) -> int | None:
    """Return the number of positions that the base model was made for; None if its config has none."""
    from rlhf.tuning.models.positions import positions_in

    return positions_in(_config(base))


def _config(base: Artifact) -> Any:
    return json.loads(base.local("model/config.json").read_bytes())


def stop_ids(ctx: Context, base: Artifact) -> tuple[int, ...]:
    """Every id that ends a completion: the generation config's, the tokenizer's and the chat template's (R10, R23)."""
    from rlhf.tuning.models.tokenizer import eos_ids

    return eos_ids(load_tokenizer(ctx, base), token_ids(base))
