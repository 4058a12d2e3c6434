"""A weight transfer engine for vLLM (backend `rlhf`): its workers read a policy's files from a folder or URL.

vLLM 0.32 has engines for NCCL, CUDA IPC, Ray and ModelExpress, which connect GPUs, but not for files. vLLM imports
this module through the entry point `vllm.general_plugins` in each of its processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from pathlib import Path

from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rlhf.tuning.rollout.servers.transfer import pull

ROOT = "RLHF_WEIGHTS_ROOT"
"""Environment variable with the only root that the server accepts; without it, any client can choose a root."""


@dataclasses.dataclass
class Init(WeightTransferInitInfo):
    """Body of /init_weight_transfer_engine."""

    root: str
    """Folder or fsspec URL."""


@dataclasses.dataclass
class Update(WeightTransferUpdateInfo):
    """Body of /update_weights: a `Transfer` below the root."""

    folder: str
    files: dict[str, str]


class Files(WeightTransferEngine[Init, Update]):
    """Loads a whole policy at each update. A file that is missing or damaged leaves the model as it was."""

    init_info_cls = Init
    update_info_cls = Update
    supports_draft_weight_update = False
    _root = ""

    @property
    def _scratch(self) -> Path:
        # All workers of a server have this ID: those of one host share a download.
        return Path(tempfile.gettempdir(), f"rlhf-weights-{self.vllm_config.instance_id}")

    def init_transfer_engine(self, init_info: Init) -> None:
        if (allowed := os.environ.get(ROOT, init_info.root)) != init_info.root:
            raise ValueError(f"this server reads weights below {allowed} ({ROOT}), not {init_info.root}")
        self._root = init_info.root

    def start_weight_update(self) -> None:
        """Nothing: the model changes after its files have been verified."""

    def receive_weights(self, update_info: Update) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
        from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

        folder = pull(self._root, update_info.folder, update_info.files, self._scratch)
        files = [str(folder / name) for name in sorted(update_info.files) if name.endswith(".safetensors")]
        wanted = {name.replace(".base_layer.", ".") for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        try:
            loaded = self.model.load_weights(safetensors_weights_iterator(files, use_tqdm_on_load=False))
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        # A model that quantises its weights has other parameters than its checkpoint.
        if self.model_config.quantization is None and (missing := wanted - set(loaded or wanted)):
            raise ValueError(f"{folder} has nothing for {min(missing)}: it holds another model")

    def finish_weight_update(self) -> None:
        """Nothing: the layers have been processed as they were loaded."""

    def shutdown(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)


def register() -> None:
    """Register the engine with vLLM. A forked process has it already."""
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine("rlhf", Files)
