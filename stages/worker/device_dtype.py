"""What `compute.dtype: fast` stands for: the type is in the keys, so it is settled before a node has one."""

from __future__ import annotations

from typing import Any, TypeVar

from rlhf.stages.contract.definition import StageConfig
from rlhf.stages.worker.devices import CPU, device_kind
from rlhf.tuning.processor import multiplies_bfloat16

C = TypeVar("C", bound=StageConfig)


def settled(config: C, far: bool) -> C:
    """The settings with a dtype that every machine understands alike.

    far: whether workers of other hosts make nodes of the run, whose processors nobody here knows.
    """
    compute: Any = getattr(config, "compute", None)
    if compute is None or compute.dtype != "fast" or not far and device_kind() == CPU and multiplies_bfloat16():
        return config
    return config.model_copy(update={"compute": compute.model_copy(update={"dtype": "auto"})})
