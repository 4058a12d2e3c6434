"""The code of completions that rewards and judges run: the resources that it can reach, and whether it may deceive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rlhf.stages.contract.definition import Context

RUNS_CODE = "code_passes"
"""The built-in function that runs the code of completions."""


def code_can_reach(ctx: Context, functions: Iterable[str]) -> dict[str, Any]:
    """The parts of this machine that code can reach, as a metric and a warning in the log; empty where none is run."""
    if RUNS_CODE not in functions:
        return {}
    from rlhf.tuning.rewards.sandbox import gaps

    found = list(gaps())
    if found:
        ctx.log(
            f"WARNING: {RUNS_CODE} runs the code of completions, and on this machine it can reach: {', '.join(found)}. "
            "Allow unprivileged user namespaces, or run in a container without secrets and network; the argument "
            "isolation: required refuses such a machine"
        )
    return {"code_can_reach": found}


def suspect_code(functions: Sequence[str], values: Sequence[Sequence[float | None]], texts: Sequence[str]) -> int:
    """How many completions that `code_passes` rewards have code that may deceive a test; `values` by function."""
    from rlhf.tuning.rewards.sandbox import may_deceive

    tested = [column for function, column in zip(functions, values, strict=True) if function == RUNS_CODE]
    return sum(any(row) and may_deceive(text) for *row, text in zip(*tested, texts, strict=True))
