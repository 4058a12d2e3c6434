"""The types and the exactness of a process's arithmetic: the demands of a compute dtype on JAX next to the activations.

dtype      weights, moments, sums   products of float32 arrays
auto       float32                  as the device has it by default, unless it computes in float32
fast       float32                  on a CPU that multiplies bfloat16: of inputs rounded to it, summed in float32;
                                    elsewhere as auto
bfloat16   float32                  as the device has it by default
float32    float32                  exact: accelerators by default round their inputs to TF32 or bfloat16
float64    float64                  exact; on CPU alone, for checks

`fast` is a TPU's default for float32. XLA on CPU has no such product of float32 arrays: the model's
products round their inputs themselves (`rlhf.tuning.models.matmul.factor`), and processors with AVX512_BF16 or AMX
multiply these sooner.

Sampler and trainer have to agree. Where both are `fast` both round; where the sampler is exact, of a `fast` trainer
products of gradients alone are rounded (`exact_forward`), two thirds of a step's: then it gives a token the probability
that the sampler gave it, to the bit where the backend has the same bits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.compile_target import target_platform
from rlhf.tuning.processor import multiplies_bfloat16

ROUNDED = "bfloat16"
"""JAX's name of products whose inputs are rounded to bfloat16. XLA on CPU does not heed it: `rounds_products` does."""

ROUNDED_BACKWARD = "tensorfloat32"
"""JAX's name of a setting where products of gradients alone are `ROUNDED`; XLA on CPU computes in float32 with it."""

P = ParamSpec("P")
R = TypeVar("R")


def real() -> np.dtype[Any]:
    """Type of weights, moments and sums: float64 where JAX computes in it (`jax_enable_x64`), else float32."""
    return np.dtype(jax.dtypes.canonicalize_dtype(np.float64))


def item_bytes(dtype: str) -> int:
    """Bytes of a number of a type, by JAX's name of it."""
    return int(jnp.dtype(dtype).itemsize)


def resolved(dtype: str) -> str:
    """The type that `auto` stands for on this device, and `fast` where it is no faster; other names stay.

    Raises ValueError for float64 on an accelerator.
    """
    on_cpu = target_platform() == "cpu"
    if dtype == "auto" or dtype == "fast" and not (on_cpu and multiplies_bfloat16()):
        # Whole bfloat16 is no faster on CPU; accelerators are built for it.
        return "float32" if on_cpu else "bfloat16"
    if dtype == "float64" and not on_cpu:
        raise ValueError(
            f"compute.dtype float64 is for checks on a CPU, and this is a {target_platform()}: use float32 here, "
            "or set JAX_PLATFORMS=cpu"
        )
    return dtype


def use(dtype: str) -> None:
    """Sets JAX up for a compute dtype, before it makes arrays of it; call again to change it.

    A float32 that is asked for is float32 in every product: by default an A100's or H100's products keep 10 bits, and
    a TPU's 8.
    """
    kind = resolved(dtype)
    jax.config.update("jax_enable_x64", kind == "float64")
    precision = {"bfloat16": None, "fast": ROUNDED}.get(kind, "highest")
    jax.config.update("jax_default_matmul_precision", precision)


def _precision() -> str | None:
    precision: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return precision


def rounds_products() -> bool:
    """Whether products of float32 arrays have to round their inputs to bfloat16 themselves.

    Asked while a program is traced. JAX traces anew where this setting is another.
    """
    return _precision() == ROUNDED and target_platform() == "cpu"


@contextlib.contextmanager
def _instead_of(precision: str, other: str) -> Iterator[None]:
    now = _precision()
    with jax.default_matmul_precision(other if now == precision else now):
        yield


of_gradients = functools.partial(_instead_of, ROUNDED_BACKWARD, ROUNDED)
"""Around what traces products of a backward pass: these are rounded where those of gradients are."""
exact_forward = functools.partial(_instead_of, ROUNDED, ROUNDED_BACKWARD)
"""Around the update of a policy that an exact sampler sampled: of its rounded products those of gradients are left."""


@contextlib.contextmanager
def using(dtype: str) -> Iterator[None]:
    """`use` within a block; afterwards JAX is as it was."""
    # Set for the process, not by JAX's own context managers: those reach this thread alone, and readers have others.
    names = ("jax_enable_x64", "jax_default_matmul_precision")
    before = {name: getattr(jax.config, name) for name in names}
    use(dtype)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def without_float64(function: Callable[P, R]) -> Callable[P, R]:
    """The function in float32 also where this process computes in float64: sampling has no use for more.

    It holds for the calling thread alone.
    """

    @functools.wraps(function)
    def narrow(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.enable_x64(False):
            return function(*args, **kwargs)

    return narrow


def in_real(tree: Any) -> Any:
    """The tree with its floating-point arrays in the type of `real`; arrays that have it are not copied."""
    kind = real()

    def one(x: Any) -> Any:
        other = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype in _REALS and x.dtype != kind
        # By NumPy: JAX without `jax_enable_x64` has no operation on a float64 array.
        return jnp.asarray(np.asarray(x), kind) if other else x

    return jax.tree.map(one, tree)


_REALS = (np.dtype("float32"), np.dtype("float64"))
