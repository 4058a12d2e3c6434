"""The Prefect flow `rlhf-worker`: a worker of a run in another work pool, for as long as the run needs it."""

from __future__ import annotations

from prefect import flow

from flows.records import log_of
from stages.store.artifacts import Store
from stages.worker import away

NAME = "rlhf-worker"


@flow(name=NAME, description="Makes stages of a run whose recipe names this pool among its workers.", retries=0)
def rlhf_worker(store: str, run: str, mail: str, log: str, silence: float) -> None:
    """Makes what a run asks for, until that has ended. Runs ask for it; nobody starts it by hand.

    Args:
        store: Address of the store, which the run's host and this one see.
        run: Name of the run.
        mail: Name of the mailbox, below the run's record.
        log: Name of the file of the worker's output.
        silence: Seconds without a sign of life after which the run counts as gone.
    """
    found = Store(store)
    away.serve(found, ("runs", run, "mail", mail), log_of(found, run).with_name(log), silence)
