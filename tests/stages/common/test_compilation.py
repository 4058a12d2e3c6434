"""The type of weights is a process's: a worker that changes it keeps nothing of the other type."""

import numpy as np

from rlhf.stages.common.compilation import use_precision
from rlhf.tuning.precision import real, using
from rlhf.tuning.settings import ComputeSettings


def test_what_a_worker_keeps_leaves_with_the_type_of_weights():
    class Config:
        compute = ComputeSettings("float64")

    memory = {"decoder:x": 1}
    with using("float32"):
        use_precision(None, memory)
        assert memory
        use_precision(Config, memory)
        assert real() == np.float64 and not memory
    assert real() == np.float32
