"""Trainer state on disk with Orbax: parameters, optimizer, data position; the newest whole step restores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


class Checkpoints:
    """Saves asynchronously, keeps the newest step, restores bit for bit."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._manager = ocp.CheckpointManager(
            folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
        )

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Starts a save of `state` (a pytree of arrays) and `position` (JSON: step, data iterator)."""
        leaves = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state))}
        args = ocp.args.Composite(state=ocp.args.StandardSave(leaves), position=ocp.args.JsonSave(position))
        self._manager.save(step, args=args)

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
        """Returns when every started save is whole on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def save_tree(folder: Path, tree: Any) -> None:
    """Writes the leaves of a pytree with Orbax, at once."""
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
    """What to restore: an array is restored to where `leaf` lies, whatever mesh it was saved from."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _check(where: Path, leaves: list[Any], wanted: list[Any]) -> None:
    # Orbax returns a leaf of another shape without an error.
    for i, (leaf, want) in enumerate(zip(leaves, wanted, strict=True)):
        if leaf.shape != want.shape or np.dtype(leaf.dtype) != np.dtype(want.dtype):
            raise ValueError(
                f"checkpoint {where}: leaf {i} is {leaf.dtype}{leaf.shape}, "
                f"the model asks for {want.dtype}{want.shape}; remove the folder to start this stage again"
            )
