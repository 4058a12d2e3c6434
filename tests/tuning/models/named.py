"""A decoder's parameters as named Hugging Face tensors, and back, without files."""

import numpy as np

from rlhf.tuning.models import huggingface as hf
from rlhf.tuning.models.decoder import abstract_decoder
from rlhf.tuning.models.tensors import place_tensors


def params_from_tensors(config, tensors, source):
    return place_tensors(config, tensors, source, abstract_decoder(config)[1], hf._places(config))


def tensors_from_params(pure, dtype=np.float32):
    return {name: make() for name, _, make in hf._lazy_tensors(pure, dtype)}
