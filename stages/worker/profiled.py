"""Traces a stretch of a stage with JAX's profiler (`compute.profile`), for xprof and Perfetto."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from stages.contract.definition import Context

FOLDER = "logs/tensorboard"
"""Where TensorBoard's plugin looks for traces; logs are no content of an artifact."""


@contextlib.contextmanager
def profiled(ctx: Context) -> Iterator[None]:
    """Traces the stage in the block while its progress is in the stretch of its settings, if they have one."""
    import jax

    first, last = getattr(getattr(ctx.config, "compute", None), "profile", None) or (0, 0)
    report, running, ended = ctx.progress, False, False
    options = jax.profiler.ProfileOptions()
    # Python's own calls would make a trace of gigabytes.
    options.python_tracer_level = 0

    def reached(done: int) -> None:
        nonlocal running, ended
        # Progress may leap over the stretch: then what follows its start is traced.
        if not running and not ended and first <= done and last > 0:
            running = True
            folder = str(ctx.out / FOLDER)
            jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
        elif running and done >= last:
            running, ended = False, True
            jax.profiler.stop_trace()
            ctx.log(f"a trace of JAX's profiler is in {FOLDER}/plugins/profile of the artifact")

    def progress(done: int, total: int, unit: str, **metrics: float) -> None:
        reached(done)
        report(done, total, unit, **metrics)

    ctx.progress = progress
    reached(0)
    try:
        yield
    finally:
        if running:
            reached(last)
