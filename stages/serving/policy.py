"""A stored policy outside a run, for `rlhf chat` and `rlhf serve`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.stages.common.compilation import configure_jax
from rlhf.stages.common.models import load_policy, load_tokenizer, stop_ids
from rlhf.stages.contract.definition import Context
from rlhf.stages.serving.settings import ChatOptions, PolicyPlace
from rlhf.stages.store.artifacts import Artifact, ArtifactError, Store

TYPICAL_PROMPT = 64
"""Tokens of a typical first prompt, whose programs compile while weights are read."""
SLOTS = 32
"""Prompts that `answers` decodes at a time."""
NO_POLICY = ("reward",)
"""Stages whose model scores text."""


@dataclasses.dataclass
class Opened:
    """A policy with its tokenizer. `engine` reads its weights."""

    artifact: Artifact
    config: Any
    """DecoderConfig."""
    tokenizer: Any
    stop_ids: tuple[int, ...]
    folder: Path | None
    """The Hugging Face folder with its weights; None if they were rebuilt from rollouts."""
    params: Any = None
    """Rebuilt parameters, until an engine has them; else None."""

    def engine(self, limits: Any, dtype: str, mesh: Any = None, **options: Any) -> Any:
        """Return an engine with this policy, over a mesh of `placement.sampling_mesh`; `options` are `Engine`'s.

        May be called once: the engine owns the weights.
        """
        from rlhf.tuning.rollout.engine.folder import load_folder
        from rlhf.tuning.rollout.engine.replicas import engine_over
        from rlhf.tuning.rollout.requests import Request

        engine = engine_over(mesh, self.config, dtype, limits, **options)
        if self.folder is None:
            engine.load(self.params)
            self.params = None
            return engine
        context = limits.context or self.config.max_positions
        engine.prepare([Request([0] * max(1, min(TYPICAL_PROMPT, context - 1)), 1)])
        load_folder(engine, self.folder)
        return engine


def open_policy(place: PolicyPlace) -> Opened:
    """Return the policy at a place; ends the program with a message if it is missing."""
    from rlhf.tuning.models.huggingface import read_config

    store = Store(place.store)
    artifact, base = store.with_digest(place.stage, place.key, place.digest), store.get("base", place.base)
    if artifact is None or base is None:
        sys.exit(f"{place.stage}/{place.key[:12]} or its base model is gone from {place.store}; run the recipe again")
    if artifact.stage in NO_POLICY:
        sys.exit(
            f"{place.stage}/{place.key[:12]} gives scores, no tokens; name the node of a policy, such as sft or export"
        )
    try:
        store.ensure_whole(artifact)
    except ArtifactError as error:
        sys.exit(str(error))
    scratch = Path(store.scratch) / "opened"
    # No stage runs: functions that load models need a context.
    ctx = Context(
        config=None,
        inputs={},
        out=scratch,
        work=scratch,
        seed=0,
        progress=lambda *a, **k: None,
        log=lambda line: print(line, file=sys.stderr),
        memory={},
    )
    folder = folder_of(artifact)
    config, params = load_policy(ctx, artifact) if folder is None else (read_config(folder), None)
    return Opened(artifact, config, load_tokenizer(ctx, base), stop_ids(ctx, base), folder, params)


def answers(place: PolicyPlace, prompts: Sequence[str], options: ChatOptions, system: str | None = None) -> list[str]:
    """Return the answer of a policy to each prompt, in this process. Raises RefusedRequest for a prompt that is too
    long."""
    import jax

    from rlhf.tuning.axes import Axes
    from rlhf.tuning.chat.template import Template
    from rlhf.tuning.device import choose
    from rlhf.tuning.rollout.engine.limits import Limits
    from rlhf.tuning.rollout.engine.placement import sampling_mesh
    from rlhf.tuning.rollout.requests import Request, Sampling

    configure_jax()
    policy, device = open_policy(place), choose()
    template, head = Template(policy.tokenizer), [{"role": "system", "content": system}] if system else []
    requests = [
        Request(
            template.ids([*head, {"role": "user", "content": prompt}]),
            options.max_tokens,
            Sampling(options.temperature),
            policy.stop_ids,
            counter=number,
        )
        for number, prompt in enumerate(prompts)
    ]
    mesh = sampling_mesh(Axes(1, 1, options.tensor), jax.local_devices()[: options.tensor])
    limits = Limits(slots=min(SLOTS, len(requests)), chunks=device.chunk_tokens)
    ended = dict(policy.engine(limits, device.compute.dtype, mesh).run(requests))
    return [policy.tokenizer.decode(ended[i][0].tokens, skip_special_tokens=True) for i in range(len(requests))]


def folder_of(artifact: Artifact) -> Path | None:
    """Return the Hugging Face folder with a policy's weights; None if only its rollouts are stored."""
    # An export is a model folder; an update stores weights below `state/`.
    places = [""] if artifact.stage == "export" else [p for p in ("model/", "state/model/") if artifact.has(p)]
    return artifact.local(places[0]) if places else None
