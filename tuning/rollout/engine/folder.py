"""An engine's weights from a model folder."""

from __future__ import annotations

from pathlib import Path

from rlhf.tuning.compile_target import target_platform
from rlhf.tuning.models.config import UnsupportedModel
from rlhf.tuning.models.huggingface import load_decoder, read_config
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.replicas import Replicas


def load_folder(engine: Engine | Replicas, folder: Path) -> None:
    """`Engine.load` from a Hugging Face folder.

    Raises UnsupportedModel, before the engine drops its weights, if the folder's config is not the engine's, or a
    tensor is unknown, missing or of another shape.
    """
    config = read_config(folder)
    if config != engine.config:
        raise UnsupportedModel(f"{folder} holds another model than this engine's: {config}, not {engine.config}")
    # The engine casts all matrices on accelerators, and rounds int8 once, from what the file has.
    narrow = target_platform() != "cpu" and engine.weights_dtype != "int8"
    engine.load(load_decoder(folder, engine.loading_mesh, engine.weights_dtype if narrow else None)[1])
