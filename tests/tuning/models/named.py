"""A decoder's parameters as named Hugging Face tensors, and back, without files."""

import numpy as np

from rlhf.tuning.models import huggingface as hf
from rlhf.tuning.models.decoder import abstract_decoder
from rlhf.tuning.models.tensors import load_tensors


class Named(dict):
    """Tensors in memory, as `rlhf.tuning.models.tensors.Tensors` has those of files."""

    source = "here"

    @property
    def shapes(self):
        return {name: tensor.shape for name, tensor in self.items()}

    def read(self, name, cut=None):
        return self[name]


def params_from_tensors(config, tensors):
    return load_tensors(config, Named(tensors), abstract_decoder(config)[1], hf._places(config))


def tensors_from_params(config, pure, dtype=np.float32):
    return {name: make() for name, _, make in hf._lazy_tensors(config, pure, dtype)}
