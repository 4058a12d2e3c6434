"""An engine's weights from a model folder, straight into the layout of decoding where that can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from flax import nnx
from flax.traverse_util import flatten_dict

from rlhf.tuning.compile_target import target_platform
from rlhf.tuning.models.config import DecoderConfig, UnsupportedModel
from rlhf.tuning.models.decoder import abstract_decoder
from rlhf.tuning.models.huggingface import as_stored, load_decoder, read_config
from rlhf.tuning.models.linear import JOINED
from rlhf.tuning.models.mapping import tensor_names
from rlhf.tuning.models.tensors import Place, Tensors, check, load_tensors
from rlhf.tuning.precision import without_float64
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.replicas import Replicas


@without_float64
def load_folder(engine: Engine | Replicas, folder: Path) -> None:
    """`Engine.load` from a Hugging Face folder; memory of one device holds dense weights once meanwhile.

    Raises UnsupportedModel, before the engine drops its weights, if the folder's model is not the engine's, or a
    tensor is unknown, missing or of another shape.
    """
    with Tensors(folder) as tensors:
        config = as_stored(read_config(folder), tensors)
        if config != engine.config:
            raise UnsupportedModel(f"{folder} holds another model than this engine's: {config}, not {engine.config}")
        changed = engine.weights_dtype == "int8" or config.num_experts
        if isinstance(engine, Engine) and engine.weights.place is None and not changed:
            graph, shapes = engine.weights.shapes
            places = _places(config, shapes)
            check(config, tensors, shapes, places)
            engine.weights.drop()
            # A copy, which is filled.
            engine.use(graph, load_tensors(config, tensors, jax.tree.map(lambda x: x, shapes), places))
            return
    # The engine casts all matrices on accelerators, and rounds int8 once, from what the file has.
    narrow = target_platform() != "cpu" and engine.weights_dtype != "int8"
    engine.load(load_decoder(folder, engine.loading_mesh, engine.weights_dtype if narrow else None)[1])


def _places(config: DecoderConfig, shapes: Any) -> dict[str, Place]:
    """The place of each tensor in the state of a `DecodingDecoder` whose projections are joined."""
    ours, trainers = (flatten_dict(nnx.to_pure_dict(state)) for state in (shapes, abstract_decoder(config)[1]))
    joined = {part: (whole, parts) for whole, parts in JOINED.items() for part in parts}
    places = {}
    for path, names in tensor_names(trainers, config).items():
        for at, tensor in names.tensors.items():
            if not at:
                # Embedding, final norm and LM head are as in the trainer's layout.
                places[tensor] = Place(("rest", *path), (), names.transposed)
                continue
            (layer,), (_, name, *rest) = at, path
            whole, parts = joined.get(name, (name, (name,)))
            start = sum(trainers["layers", part, *rest].shape[-1] for part in parts[: parts.index(name)])
            outputs = slice(start, start + trainers[path].shape[-1])
            if ("layers", layer, whole, *rest) in ours:
                # Unrolled: each layer has its own parameter.
                place = Place(("layers", layer, whole, *rest), (..., outputs), names.transposed)
            elif ("layers", whole, *rest) in ours:
                # Rolled, a bias or a norm: stacked as in the trainer.
                place = Place(("layers", whole, *rest), (layer, ..., outputs), names.transposed)
            else:
                # `products.OutIn` is [O, I], as the file is.
                place = Place(("layers", whole, *rest, "weight"), (layer, outputs), not names.transposed)
            places[tensor] = place
    return places
