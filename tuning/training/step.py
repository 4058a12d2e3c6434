"""One optimizer step, the same for every stage.

A loss function sees one micro-batch and divides by the counts of the whole step (R1), so micro-batches are summed,
never averaged:

    one micro-batch     single: gradient and update in one program
    several             zeros, then add for each, then apply: three programs whatever their number
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf.tuning.losses.aggregate import Counts, count
from rlhf.tuning.mesh import put_batch, state_shardings, under
from rlhf.tuning.models.sharding import with_cut_gradients
from rlhf.tuning.training.batch import Group, Packed

Tree = Any
"""A pytree of arrays."""
Batch = dict[str, jax.Array]
LossFn = Callable[[Tree, Batch, Tree], tuple[jax.Array, Batch]]
"""loss(params, batch, frozen) -> (share of the step's loss, sums for metrics)."""


Sums = dict[str, float]
Start = Callable[..., tuple[Tree, Tree, Callable[[], Sums]]]
"""(params, opt_state, batches, frozen, divided=False) -> what they become, and a function that waits for the step's
sums. divided: whether a single micro-batch takes the programs of several, because other steps have several."""


@dataclasses.dataclass(frozen=True)
class StepFn:
    """A step over the micro-batches: new parameters, new optimizer state, and the sums of the metrics."""

    start: Start
    """The same, which waits for nothing: the host may prepare the next step before it reads the sums of this one."""

    def __call__(
        self, params: Tree, opt_state: Tree, batches: Sequence[dict[str, Any]], frozen: Tree = None
    ) -> tuple[Tree, Tree, Sums]:
        params, opt_state, sums = self.start(params, opt_state, batches, frozen)
        return params, opt_state, sums()


NOTHING = Counts(0, 0)


def counted(groups: Sequence[Group], packed: Sequence[Packed], unpacked: Counts = NOTHING) -> list[dict[str, Any]]:
    """Device arrays of micro-batches with the counts of the whole step (R1).

    unpacked: counts of completions of the step that are in no micro-batch, because they add 0 to the loss.
    """
    counts = [*(count(p.mask_CT, p.ids_C >= 0) for p in packed), unpacked]
    tokens = np.float32(sum(c.n_tokens for c in counts))
    completions = np.float32(sum(c.n_sequences for c in counts))
    sizes = {"n_tokens": tokens, "n_completions": completions, "n_groups": np.float32(len(groups))}
    return [p.arrays() | sizes for p in packed]


class NonFinite(RuntimeError):
    """Gradients stayed non-finite for too many steps in a row."""


def step_programs(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, params: Tree, mesh: Mesh | None
) -> dict[str, Callable[..., Any]]:
    """A step's programs `single`, `zeros`, `add` and `apply`, which compile when called; `params` may be shapes."""

    def loss(params: Tree, batch: Batch, frozen: Tree) -> tuple[jax.Array, Batch]:
        return loss_fn(with_cut_gradients(params), batch, frozen)

    gradient = jax.value_and_grad(loss, has_aux=True)

    def apply(params: Tree, opt_state: Tree, grads: Tree) -> tuple[Tree, Tree, jax.Array]:
        norm = optax.global_norm(grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, norm

    def single(params: Tree, opt_state: Tree, batch: Batch, frozen: Tree) -> tuple[Tree, Tree, jax.Array, Batch]:
        (loss, sums), grads = gradient(params, batch, frozen)
        return *apply(params, opt_state, grads), sums | {"loss": loss}

    def add(grads: Tree, params: Tree, batch: Batch, frozen: Tree) -> tuple[Tree, Batch]:
        (loss, sums), new = gradient(params, batch, frozen)
        return jax.tree.map(jnp.add, grads, new), sums | {"loss": loss}

    def zeros(params: Tree) -> Tree:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)

    of_params, of_state, all_ = None, None, None
    if mesh is not None:
        of_params, of_state = state_shardings(optimizer, params, mesh)
        all_ = NamedSharding(mesh, PartitionSpec())

    def program(function: Callable[..., Any], donates: tuple[int, ...], outputs: Tree) -> Callable[..., Any]:
        # Explicit, not inferred: donation needs outputs where the inputs were, and the next step takes them from there.
        where = {} if mesh is None else {"out_shardings": outputs}
        return jax.jit(function, donate_argnums=donates, **where)

    return {
        "single": program(single, (0, 1), (of_params, of_state, all_, all_)),
        "zeros": program(zeros, (), of_params),
        "add": program(add, (0,), (of_params, all_)),
        "apply": program(apply, (0, 1), (of_params, of_state, all_)),
    }


def make_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, max_skipped: int, mesh: Mesh | None = None
) -> StepFn:
    """A step over a list of micro-batches: `step(params, opt_state, batches, frozen=None) -> params, opt_state, sums`.

    `params` and `opt_state` are donated; `frozen` is a pytree that the loss reads and nothing changes (the base under
    an adapter). On a mesh all three are where `rlhf.tuning.mesh` puts them, and parameters and state stay there. Raises
    NonFinite after more than `max_skipped` skipped steps in a row.
    """
    programs: dict[str, Callable[..., Any]] = {}

    def program(name: str, params: Tree) -> Callable[..., Any]:
        if not programs:
            programs.update(step_programs(loss_fn, optimizer, params, mesh))
        return programs[name]

    def start(
        params: Tree, opt_state: Tree, batches: Sequence[dict[str, Any]], frozen: Tree, divided: bool = False
    ) -> tuple[Tree, Tree, Callable[[], Sums]]:
        batches = [put_batch(b, mesh) for b in batches]
        with under(mesh):
            if len(batches) == 1 and not divided:
                params, opt_state, norm, sums = program("single", params)(params, opt_state, batches[0], frozen)
            else:
                grads = program("zeros", params)(params)
                sums = None
                for batch in batches:
                    # Shares of the step's loss add up, so gradients do, whatever the split.
                    grads, more = program("add", params)(grads, params, batch, frozen)
                    sums = more if sums is None else jax.tree.map(jnp.add, sums, more)
                params, opt_state, norm = program("apply", params)(params, opt_state, grads)
        # A copy: the next step donates the state, and may start before this number is read.
        count = jnp.copy(opt_state.notfinite_count)

        def read() -> Sums:
            # Reading a number waits for the device: nothing above does.
            skipped = int(count)
            if skipped > max_skipped:
                raise NonFinite(
                    f"gradients were not finite for {skipped} steps in a row; "
                    "lower the learning rate, or look at the data of the last batches in logs/metrics.jsonl"
                )
            metrics = {k: float(v) for k, v in sums.items()}
            return metrics | {"grad_norm": float(norm), "skipped": float(skipped > 0)}

        return params, opt_state, read

    return StepFn(start)


def copy(tree: Tree) -> Tree:
    """A copy that may be donated."""
    return jax.tree.map(jnp.copy, tree)
