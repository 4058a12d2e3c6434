"""The Prefect flow `rlhf-worker`: a worker of a run in another work pool, for as long as the run needs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from prefect import flow

from flows.records import log_of
from stages.store.artifacts import Store
from stages.worker import away, mailbox
from stages.worker.interpreter import add_current_folder

NAME = "rlhf-worker"


@flow(name=NAME, description="Makes stages of a run whose recipe names this pool among its workers.", retries=0)
def rlhf_worker(store: str, run: str, mail: str, log: str, silence: float, idle: float | None) -> None:
    """Makes what a run asks for, until that has ended. Runs ask for it; nobody starts it by hand.

    Args:
        store: Address of the store, which the run's host and this one see.
        run: Name of the run.
        mail: Name of the run's mailbox for this worker.
        log: Name of the file of the worker's output.
        silence: Seconds without a sign of life after which the run counts as gone.
        idle: Seconds after which the worker leaves where nothing is asked of it; none: it stays.
    """
    _order_path()
    found = Store(store)
    away.serve(found, (mailbox.FOLDER, run, mail), log_of(found, run).with_name(log), silence, idle)


def _order_path() -> None:
    """Has processes of this one import what those of `rlhf` do: Prefect puts the folder of this file and the current
    one before everything else, where a file of theirs would take a library's place."""
    first = {str(Path(__file__).resolve().parent), os.getcwd(), ""}
    sys.path[:] = [folder for folder in sys.path if folder not in first]
    add_current_folder()
