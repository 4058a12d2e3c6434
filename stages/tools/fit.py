"""Says whether the stages of a recipe fit a machine.

On stdin: JSON with `on`, `sections` (settings by dotted name, as a recipe has them), `source`, `turns` and `seconds`.
Each line of stdout is the answer so far: sums first, then peaks, stage by stage, and settings that make room. So many
seconds after the sums the process ends. Exits with 2 and one line for a question without an answer.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from typing import Any

import jax

from rlhf.stages.contract.registry import by_section
from rlhf.stages.tools.fit_asks import Run, model_of, type_of
from rlhf.tuning.fit.machines import machine
from rlhf.tuning.fit.needs import Needs, peak
from rlhf.tuning.fit.sampling import SERVERS, Sampled
from rlhf.tuning.fit.training import Packed
from rlhf.tuning.models.config import UnsupportedModel
from rlhf.tuning.rollout.requests import RefusedRequest

Figures = dict[str, Any]
"""Of a stage: `parts`, their sum `held`, `peak` or null, `verdict`, and `why` it is not `fits`."""


def main() -> None:
    """Prints the answer; see the module."""
    # Not an argument: others on the machine see those, and settings may hold keys of servers.
    question = json.load(sys.stdin)
    if question["on"] != "cpu":
        # Nothing is computed: an accelerator that is here stays free.
        jax.config.update("jax_platforms", "cpu")
    try:
        answer(question)
    except (ValueError, OSError, UnsupportedModel, RefusedRequest) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


def answer(question: dict[str, Any]) -> None:
    """Prints the lines. Raises ValueError, naming the field, for an unknown model or machine."""
    run = _run(question)
    of = {section: run.asks(section) for section in run.sections}
    asks = [(section, name, asked.needs(run.on)) for section in of for name, asked in of[section].items()]
    stages = [{"stage": name, **sums(run, needs), "remedies": []} for _, name, needs in asks]
    on = {"name": run.on.name, "devices": run.on.count, "kind": run.on.kind.name, "limit": run.on.limit}
    found = {"machine": on, "prompt": run.prompt, "stages": stages}
    print(json.dumps(found), flush=True)
    # Without a handler, which would wait for the compiler.
    signal.alarm(question["seconds"])
    for (section, name, needs), stage in zip(asks, stages, strict=True):
        print(f"{name}: compiling for {run.on.name}", file=sys.stderr)
        stage |= figures(run, needs)
        if stage["verdict"] == "does not fit":
            stage["remedies"] += remedies(run, section, name, stage)
            no_remedy = all(remedy["verdict"] == "does not fit" for remedy in stage["remedies"])
            if isinstance(of[section][name], Sampled) and no_remedy and not run.on.here:
                stage["why"] = f"no host of {run.on.name} has the memory: {SERVERS}"
        print(json.dumps(found), flush=True)


def _run(question: dict[str, Any]) -> Run:
    on, model, given = machine(question["on"]), model_of(question["source"]), question["sections"]
    data = given.pop("data")
    sections: dict[str, Any] = {
        name: by_section()[name].config.model_validate_json(json.dumps(settings)) for name, settings in given.items()
    }
    prompt = max(1, min(data["max_prompt_tokens"], model.max_positions // 2))
    turns, stored = question["turns"], type_of(question["source"])
    return Run(on, sections, model, prompt, data["max_completion_tokens"], turns, stored)


def sums(run: Run, needs: Needs) -> Figures:
    """The figures without the peak."""
    found = {"parts": needs.parts, "held": needs.held, "peak": None, "shape": needs.shape, "why": ""}
    if needs.held > run.on.limit:
        return found | {"verdict": "does not fit"}
    remedy = run.on.uncompiled
    return found | {"verdict": "unknown", "why": f"the peak is not computed; install {remedy}" if remedy else ""}


def figures(run: Run, needs: Needs) -> Figures:
    """The figures with the peak, if the sums leave room and the compiler is installed."""
    found = sums(run, needs)
    if found["why"] or found["verdict"] != "unknown":
        return found
    try:
        most = peak(needs, run.on)
    except jax.errors.JaxRuntimeError as e:
        # The first line names the error, the second the bytes.
        return found | {"verdict": "does not fit", "why": " ".join(str(e).splitlines()[:2])}
    return found | {"peak": most, "verdict": "fits" if most <= run.on.limit else "does not fit"}


def remedies(run: Run, section: str, name: str, found: Figures) -> Iterator[Figures]:
    """Settings up to the first with which the stage fits, each on top of those that helped, with their figures."""
    settings: dict[str, Any] = {}
    for change in _changes(run.asks(section)[name], found["shape"], section):
        own = settings | change
        try:
            tried = figures(run, run.changed(section, own).asks(section)[name].needs(run.on))
        # The section may lack such a setting, or refuse it with its others.
        except (ValueError, RefusedRequest):
            continue
        if _need(tried) < _need(found):
            found, settings = tried, own
            yield tried | {"set": [f"{section}.{key}={value}" for key, value in own.items()]}
        if found["verdict"] != "does not fit":
            return


def _need(found: Figures) -> tuple[bool, int]:
    """A stage without room for its sums needs most; the others need their peak."""
    without = found["verdict"] == "does not fit" and found["peak"] is None
    return without, found["peak"] or found["held"]


def _changes(asked: Any, shape: dict[str, int], section: str) -> Iterator[dict[str, Any]]:
    """Settings of the section, those first that cost least."""
    if not isinstance(asked, Packed):
        for parts in (2, 4, 8):
            yield {"compute.rollout_rows": max(1, shape["slots"] // parts)}
            yield {"compute.mesh.tensor": parts}
        return
    tokens = shape["rows"] * shape["row_tokens"]
    while (tokens := tokens // 2) >= shape["row_tokens"] * shape["shards"]:
        yield {"compute.tokens_per_micro_batch": tokens}
    yield {"compute.remat": "full"}
    yield {"compute.mesh.data": 1, "compute.mesh.fsdp": -1}
    optimizer = "critic.optimizer" if section == "rl.update" and asked.role == "scalar" else "optimizer"
    for moments in ("bfloat16", "host"):
        yield {f"{optimizer}.moments": moments}
    yield {"lora.rank": 16}
    yield {"lora.quantize": "nf4"}


if __name__ == "__main__":
    main()
