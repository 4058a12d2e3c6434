"""One process of a group that samples a round by a native server. Its argument: folders and settings as JSON."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from rlhf.stages import rollout
from rlhf.tuning import multihost
from tests.stages.training.support import Folder, perform


def main() -> None:
    asked = json.loads(sys.argv[1])
    multihost.initialize()
    inputs = {name: Folder(Path(path), digest) for name, (path, digest) in asked["inputs"].items()}
    for folder in inputs.values():
        folder.store = SimpleNamespace(scratch=Path(asked["scratch"]))
    config = rollout.Config.model_validate_json(json.dumps(asked["config"]))
    folder = Path(asked["out"]) / str(multihost.process_index())
    metrics, _ = perform(rollout, config, folder, {}, **inputs)
    print(json.dumps(metrics))
    multihost.barrier()


if __name__ == "__main__":
    main()
