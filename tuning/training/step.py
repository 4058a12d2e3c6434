"""One optimizer step, the same for every stage.

A loss function sees one micro-batch and divides by the counts of the whole step (R1), so
micro-batches are summed, never averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tuning.mesh import put_batch, state_shardings

# loss(params, batch, frozen) -> (share of the step's loss, sums for metrics)
LossFn = Callable[[Any, dict[str, jax.Array], Any], tuple[jax.Array, dict[str, jax.Array]]]
StepFn = Callable[..., tuple[Any, Any, dict[str, float]]]


class NonFinite(RuntimeError):
    """Gradients stayed non-finite for too many steps in a row."""


def make_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, max_skipped: int, mesh: Mesh | None = None
) -> StepFn:
    """A step over a list of micro-batches: `step(params, opt_state, batches, frozen=None) -> params, opt_state, sums`.

    `params` and `opt_state` are donated; `frozen` is a pytree that the loss reads and nothing
    changes (the base under an adapter). On a mesh all three lie where `tuning.mesh` puts
    them, and parameters and state stay there. Raises NonFinite after more than `max_skipped` skipped
    steps in a row.
    """
    gradient = jax.value_and_grad(loss_fn, has_aux=True)

    def apply(params: Any, opt_state: Any, grads: Any) -> Any:
        norm = optax.global_norm(grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, norm

    def whole(params: Any, opt_state: Any, batch: dict[str, jax.Array], frozen: Any) -> Any:
        (loss, sums), grads = gradient(params, batch, frozen)
        return *apply(params, opt_state, grads), sums | {"loss": loss}

    def add(grads: Any, params: Any, batch: dict[str, jax.Array], frozen: Any) -> Any:
        (loss, sums), new = gradient(params, batch, frozen)
        return jax.tree.map(jnp.add, grads, new), sums | {"loss": loss}

    def zeros(params: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)

    # One micro-batch needs one program, several need three, whatever their number.
    functions: dict[str, Callable[..., Any]] = {"whole": whole, "zeros": zeros, "add": add, "apply": apply}
    programs: dict[str, Any] = {}

    def program(name: str, params: Any) -> Any:
        if name not in programs:
            donated = {"whole": (0, 1), "zeros": (), "add": (0,), "apply": (0, 1)}[name]
            options: dict[str, Any] = {"donate_argnums": donated}
            if mesh is not None:
                of_params, of_state = state_shardings(optimizer, params, mesh)
                everywhere = NamedSharding(mesh, PartitionSpec())
                after = (of_params, of_state, everywhere)
                outs = {
                    "whole": (*after, everywhere),
                    "zeros": of_params,
                    "add": (of_params, everywhere),
                    "apply": after,
                }
                options["out_shardings"] = outs[name]
            programs[name] = jax.jit(functions[name], **options)
        return programs[name]

    def step(
        params: Any, opt_state: Any, batches: Sequence[dict[str, Any]], frozen: Any = None
    ) -> tuple[Any, Any, dict[str, float]]:
        batches = [put_batch(b, mesh) for b in batches]
        if len(batches) == 1:
            params, opt_state, norm, sums = program("whole", params)(params, opt_state, batches[0], frozen)
        else:
            grads = program("zeros", params)(params)
            sums = None
            for batch in batches:
                grads, more = program("add", params)(grads, params, batch, frozen)
                sums = more if sums is None else jax.tree.map(jnp.add, sums, more)
            params, opt_state, norm = program("apply", params)(params, opt_state, grads)
        skipped = int(opt_state.notfinite_count)
        if skipped > max_skipped:
            raise NonFinite(
                f"gradients were not finite for {skipped} steps in a row; "
                "lower the learning rate, or look at the data of the last batches in logs/metrics.jsonl"
            )
        metrics = {k: float(v) for k, v in sums.items()}
        return params, opt_state, metrics | {"grad_norm": float(norm), "skipped": float(skipped > 0)}

    return step


def copy(tree: Any) -> Any:
    """A copy that may be donated."""
    return jax.tree.map(jnp.copy, tree)
