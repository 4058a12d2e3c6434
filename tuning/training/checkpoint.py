"""Trainer state on disk with Orbax: parameters, optimizer state and data position of the newest complete step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp


class SaveFailed(RuntimeError):
    """A checkpoint could not be written or copied."""


class Checkpoints:
    """Saves while training goes on, keeps the newest step, restores bit for bit.

    `committed` is called from another thread, after each save is complete and before the next begins; the step before
    is deleted when it has returned, and it is called once more then. An error of a save is raised, as SaveFailed, by
    the next call.
    """

    def __init__(self, folder: Path, committed: Callable[[], None] = lambda: None):
        self.folder, self._committed = folder, committed
        self._manager = ocp.CheckpointManager(
            # Orbax would delete the step before as soon as it has named the newer one, whose files may not be on disk.
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=None, create=True),
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Starts a save of `state` (a pytree of arrays) and `position` (JSON: step, data iterator).

        Waits for the save before, then for a copy of the state in host memory: on return the arrays may be donated.
        """
        self.wait()
        leaves = {str(i): _held(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
        args = ocp.args.Composite(state=ocp.args.StandardSave(leaves), position=ocp.args.JsonSave(position))
        self._manager.save(step, args=args)
        self._saving = self._thread.submit(self._commit, step)

    def _commit(self, step: int) -> None:
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            self._committed()
            replaced = [other for other in self._manager.all_steps() if other < step]
            for other in replaced:
                self._manager.delete(other)
            if replaced:
                self._committed()
        except Exception as error:
            raise SaveFailed(
                f"checkpoint {self.folder / str(step)} was not saved ({type(error).__name__}: {error}); the one before "
                "it is kept: make room or give access there, and the same command goes on from it"
            ) from error

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """The newest state, shaped as `like` (arrays or shapes), and its position; None where there is none.

        Raises ValueError when a saved leaf has another shape: Orbax alone would return it.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        wanted, tree = jax.tree.flatten(like)
        shapes = {str(i): _abstract(leaf) for i, leaf in enumerate(wanted)}
        restored = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes), position=ocp.args.JsonRestore())
        )
        leaves = [restored.state[str(i)] for i in range(len(wanted))]
        _check(self.folder / str(step), leaves, wanted)
        return jax.tree.unflatten(tree, leaves), restored.position

    def wait(self) -> None:
        """Returns when every started save is complete on disk and `committed` has seen it; raises SaveFailed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> None:
        """As `wait`, then closes the folder."""
        try:
            self.wait()
        except SaveFailed:
            # Orbax would raise the same error again.
            with contextlib.suppress(Exception):
                self._manager.close()
            raise
        else:
            self._manager.close()
        finally:
            self._thread.shutdown()


def _held(leaf: Any) -> Any:
    """An array that a save may read while training goes on.

    Orbax copies arrays of an accelerator to the host before it returns. It reads arrays of the CPU in place, and that
    memory is donated to the next step.
    """
    on_cpu = isinstance(leaf, jax.Array) and {d.platform for d in leaf.devices()} == {"cpu"}
    return jnp.copy(leaf) if on_cpu else leaf


def save_tree(folder: Path, tree: Any) -> None:
    """Writes the leaves of a pytree with Orbax; they are on disk when this returns."""
    leaves = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(tree))}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), leaves)


def load_tree(folder: Path, like: Any) -> Any:
    """Reads what `save_tree` wrote into the structure of `like`; ValueError where a shape differs."""
    wanted, tree = jax.tree.flatten(like)
    shapes = {str(i): _abstract(leaf) for i, leaf in enumerate(wanted)}
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder.absolute(), shapes)
    leaves = [restored[str(i)] for i in range(len(wanted))]
    _check(folder, leaves, wanted)
    return jax.tree.unflatten(tree, leaves)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, type and sharding of a leaf to restore: those of `leaf`, whatever mesh it was saved from."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _check(where: Path, leaves: list[Any], wanted: list[Any]) -> None:
    # Orbax returns a leaf of another shape without an error.
    for i, (leaf, want) in enumerate(zip(leaves, wanted, strict=True)):
        if leaf.shape != want.shape or np.dtype(leaf.dtype) != np.dtype(want.dtype):
            raise ValueError(
                f"checkpoint {where}: leaf {i} is {leaf.dtype}{leaf.shape}, "
                f"the model asks for {want.dtype}{want.shape}; remove the folder to start this stage again"
            )
