"""Checkpoints are written while training goes on, and hold the state as it was when the save began."""

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.training.checkpoint import Checkpoints, SaveFailed, load_tree, save_tree

SIZE = 2**21


advance = jax.jit(lambda state: jax.tree.map(lambda x: -x - 1, state), donate_argnums=0)


def fresh():
    return {"a": jnp.arange(SIZE, dtype=jnp.float32), "b": jnp.full((4, SIZE // 4), 7.0)}


def restored(folder):
    checkpoints = Checkpoints(folder)
    found = checkpoints.restore(fresh())
    checkpoints.close()
    return found


def test_steps_go_on_during_a_save_and_change_nothing_in_it(tmp_path):
    released = threading.Event()
    checkpoints = Checkpoints(tmp_path / "c", lambda: released.wait(60))
    state = fresh()
    checkpoints.save(1, state, {"step": 1})
    # The save cannot be over: what it waits for comes after these steps.
    for _ in range(3):
        state = advance(state)
    jax.block_until_ready(state)
    released.set()
    checkpoints.close()
    found, position = restored(tmp_path / "c")
    assert position == {"step": 1}
    for name, wanted in fresh().items():
        np.testing.assert_array_equal(found[name], wanted)


def test_each_save_is_committed_before_it_is_told_and_before_the_next_begins(tmp_path):
    told = []
    checkpoints = Checkpoints(tmp_path / "c", lambda: told.append(sorted(p.name for p in (tmp_path / "c").iterdir())))
    state = fresh()
    for step in (1, 2, 3):
        checkpoints.save(step, state, {"step": step})
        assert len(told) >= step - 1
        state = advance(state)
    checkpoints.close()
    # The step before is there until the newer one was told.
    assert told == [["1"], ["1", "2"], ["2"], ["2", "3"], ["3"]]


def test_a_copy_that_fails_is_told_by_the_next_save_and_the_checkpoint_stays(tmp_path):
    def no_room():
        raise OSError("No space left on device")

    checkpoints = Checkpoints(tmp_path / "c", no_room)
    checkpoints.save(4, fresh(), {"step": 4})
    with pytest.raises(SaveFailed, match=r"c/4 was not saved \(OSError: No space left on device\).*resumes from it"):
        checkpoints.save(5, fresh(), {"step": 5})
    checkpoints.close()
    assert restored(tmp_path / "c")[1] == {"step": 4}


def test_a_folder_that_cannot_be_written_to_is_told_at_once(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, fresh(), {"step": 1})
    checkpoints.wait()
    (tmp_path / "c").rename(tmp_path / "moved")
    (tmp_path / "c").write_text("no folder")
    with pytest.raises(SaveFailed, match=r"c/2 was not saved \(NotADirectoryError"):
        checkpoints.save(2, fresh(), {"step": 2})
    checkpoints.close()
    assert restored(tmp_path / "moved")[1] == {"step": 1}


FAILING = """
import pathlib, sys
import jax.numpy as jnp
from rlhf.tuning.training.checkpoint import Checkpoints, SaveFailed, save_tree

folder = pathlib.Path(sys.argv[1])
checkpoints = Checkpoints(folder / "c")
(folder / "c").rmdir()
(folder / "c").write_text("no folder")
try:
    checkpoints.save(1, {"a": jnp.zeros(8)}, {"step": 1})
    checkpoints.close()
except SaveFailed as e:
    print(e)
try:
    save_tree(folder / "c" / "tree", {"a": jnp.zeros(8)})
except OSError as e:
    print(type(e).__name__)
"""


@pytest.mark.slow
def test_a_process_whose_save_has_failed_ends_at_once(tmp_path):
    """Orbax's own threads would wait for what the save has not come to: five minutes."""
    command = [sys.executable, "-c", FAILING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert "c/1 was not saved (NotADirectoryError" in done.stdout, done.stderr
    assert done.stdout.endswith("NotADirectoryError\n"), done.stderr


def test_a_checkpoint_of_another_shape_is_an_error(tmp_path):
    save_tree(tmp_path / "t", {"a": jnp.ones((3, 4))})
    np.testing.assert_array_equal(load_tree(tmp_path / "t", {"a": jnp.zeros((3, 4))})["a"], np.ones((3, 4)))
    with pytest.raises(ValueError, match=r"leaf|shape"):
        load_tree(tmp_path / "t", {"a": jnp.zeros((4, 3))})
