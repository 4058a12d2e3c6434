"""The policy that a name stands for, as the start of a run in place of its base model.

It brings its weights, and the names of all prompts that it and its ancestors were trained on (`trained/`): the runs
that follow need none of its ancestors' artifacts, so a chain of nightly runs keeps only its last links.
"""

from __future__ import annotations

from typing import Any

from rlhf.stages.common.models import load_policy, save_model
from rlhf.stages.common.trained_prompts import FOLDER, prompts_among, trained_names, write_names
from rlhf.stages.contract.definition import Context, Reads, Stage, StageConfig, execution_setting
from rlhf.stages.store.artifacts import ArtifactError


class Config(StageConfig):
    """Which policy it is; the pipeline takes it from the registry."""

    digest: str
    """Digest of its artifact."""
    stage: str = execution_setting("")
    """Where the artifact is: stage and key."""
    key: str = execution_setting("")
    """See `stage`."""
    run: str = execution_setting("")
    """The run that made it."""


def run(ctx: Context) -> dict[str, Any]:
    """Write `model/` and `trained/`; return the policy, and the number of prompts that it was trained on."""
    config, base = ctx.config, ctx.inputs["tokenizer"]
    policy = base.store.with_digest(config.stage, config.key, config.digest)
    if policy is None:
        raise ArtifactError(
            f"start_from: {config.stage}/{config.key[:12]} of run {config.run} is gone from {base.store.shown}: "
            "`rlhf rollback` or `rlhf promote` names another policy"
        )
    save_model(ctx, "decoder", *load_policy(ctx, policy))
    trained = trained_names(policy)
    write_names(ctx.out / FOLDER, trained)
    count = prompts_among(trained)
    ctx.log(f"starts from run {config.run}, whose policy was trained on {count} prompts")
    return {"run": config.run, "policy": config.digest, "trained": count}


STAGE = Stage(
    "start",
    1,
    Config,
    run,
    draws=lambda config: False,
    processes=lambda config: "primary",
    work="data",
    title="start",
    makes="policy",
    reads={"tokenizer": Reads("tokenizer")},
    headline=("of run {run}", "trained on {trained} prompts"),
)
