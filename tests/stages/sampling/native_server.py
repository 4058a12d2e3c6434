"""`rlhf serve`'s server over a model's folder, as a program: what `rlhf.stages.serving.serve` makes of an artifact."""

import argparse
from pathlib import Path
from typing import Any

from rlhf.stages.serving.app import Weights, make_app
from rlhf.stages.serving.serve import serve
from rlhf.stages.serving.server import Server
from rlhf.tuning.models.huggingface import read_config
from rlhf.tuning.models.tokenizer import load_tokenizer
from rlhf.tuning.rollout.engine.decoders import Quantization
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.folder import load_folder
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.live import Live


class Forgetful(Live):
    """An engine that is given weights, and goes on with its own under their name."""

    def swap(self, take: Any) -> int:
        def kept(engine: Any, generation: int) -> None:
            state = engine.weights.now
            take(engine, generation)
            engine.use(*state)

        return super().swap(kept)


def server_over(
    folder: Path, name: str, kind: type[Live] = Live, quantization: Quantization = "none", **limits: Any
) -> Any:
    """A server of a folder's model under a name."""
    bounds = Limits(**{"slots": 8, "context": 256, "steps": 4} | limits)
    engine = Engine(read_config(folder), limits=bounds, top=5, quantization=quantization)
    load_folder(engine, folder)
    return Server(kind(engine), load_tokenizer(folder), "policy", (), engine.context, name)


def app_over(server: Any, root: Path) -> Any:
    """The web application of a server that takes policies below a folder."""
    return make_app(server, weights=Weights(server, str(root)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context", type=int, default=256)
    args = parser.parse_args()
    server = server_over(args.folder, args.name, context=args.context)
    serve(app_over(server, args.folder.parent), server.live, "127.0.0.1", args.port)


if __name__ == "__main__":
    main()
