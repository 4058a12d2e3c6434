"""Create a custom algorithm and call it once on small numbers, before a run.

Arguments: the settings of `rl.update` as JSON, and the completions of a prompt. Exits with 1 and one line about the
error, with file and line if it is in the user's code.
"""

from __future__ import annotations

import os
import sys

from rlhf.stages.contract.error_location import place_of
from rlhf.tuning.algorithms.settings import Objective

PROMPTS, TOKENS = 2, 3


def fault(objective: Objective, completions: int) -> str | None:
    """Describe an error of the objective's algorithm in a sentence; None without one."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from rlhf.tuning.algorithms.algorithm import Scored, Terms, find
    from rlhf.tuning.algorithms.flat import Column

    n = PROMPTS * completions
    totals = np.arange(n, dtype=np.float32) % 3 / 2
    groups = np.repeat(np.arange(PROMPTS), completions)
    ones = np.ones((n, TOKENS), np.float32)
    scored = Scored(totals, groups, np.ones(n, bool), Column.of(ones), Column.of(0 * ones), totals)
    try:
        algorithm = find(objective)
        found = algorithm.advantages(scored)
        shape = (found.count, found.width) if isinstance(found, Column) else np.shape(found)
        if shape not in ((n,), (n, TOKENS)):
            return (
                f"advantages have the shape {shape} for {n} completions of {TOKENS} tokens: expected one of each "
                f"completion, {(n,)}, or of each token, {(n, TOKENS)}"
            )
        if algorithm.keep is not None and np.shape(algorithm.keep(scored)) != (n,):
            return f"keep has the shape {np.shape(algorithm.keep(scored))}: expected one bool a completion, {(n,)}"
        # Only shapes: nothing is compiled.
        losses, _ = jax.eval_shape(lambda *arrays: algorithm.surrogate(Terms(*arrays)), *[jnp.ones((n, TOKENS))] * 5)
    except Exception as e:
        return f"{place_of(e)}{type(e).__name__}: {e}"
    if losses.shape != (n, TOKENS):
        return f"the surrogate's loss has the shape {losses.shape}: expected one of each token, {(n, TOKENS)}"
    return None


def main() -> None:
    from rlhf.stages.update.settings import Config

    # As in the worker: modules of the current folder come last.
    sys.path.append(os.getcwd())
    wrong = fault(Config.model_validate_json(sys.argv[1]).objective, int(sys.argv[2]))
    if wrong:
        sys.exit(wrong.replace("\n", " "))


if __name__ == "__main__":
    main()
