"""`Array` of the engine's records: numpy arrays where the host fills them, JAX arrays inside the programs."""

from typing import TypeVar

import jax
import numpy as np

Array = TypeVar("Array", np.ndarray, jax.Array)
