"""Trainer state on disk with Orbax: parameters, optimizer state and data position of the newest complete step.

Each process of a group writes the shards of its own devices to a separate folder, one file a shard. `committed` puts
these folders together: their union is the checkpoint. It restores bit for bit on any mesh and number of processes. Each
process reads the files that hold its shards; `fetch` brings them from elsewhere.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from rlhf.tuning import multihost

Fetch = Callable[[Sequence[Path]], None]
"""Brings files to these paths; those that exist nowhere hold zeros, and are left out."""


class SaveFailed(RuntimeError):
    """A checkpoint could not be written or copied."""


class Checkpoints:
    """Saves while training continues, keeps the newest step, restores bit for bit.

    `committed` is called from another thread, after each save is complete and before the next begins; the step before
    is deleted when it has returned, and it is called once more then. An error of a save is raised, as SaveFailed, by
    that call if its folder cannot be made, else by the next one.
    """

    def __init__(self, folder: Path, committed: Callable[[], None] = lambda: None, fetch: Fetch = lambda files: None):
        self.folder, self._committed, self._fetch = folder, committed, fetch
        self.bytes_written = 0
        """By this process, in all saves that are complete."""
        options = ocp.CheckpointManagerOptions(
            # Orbax would delete the step before as soon as it has named the newer one, whose files may not be on disk.
            max_to_keep=None,
            create=multihost.process_count() == 1,
            multiprocessing_options=_processes(),
            # Otherwise threads that wait for a folder which could not be made keep the process for five minutes.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        handlers = {
            "state": _handler(),
            "position": ocp.JsonCheckpointHandler(multiprocessing_options=_processes()),
        }
        if multihost.process_count() > 1:
            # Orbax does not make the folder of named processes.
            folder.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handlers)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Starts a save of `state` (a pytree of arrays) and `position` (JSON: step, data iterator).

        Waits for the save before, then for a copy of the state in host memory: on return the arrays may be donated.
        """
        self.wait()
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(_numbered(state, _held)), position=ocp.args.JsonSave(position)
        )
        with self._failing(step):
            self._manager.save(step, args=args)
        self._saving = self._thread.submit(self._commit, step)

    def _commit(self, step: int) -> None:
        with self._failing(step):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            self.bytes_written += bytes_below(self.folder / str(step))
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
                "it is kept: make room or give access there, and the same command resumes from it"
            ) from error

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """The newest state, shaped as `like` (arrays or shapes), and its position; None if there is none.

        Raises ValueError if a saved leaf has another shape or type.
        """
        step = multihost.from_primary(self._manager.latest_step)
        if step is None:
            return None
        state, tree = _wanted(self.folder / str(step) / "state", like, self._fetch)
        args = ocp.args.Composite(state=state, position=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=args)
        return _unnumbered(restored.state, tree), restored.position

    def wait(self) -> None:
        """Returns when every started save is complete on disk and `committed` has seen it; raises SaveFailed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> None:
        """As `wait`, then closes the folder."""
        try:
            self.wait()
        finally:
            # Orbax raises the error of a save again.
            with contextlib.suppress(Exception):
                self._manager.close()
            self._thread.shutdown()


def bytes_below(folder: Path) -> int:
    """The size of the files of a folder; in a process group, of those that this process wrote."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def save_tree(folder: Path, tree: Any) -> None:
    """Writes this process's shards of the leaves of a pytree; they are on disk when this returns."""
    with ocp.Checkpointer(_handler(), multiprocessing_options=_processes()) as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(_numbered(tree)))


def load_tree(folder: Path, like: Any, fetch: Fetch = lambda files: None) -> Any:
    """Reads what `save_tree` wrote into the structure of `like`; ValueError if a shape or type differs."""
    args, tree = _wanted(folder, like, fetch)
    with ocp.Checkpointer(_handler(), multiprocessing_options=_processes()) as checkpointer:
        return _unnumbered(checkpointer.restore(folder.absolute(), args=args), tree)


def _processes() -> ocp.options.MultiprocessingOptions:
    count = multihost.process_count()
    if count == 1:
        return ocp.options.MultiprocessingOptions()
    # Without a primary host every process makes and names its own folder. Named processes wait for each other through
    # the coordinator; Orbax would use a collective, also in its own threads, where it meets those of training.
    return ocp.options.MultiprocessingOptions(primary_host=None, active_processes=set(range(count)))


def _handler() -> ocp.PyTreeCheckpointHandler:
    # OCDBT would pack the shards of a process into files that no other mesh can fetch in part. Weights hardly shrink.
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_zarr3=True, use_compression=False, multiprocessing_options=_processes()
    )


def _numbered(tree: Any, keep: Callable[[Any], Any] = lambda leaf: leaf) -> dict[str, Any]:
    return {str(i): keep(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}


def _unnumbered(leaves: dict[str, Any], tree: Any) -> Any:
    return jax.tree.unflatten(tree, [leaves[str(i)] for i in range(len(leaves))])


def _held(leaf: Any) -> Any:
    """An array that a save may read while training continues.

    Orbax copies arrays of an accelerator to the host before it returns. It reads arrays of the CPU in place, and that
    memory is donated to the next step.
    """
    on_cpu = isinstance(leaf, jax.Array) and {d.platform for d in leaf.devices()} == {"cpu"}
    return jnp.copy(leaf) if on_cpu else leaf


def _wanted(folder: Path, like: Any, fetch: Fetch) -> tuple[ocp.args.PyTreeRestore, Any]:
    """The arguments with which Orbax restores leaves as and where those of `like` are, and the structure of the tree;
    the files with this process's shards are in the folder then."""
    wanted, tree = jax.tree.flatten(like)
    saved = len([path for path in folder.glob("*") if path.name.isdigit()])
    if saved != len(wanted):
        raise ValueError(f"checkpoint {folder} has {saved} leaves, the model asks for {len(wanted)}; {_REMEDY}")
    here = SingleDeviceSharding(jax.local_devices()[0])

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or here)

    shapes = _numbered(like, shape)
    fetch([path for name, shape in shapes.items() for path in _chunks(folder, name, shape)])
    return ocp.args.PyTreeRestore(shapes, restore_args=ocp.checkpoint_utils.construct_restore_args(shapes)), tree


_REMEDY = "remove the folder to start this stage again"


def _chunks(folder: Path, name: str, want: jax.ShapeDtypeStruct) -> set[Path]:
    """The files that hold the shards of this process. Raises ValueError for a leaf of another shape or type, which
    Orbax would cut, fill or cast without an error."""
    saved = json.loads((folder / name / "zarr.json").read_bytes())
    shape, kind = tuple(saved["shape"]), saved["data_type"]
    if (shape, kind) != (want.shape, np.dtype(want.dtype).name):
        raise ValueError(
            f"checkpoint {folder}: leaf {name} is {kind}{shape}, the model asks for {want.dtype}{want.shape}; {_REMEDY}"
        )
    sizes = saved["chunk_grid"]["configuration"]["chunk_shape"]
    found = set()
    for index in want.sharding.addressable_devices_indices_map(shape).values():
        cuts = [at.indices(n)[:2] for at, n in zip(index, shape, strict=True)]
        grid = [range(start // size, math.ceil(stop / size)) for (start, stop), size in zip(cuts, sizes, strict=True)]
        found |= {folder.joinpath(name, "c", *map(str, chunk)) for chunk in itertools.product(*grid)}
    return found
