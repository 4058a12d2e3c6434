"""Trainer state on disk with Orbax: parameters, optimizer state and data position of the newest complete step.

Of several ranks the lead alone has the folder. An array goes to it whole, one after the other, and comes back so: what
is on disk is the same for any number of processes and devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from tuning import ranks
from tuning.spread import from_first, whole


class SaveFailed(RuntimeError):
    """A checkpoint could not be written or copied."""


class Checkpoints:
    """Saves while training goes on, keeps the newest step, restores bit for bit.

    `committed` is called from another thread, after each save is complete and before the next begins; the step before
    is deleted when it has returned, and it is called once more then. An error of a save is raised, as SaveFailed, by
    that call where its folder cannot be made, else by the next one.
    """

    def __init__(self, folder: Path, committed: Callable[[], None] = lambda: None):
        self.folder, self._committed = folder, committed
        self._manager = _manager(folder) if ranks.is_lead() else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Starts a save of `state` (a pytree of arrays) and `position` (JSON: step, data iterator).

        Waits for the save before, then for a copy of the state in host memory: on return the arrays may be donated.
        """
        self.wait()
        leaves = _leaves(state, _held)
        if self._manager is None:
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(leaves), position=ocp.args.JsonSave(position))
        with self._failing(step):
            self._manager.save(step, args=args)
        self._saving = self._thread.submit(self._commit, step)

    def _commit(self, step: int) -> None:
        assert self._manager is not None
        with self._failing(step):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            self._committed()
            replaced = [other for other in self._manager.all_steps() if other < step]
            for other in replaced:
                self._manager.delete(other)
            if replaced:
                self._committed()

    @contextlib.contextmanager
    def _failing(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise SaveFailed(
                f"checkpoint {self.folder / str(step)} was not saved ({type(error).__name__}: {error}); the one before "
                "it is kept: make room or give access there, and the same command goes on from it"
            ) from error

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """The newest state, shaped as `like` (arrays or shapes), and its position; None where there is none.

        Raises ValueError when a saved leaf has another shape: Orbax alone would return it.
        """
        step = ranks.from_lead(lambda: self._manager.latest_step() if self._manager is not None else None)
        if step is None:
            return None
        wanted, tree = jax.tree.flatten(like)
        alone = ranks.here().size == 1
        shapes = {str(i): _abstract(leaf) if alone else _on_host(leaf) for i, leaf in enumerate(wanted)}
        leaves: list[Any] = [None] * len(wanted)
        position: dict[str, Any] = {}
        if self._manager is not None:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes), position=ocp.args.JsonRestore())
            )
            leaves, position = [restored.state[str(i)] for i in range(len(wanted))], restored.position
            _check(self.folder / str(step), leaves, wanted)
        if not alone:
            position = ranks.from_lead(lambda: position)
            leaves = [_handed_on(leaf, want) for leaf, want in zip(leaves, wanted, strict=True)]
        return jax.tree.unflatten(tree, leaves), position

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
                self._end()
            raise
        else:
            self._end()
        finally:
            self._thread.shutdown()

    def _end(self) -> None:
        if self._manager is not None:
            self._manager.close()


# Otherwise threads that wait for a folder which could not be made keep the process for five minutes at its end.
_ASYNC = ocp.AsyncOptions(create_directories_asynchronously=False)


def _manager(folder: Path) -> ocp.CheckpointManager:
    # Orbax would delete the step before as soon as it has named the newer one, whose files may not be on disk.
    if ranks.here().size == 1:
        options = ocp.CheckpointManagerOptions(max_to_keep=None, create=True, async_options=_ASYNC)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None, create=False, async_options=_ASYNC, multiprocessing_options=_of_lead()
        )
    return ocp.CheckpointManager(folder.absolute(), options=options)


def _of_lead() -> ocp.options.MultiprocessingOptions:
    """No process waits for another: the lead writes alone."""
    return ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0}, barrier_sync_key_prefix="lead")


def _leaves(tree: Any, keep: Callable[[Any], Any]) -> dict[str, Any]:
    """The leaves to write, by number; of several ranks the lead has them on the host, and the others none."""
    if ranks.here().size == 1:
        return {str(i): keep(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    found = {}
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        value = whole(leaf)
        if ranks.is_lead():
            # A copy: the array may be donated.
            found[str(i)] = np.array(value)
    return found


def _on_host(leaf: Any) -> np.ndarray:
    """An array of the shape and type of a leaf to restore into the host's memory; itself it takes none."""
    return np.broadcast_to(np.empty((), leaf.dtype), leaf.shape)


def _handed_on(value: Any, want: Any) -> jax.Array:
    """A leaf that the lead has read, as and where `want` is; each process keeps the parts of its own devices."""
    host = from_first(np.asarray(_on_host(want) if value is None else value))
    return jax.make_array_from_callback(want.shape, want.sharding, lambda index: host[index].copy())


def _held(leaf: Any) -> Any:
    """An array that a save may read while training goes on.

    Orbax copies arrays of an accelerator to the host before it returns. It reads arrays of the CPU in place, and that
    memory is donated to the next step.
    """
    on_cpu = isinstance(leaf, jax.Array) and {d.platform for d in leaf.devices()} == {"cpu"}
    return jnp.copy(leaf) if on_cpu else leaf


def save_tree(folder: Path, tree: Any) -> None:
    """Writes the leaves of a pytree with Orbax; they are on disk when this returns."""
    leaves = _leaves(tree, lambda leaf: leaf)
    if not ranks.is_lead():
        return
    options: dict[str, Any] = {} if ranks.here().size == 1 else {"multiprocessing_options": _of_lead()}
    with ocp.StandardCheckpointer(async_options=_ASYNC, **options) as checkpointer:
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
