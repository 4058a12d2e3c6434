"""A model folder read straight into the layout of decoding, without a copy in the trainer's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flax import nnx
from flax.traverse_util import flatten_dict

from rlhf.tuning.models.config import DecoderConfig, UnsupportedModel
from rlhf.tuning.models.decoder import abstract_decoder
from rlhf.tuning.models.huggingface import load_decoder, read_config
from rlhf.tuning.models.mapping import tensor_names
from rlhf.tuning.models.tensors import ParamPath, Place, Tensors, check, load_tensors
from rlhf.tuning.rollout.engine.decoders import JOINED
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.replicas import Replicas


def load_folder(engine: Engine | Replicas, folder: Path) -> None:
    """`Engine.load` from a Hugging Face folder; dense weights on one device are in memory only once.

    Raises UnsupportedModel, before the engine drops its weights, where the folder's config is not the engine's, or a
    tensor is unknown, missing or of another shape.
    """
    config = read_config(folder)
    if config != engine.config:
        raise UnsupportedModel(f"{folder} holds another model than this engine's: {config}, not {engine.config}")
    if isinstance(engine, Replicas) or not engine.weights.may_be_filled:
        engine.load(load_decoder(folder, engine.loading_mesh)[1])
        return

    with Tensors(folder) as tensors:
        shapes = engine.weights.shapes[1]
        places = places_in(config, shapes)
        check(config, tensors, shapes, places)
        engine.load_laid_out(lambda shapes: load_tensors(config, tensors, shapes, places))


def places_in(config: DecoderConfig, shapes: Any) -> dict[str, Place]:
    """The place of each tensor in a `DecodingDecoder`'s state; tensors of one parameter are adjacent."""
    stacked = flatten_dict(nnx.to_pure_dict(abstract_decoder(config)[1]))
    places: dict[ParamPath, dict[str, Place]] = {path: {} for path in flatten_dict(nnx.to_pure_dict(shapes))}
    # On a mesh that divides heads they are not.
    joined = any(name in path for path in places for name in JOINED)
    for path, names in tensor_names(stacked, config.num_layers).items():
        for layer, tensor in enumerate(names.tensors):
            # Embedding, final norm and LM head are as in the trainer's layout.
            place = Place(("rest", *path), (), names.transposed)
            if names.stacked:
                target, part = _target(path, stacked, joined)
                own, shared = ("layers", layer, *target), ("layers", *target)
                if own in places:
                    # Unrolled: each layer has its own parameter.
                    place = Place(own, (..., part), names.transposed)
                elif shared in places:
                    # Rolled, a bias or a norm: stacked as in the trainer.
                    place = Place(shared, (layer, ..., part), names.transposed)
                else:
                    # `products.OutIn` is [O, I], as the file is.
                    place = Place((*shared, "weight"), (layer, part), not names.transposed)
            places[place.path][tensor] = place
    return {tensor: place for of_parameter in places.values() for tensor, place in of_parameter.items()}


def _target(path: ParamPath, stacked: dict[ParamPath, Any], joined: bool) -> tuple[ParamPath, slice]:
    """The layer's parameter that holds one of the trainer's, and the range of outputs there."""
    _, name, *rest = path
    for whole, parts in JOINED.items():
        if joined and name in parts:
            widths = [stacked["layers", part, *rest].shape[-1] for part in parts]
            at = parts.index(name)
            return (whole, *rest), slice(sum(widths[:at]), sum(widths[: at + 1]))
    return (name, *rest), slice(None)
