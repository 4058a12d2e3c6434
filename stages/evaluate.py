"""One policy on the held-out problems: pass rate with an interval over problems, and every completion kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from stages.common.settings import Compute
from stages.common.tables import read_table
from stages.contract.definition import Context, Reads, Stage, StageConfig, execution_setting
from stages.contract.sources import function_digests
from stages.sampling.rows import Draw, sample_rows
from tuning.rewards.samples import Sample
from tuning.rows import CompletionRow, PromptRow, VerdictRow, write_table


class Config(StageConfig):
    """How a policy is judged."""

    problems: Annotated[int, Field(ge=0)] = 0
    """Held-out problems to use, from the first; 0: all."""
    samples: Annotated[int, Field(ge=1)] = 4
    """Completions of each problem."""
    max_tokens: Annotated[int, Field(ge=1)] = 64
    """Longest completion in tokens."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; 0 is greedy."""
    judge: str = "exact_match"
    """The reward function that decides, 1 is right: it may differ from what the policy was trained on."""
    judge_arguments: dict[str, str | int | float | bool] = {}
    """Its keyword arguments."""
    seconds: Annotated[float, Field(gt=0)] = 10.0
    """Wall-clock limit of one judgement."""
    shard_prompts: Annotated[int, Field(ge=1)] = 64
    """Problems of one shard."""
    compute: Compute = Compute()
    """How to compute."""
    workers: int = execution_setting(2, ge=1)
    """Processes that run the judge."""


def source_digests(config: Config) -> dict[str, str]:
    """Hashes of a judge that is not built in, for the key."""
    return function_digests(config.judge, "evaluate.judge")


def run(ctx: Context) -> dict[str, Any]:
    """Writes the rollout table and `verdicts/`; returns the score with its interval over problems."""
    config: Config = ctx.config
    problems = read_table(ctx.inputs["data"], "heldout/", PromptRow)[: config.problems or None]
    rows = sample_rows(
        ctx,
        # A problem keeps its place, and so its samples, whatever number of them is used.
        list(enumerate(problems)),
        Draw(config.samples, config.max_tokens, config.temperature, config.shard_prompts),
    )
    verdicts = _judged(config, rows)
    write_table(ctx.out / "verdicts" / "part-00000.parquet", verdicts, VerdictRow.schema())
    return _metrics(config, problems, rows, verdicts)


def _judged(config: Config, rows: Sequence[CompletionRow]) -> list[VerdictRow]:
    """The verdict on each completion, in the order of the rows."""
    from tuning.rewards.processes import evaluate

    outcomes = evaluate(
        config.judge,
        config.judge_arguments,
        [Sample.of(row) for row in rows],
        seconds=config.seconds,
        workers=config.workers,
    )
    return [
        VerdictRow(
            place=row.place,
            sample=row.sample,
            prompt_id=row.prompt_id,
            score=outcome.value,
            failure=outcome.failure,
        )
        for row, outcome in zip(rows, outcomes, strict=True)
    ]


def _metrics(
    config: Config, problems: Sequence[PromptRow], rows: Sequence[CompletionRow], verdicts: Sequence[VerdictRow]
) -> dict[str, Any]:
    import numpy as np

    from tuning.evaluation.statistics import constant_baseline, mean_interval, pass_at_k

    # A judgement that failed counts as wrong: a policy must not gain by breaking its judge.
    # [problems, samples]: the rows are in the order of the problems.
    correct_PS = np.asarray([v.score or 0.0 for v in verdicts], np.float64).reshape(-1, config.samples)
    mean, low, high = mean_interval(correct_PS)
    metrics: dict[str, Any] = {
        "score": mean,
        "score_low": low,
        "score_high": high,
        "problems": len(problems),
        "samples": config.samples,
        f"pass_at_{config.samples}": pass_at_k(correct_PS, config.samples),
        "mean_length": float(np.mean([len(row.token_ids) for row in rows])),
        "truncated": float(np.mean([row.stop == "length" for row in rows])),
        "judge_failures": sum(v.failure is not None for v in verdicts),
    }
    answers = [problem.answer for problem in problems if problem.answer is not None]
    if answers:
        metrics["constant_answer"], metrics["constant_score"] = constant_baseline(answers)
    return metrics


STAGE = Stage(
    "evaluate",
    1,
    Config,
    run,
    sources=source_digests,
    section="evaluate",
    title="evaluation",
    reads={"policy": Reads("policy"), "data": Reads("data", ("heldout/",)), "tokenizer": Reads("tokenizer")},
    headline=("score {score:.3f} [{score_low:.3f}, {score_high:.3f}]",),
    samples="rollouts/",
)
