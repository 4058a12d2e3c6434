"""A model folder read into the layout of decoding, with no copy of the weights in the trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flax import nnx
from flax.traverse_util import flatten_dict

from tuning.models.config import DecoderConfig, UnsupportedModel
from tuning.models.decoder import abstract_decoder
from tuning.models.huggingface import ParamPath, Place, load_decoder, place_tensors, read_config, read_tensors
from tuning.models.mapping import tensor_names
from tuning.rollout.engine.decoders import JOINED
from tuning.rollout.engine.engine import Engine


def load_folder(engine: Engine, folder: Path) -> None:
    """As `Engine.load` of a Hugging Face folder's parameters; dense weights on one device are in memory once.

    Raises UnsupportedModel where the folder's config is not the engine's, or a tensor is unknown, missing or of another
    shape.
    """
    config = read_config(folder)
    if config != engine.config:
        raise UnsupportedModel(f"{folder} holds another model than this engine's: {config}, not {engine.config}")
    if not engine.takes_laid_out:
        engine.load(load_decoder(folder)[1])
        return

    def read(shapes: Any) -> Any:
        places = _places(config, shapes)
        return place_tensors(config, read_tensors(folder, places), str(folder), shapes, places)

    engine.load_laid_out(read)


def _places(config: DecoderConfig, shapes: Any) -> dict[str, Place]:
    """Places in a `DecodingDecoder`'s state; the tensors of one parameter follow each other."""
    stacked = flatten_dict(nnx.to_pure_dict(abstract_decoder(config)[1]))
    found: dict[ParamPath, dict[str, Place]] = {path: {} for path in flatten_dict(nnx.to_pure_dict(shapes))}
    for path, names in tensor_names(stacked, config.num_layers).items():
        for layer, tensor in enumerate(names.tensors):
            place = Place(("rest", *path), (), names.transposed)
            if names.stacked:
                target, part = _target(path, stacked)
                own, shared = ("layers", layer, *target), ("layers", *target)
                if own in found:
                    place = Place(own, (..., part), names.transposed)
                elif shared in found:
                    place = Place(shared, (layer, ..., part), names.transposed)
                else:
                    # `products.OutIn` has outputs in front, as the file has.
                    place = Place((*shared, "weight"), (layer, part), not names.transposed)
            found[place.path][tensor] = place
    return {tensor: place for places in found.values() for tensor, place in places.items()}


def _target(path: ParamPath, stacked: dict[ParamPath, Any]) -> tuple[ParamPath, slice]:
    """The parameter of a layer, and the outputs of it, that one of the trainer's is."""
    _, name, *rest = path
    for joined, parts in JOINED.items():
        if name in parts:
            widths = [stacked["layers", part, *rest].shape[-1] for part in parts]
            at = parts.index(name)
            return (joined, *rest), slice(sum(widths[:at]), sum(widths[: at + 1]))
    return (name, *rest), slice(None)
