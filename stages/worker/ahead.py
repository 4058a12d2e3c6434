"""What a worker that nothing else is asked of does for a stage to come: it scores rollouts under way, and leaves off as
soon as it is asked for anything. Of its end nothing depends on but time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.worker import loaded
from stages.worker.protocol import Event, Lines, Log, Request

if TYPE_CHECKING:
    from stages.contract.definition import Stage, StageConfig
    from stages.store.artifacts import Store


def run_ahead(
    request: Request, stage: Stage, config: StageConfig, lines: Lines, send: Callable[[Event], None]
) -> dict[str, Any]:
    """Scores ahead until all is scored, or the next line has come; `whole` is whether all is.

    What was scored by other code than the request's key names, is removed. Raises CodeDiffers then.
    """
    from stages.contract.definition import Context
    from stages.score.ahead import score_ahead
    from stages.store.artifacts import Store
    from stages.store.work import WorkFolder

    assert request.sampled is not None
    loaded.check_before(request)
    store = Store(request.store)
    folder = WorkFolder(store, request.stage, request.key).path
    folder.mkdir(parents=True, exist_ok=True)

    def check() -> None:
        try:
            loaded.check_after(request, stage.sources(config))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    context = Context(
        config=config,
        inputs={},
        out=folder,
        work=folder,
        seed=request.seed,
        progress=lambda done, total, unit, **metrics: None,
        log=lambda line: send(Log(line)),
        memory={},
    )
    return {"whole": score_ahead(context, WorkFolder(store, *request.sampled), lines.come, check)}


def take_over(request: Request, store: Store, work: Path, send: Callable[[Event], None]) -> None:
    """Gives the stage of a request what was scored ahead of it."""
    from stages.score import ahead
    from stages.store.work import WorkFolder

    if request.ahead is None:
        return
    try:
        ahead.take_over(WorkFolder(store, request.stage, request.ahead).path, work)
    except OSError as e:
        # Such as a full disk: the stage scores it once more.
        send(Log(f"what was scored ahead could not be taken over ({type(e).__name__}: {e})"))
