"""A preparation on a cluster whose process is killed while the runner makes shards.

`python -m tests.stages.prepare.killed BASE FOLDER SETTINGS COUNT` prepares with SETTINGS (JSON) in FOLDER, and kills
itself, with all that it runs, once COUNT shards have receipts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.contract.definition import Context
from stages.prepare import stage
from tuning.data import by_shard


def main() -> None:
    base, folder, settings, count = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
    finish, done = by_shard.Finish.process, []

    def until(self: Any, element: Any, sums: Any) -> Iterator[str]:
        for name in finish(self, element, sums):
            done.append(name)
            if len(done) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            yield name

    by_shard.Finish.process = until  # type: ignore[method-assign]
    artifact: Any = types.SimpleNamespace(local=lambda part="": base / part, manifest={})
    (folder / "out").mkdir(parents=True)
    (folder / "work").mkdir()
    context = Context(
        config=stage.Config(**settings), inputs={"base": artifact}, out=folder / "out", work=folder / "work", seed=7,
        progress=lambda *args, **metrics: None, log=print, memory={},
    )  # fmt: skip
    stage.run(context)


if __name__ == "__main__":
    main()
