"""What a worker that nothing else is asked of does for a stage to come: it scores rollouts under way, and leaves off as
soon as it is asked for anything. Of its end nothing depends on but time."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.worker import loaded
from stages.worker.protocol import Event, Lines, Log, Request

if TYPE_CHECKING:
    from stages.contract.definition import Stage, StageConfig
    from stages.score.ahead import Scoring
    from stages.store.artifacts import Store

MOST = 4
"""Rounds that are scored ahead in turns, of which the others are gone on with from what their journals have."""

_at_work: dict[str, Scoring] = {}
"""What was begun and is not whole, by the keys of the requests."""


def run_ahead(
    request: Request, stage: Stage, config: StageConfig, lines: Lines, send: Callable[[Event], None]
) -> dict[str, Any]:
    """Scores ahead until all is scored, or the next line has come; `whole` is whether all is.

    Raises CodeDiffers where code is, or was meanwhile, another than the request's key names: nothing is kept of that.
    """
    check = _unchanged(request, stage, config)
    scoring = _at_work.get(request.key)
    if scoring is None:
        scoring = _at_work[request.key] = _begun(request, config, send)
        for key in list(_at_work)[:-MOST]:
            del _at_work[key]
    # Its stage may have had it already, and its rollouts be sampled once more.
    scoring.work.mkdir(parents=True, exist_ok=True)
    try:
        whole = scoring.go_on(lines.come, check)
    finally:
        # Also where nothing was kept: a stage must not find children of this process that have imported other code.
        check()
    if whole:
        del _at_work[request.key]
    return {"whole": whole}


def _begun(request: Request, config: StageConfig, send: Callable[[Event], None]) -> Scoring:
    from stages.contract.definition import Context
    from stages.score.ahead import Scoring
    from stages.store.artifacts import Store
    from stages.store.work import WorkFolder

    assert request.sampled is not None
    store = Store(request.store)
    folder = WorkFolder(store, request.stage, request.key).path
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
    return Scoring(context, WorkFolder(store, *request.sampled))


def _unchanged(request: Request, stage: Stage, config: StageConfig) -> Callable[[], None]:
    """What raises CodeDiffers as soon as code may not be what the request's key names; it does so here, too.

    Children import a function when it is called first, and a function may import more in any call: long after the key
    was made. So all files have to be what the key names now, and none may be written from here on: an edit that was
    undone by now may have been imported.
    """
    from stages.contract.fingerprint import mark_of, reached
    from stages.contract.sources import user_code
    from stages.score.ahead import rewards_ahead
    from stages.score.settings import Config

    assert isinstance(config, Config)
    own = reached(stage.module, *stage.loads(config))
    functions = {reward.function for reward in rewards_ahead(config).values() if ":" in reward.function}
    marks = {path: mark for name in functions for path, mark in user_code(name, name).marks.items()} | own.marks
    # In the folders of packages an upgrade writes.
    marks |= {path: mark_of(path) for path in {sysconfig.get_path(n) for n in ("purelib", "platlib")}}
    # Behind the marks: what is written meanwhile is seen by the first check.
    loaded.check_before(request)
    sources = request.key_parts.get("sources", {})
    for wanted, found in ((request.files, own.files), (sources, stage.sources(config))):
        for name, digest in wanted.items():
            if found.get(name) != digest:
                raise loaded.CodeDiffers(f"{name.removeprefix('module:')} was edited since its rollouts were begun")

    def check() -> None:
        for path, mark in marks.items():
            try:
                is_as_it_was = mark_of(path) == mark
            except OSError:
                is_as_it_was = False
            if not is_as_it_was:
                raise loaded.CodeDiffers(f"{path} was written while completions were scored ahead")

    return check


def take_over(request: Request, store: Store, work: Path, send: Callable[[Event], None]) -> None:
    """Gives the stage of a request what was scored ahead of it."""
    if request.ahead is None:
        return
    # Here: another stage's worker need not have it.
    from stages.score import ahead
    from stages.store.work import WorkFolder

    try:
        ahead.take_over(WorkFolder(store, request.stage, request.ahead).path, work)
    except OSError as e:
        # Such as a full disk: the stage scores it once more.
        send(Log(f"what was scored ahead could not be taken over ({type(e).__name__}: {e})"))
