"""Says whether the stages of a recipe fit a machine, as JSON: memory, work, time at best, and what would help.

On stdin: JSON with `on`, `sections` (settings by dotted name, as a recipe has them), `source`, and where the user gives
them `model`, `prompt_tokens` and `completion_tokens`. Exits with 2 and one line for what cannot be answered.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuning.fit.figures import Figures
    from tuning.fit.machines import Machine
    from tuning.models.config import DecoderConfig


def main() -> None:
    """Prints the answer; see the module."""
    # Not an argument: others on the machine see those, and settings may hold keys of servers.
    question = json.load(sys.stdin)
    if question["on"] != "cpu":
        # Nothing is computed: an accelerator that is here stays free.
        os.environ["JAX_PLATFORMS"] = "cpu"
    from tuning.models.config import UnsupportedModel
    from tuning.rollout.requests import RefusedRequest

    try:
        print(json.dumps(answer(question)))
    except (ValueError, OSError, UnsupportedModel, RefusedRequest) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The machine, the model, and for each stage its figures, verdict and remedies. Raises ValueError, naming the
    field, for a model or a machine that is not known."""
    from stages.contract.registry import by_section
    from stages.tools.fit_asks import SECTIONS, Lengths, Run, lengths_of
    from stages.tools.fit_remedies import figures_of, remedies
    from tuning.fit.machines import machine
    from tuning.fit.places import shapes_of

    on = machine(question["on"])
    model = model_of(question["model"] or question["source"], "--model" if question["model"] else "base.source")
    given = question["sections"]
    sections: dict[str, Any] = {
        name: by_section()[name].config.model_validate_json(json.dumps(given[name]))
        for name in SECTIONS
        if name in given
    }
    teacher = model
    if "distill" in sections and sections["distill"].teacher not in ("base", "sft", "preference", "rl"):
        teacher = model_of(sections["distill"].teacher, "distill.teacher")
    data = given["data"]
    known = question["completion_tokens"] or data["max_completion_tokens"]
    lengths = Lengths(
        question["prompt_tokens"] or data["max_prompt_tokens"], known, given=bool(question["completion_tokens"])
    )
    run = Run(sections, model, teacher, lengths, question["turns"])
    stages = []
    for name, section, asked in run.asks(on):
        figures = figures_of(asked, on)
        prompt, completion = lengths_of(asked)
        entry = {"stage": name, "section": section, "prompt": prompt, "completion": completion} | shown(figures, on)
        if entry["verdict"] != "fits":
            entry["remedies"] = remedies(run, section, name, on)
        stages.append(entry)
    import jax

    parameters = sum(x.size for x in jax.tree.leaves(shapes_of(model, "decoder")))
    return {
        "machine": {
            "name": on.name,
            "devices": on.count,
            "kind": on.kind.name,
            "limit": on.limit,
            "memory": on.kind.memory_bytes,
        },
        "model": {"parameters": int(parameters), "family": model.family},
        "lengths": {"prompt": run.prompt, "wanted": lengths.prompt, "positions": model.max_positions},
        "stages": stages,
        "fits": all(s["verdict"] == "fits" for s in stages),
    }


def model_of(name: str, where: str) -> DecoderConfig:
    """The config of a public model's name, a folder with config.json, a GGUF file or a model on the hub.

    Raises ValueError, naming `where`, for none of these.
    """
    from stages.common.source import locate, snapshot
    from tuning.fit.shapes import VALUES, public
    from tuning.models.config import tiny
    from tuning.models.config_json import from_hugging_face
    from tuning.models.json_file import json_object

    if name in VALUES or (where == "--model" and not Path(name).exists()):
        return public(name)
    if name.startswith("hub:"):
        path = snapshot(name.removeprefix("hub:"), ["config.json"], where)
    else:
        found = locate(name)
        if found is None:
            from tuning.models.byte_tokenizer import byte_tokenizer

            return tiny(len(byte_tokenizer()))
        path = found
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(f"{where}: {path} does not exist; a folder with a config.json is enough, or say --model")
    if path.suffix == ".json":
        return from_hugging_face(json_object(path), str(path))
    from tuning.models.gguf import GGUFCheckpoint, GGUFFile

    return from_hugging_face(GGUFCheckpoint(GGUFFile(path)).config(), str(path))


def shown(figures: Figures, on: Machine) -> dict[str, Any]:
    """Figures as JSON values: bytes, FLOPs and seconds."""
    low, middle, high = figures.peak
    seconds = figures.seconds(on)
    bound = max(seconds, key=lambda name: seconds[name])
    return {
        "parts": figures.parts,
        "temporary": list(figures.temporary),
        "peak": [low, middle, high],
        "verdict": figures.verdict(on),
        "flops": figures.flops,
        "moved": figures.moved,
        "sent": figures.sent,
        "seconds": seconds,
        "step_seconds": seconds[bound],
        "bound": bound,
        "step": figures.step,
        "shape": figures.shape,
    }


if __name__ == "__main__":
    main()
