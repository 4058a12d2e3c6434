"""Evaluation of a policy on the held-out problems: pass rate with an interval over problems."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from rlhf.stages.common.evaluation_metrics import figures, is_figure
from rlhf.stages.common.journal import Journal, journaled
from rlhf.stages.common.sandboxed_code import code_can_reach
from rlhf.stages.common.settings import Compute
from rlhf.stages.common.tables import read_table
from rlhf.stages.contract.definition import Context, Reads, Stage, StageConfig, execution_setting
from rlhf.stages.contract.sources import function_digests
from rlhf.stages.sampling.environment import ENVIRONMENT, Environment, modules_of
from rlhf.stages.sampling.environment import source_digests as environment_digests
from rlhf.stages.sampling.episode_tables import (
    FAILED,
    FOLDER,
    by_name,
    sample_of,
    success_of,
    summary,
    task_of,
    turns_summary,
)
from rlhf.stages.sampling.rows import Draw, sample_rows
from rlhf.tuning.agents.rows import TrajectoryRow
from rlhf.tuning.random_draws import some_by_group
from rlhf.tuning.rewards.samples import Outcome, Sample
from rlhf.tuning.rows import CompletionRow, PromptRow, VerdictRow, write_table
from rlhf.tuning.rows import read_table as read_rows

SCORES = "scores.json"
"""The file of the artifact with its metrics, for stages that choose by them."""

COMPARING = ("exact_match", "number_match", "math_equal")
"""Judges that compare with the right answer: a constant answer has a score by them."""

Arguments = dict[str, str | int | float | bool]


class Judge(StageConfig):
    """A further judge of an evaluation."""

    function: str
    """A reward function: a built-in name or `module:function`; 1 is correct."""
    arguments: Arguments = {}
    """Keyword arguments of the function."""
    seconds: Annotated[float, Field(gt=0)] = 10.0
    """Wall-clock limit of one judgement."""


class Config(StageConfig):
    """How a policy is judged."""

    problems: Annotated[int, Field(ge=0)] = 0
    """Held-out problems to use, drawn at random by group, the same for all policies; 0: all."""
    samples: Annotated[int, Field(ge=1)] = 4
    """Completions of each problem: n of pass@1 to pass@n and of maj@n."""
    max_tokens: Annotated[int, Field(ge=1)] = 64
    """Longest completion in tokens; in an environment the longest turn."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of most probable tokens with this total probability."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Sample from this number of most probable tokens; 0: from all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample from tokens with at least this share of the largest probability."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a completion; the judges see the text before the first one, as in OpenAI's API."""
    judge: str = "exact_match"
    """Reward function that decides; 1 is correct. It may differ from the training rewards."""
    judge_arguments: Arguments = {}
    """Keyword arguments of the judge."""
    seconds: Annotated[float, Field(gt=0)] = 10.0
    """Wall-clock limit of one judgement."""
    judges: dict[str, Judge] = {}
    """Further judges of the same completions by name, each with a score and an interval. The score, pass@k and
    comparisons use `judge`."""
    max_failed_fraction: float = execution_setting(0.1, ge=0, le=1)
    """Share of a judge's calls that may fail (time, memory, an error); more fail the stage. Failed calls count as
    wrong, so that a policy does not gain by breaking its judge."""
    every: int = execution_setting(0, ge=0)
    """Also evaluate the policy every this number of RL rounds; 0: only at the end of each training section."""
    load_best_model_at_end: bool = execution_setting(False)
    """RL ends with the best of the evaluated policies in place of the last: it is exported, and later stages start from
    it. Its score is too high if the same problems judge it again."""
    metric_for_best_model: str = execution_setting("score")
    """Metric that decides which policy is best, the higher the better: `score`, `pass_at_K`, `maj_at_N`, or a name of
    `judges`."""
    shard_prompts: Annotated[int, Field(ge=1)] = 64
    """Problems of one shard."""
    environment: Environment | None = None
    """Set by the recipe from its section environment."""
    compute: Compute = Compute()
    """How to compute."""
    workers: int | None = execution_setting(None, ge=1)
    """Processes that run the judges; null: one a core. Nodes of a cluster run one a CPU."""

    @model_validator(mode="after")
    def _possible(self) -> Config:
        if self.judge in self.judges:
            raise ValueError(f"judges.{self.judge} has the name of the judge that decides: give it another one")
        if taken := [name for name in sorted(self.judges) if is_figure(name)]:
            raise ValueError(f"judges.{taken[0]} has the name of a figure of evaluations: give it another one")
        if self.load_best_model_at_end and not self.every:
            raise ValueError("load_best_model_at_end chooses among the policies that `every` evaluates: set every")
        passes = [f"pass_at_{k}" for k in range(1, self.samples + 1)]
        known = ["score", *passes, *([f"maj_at_{self.samples}"] if self.samples > 1 else []), *self.judges]
        if self.metric_for_best_model not in known:
            raise ValueError(f"metric_for_best_model {self.metric_for_best_model!r}: there are {', '.join(known)}")
        return self

    @property
    def all_judges(self) -> dict[str, Judge]:
        """Every judge by its name in the verdicts; the first is the one that decides, by the name of its function."""
        decides = Judge(function=self.judge, arguments=self.judge_arguments, seconds=self.seconds)
        return {self.judge: decides} | dict(sorted(self.judges.items()))


def source_digests(config: Config) -> dict[str, str]:
    """Hashes of judges that are not built in, for the key."""
    digests = {} if config.environment is None else environment_digests(config.environment)
    for name, judge in [("judge", config.all_judges[config.judge]), *config.judges.items()]:
        if judge.function != ENVIRONMENT:
            where = "evaluate.judge" if name == "judge" else f"evaluate.judges.{name}.function"
            digests |= function_digests(judge.function, where)
    return digests


def loads(config: Config) -> tuple[str, ...]:
    """The modules that play episodes, which the stage loads by name."""
    return modules_of(config.environment)


def run(ctx: Context) -> dict[str, Any]:
    """Write the rollout table, `verdicts/` and `scores.json`; return the scores with intervals over problems."""
    config: Config = ctx.config
    table = read_table(ctx.inputs["data"], "heldout/", PromptRow)
    if not table:
        raise ValueError("the data has no held-out problems: raise data.heldout_fraction, or set evaluate to null")
    placed = drawn(table, config.problems)
    groups = {place: problem.group or problem.prompt for place, problem in placed}
    rows = sample_rows(ctx, placed, Draw.of(config, config.samples, config.temperature))
    if not ctx.is_primary:
        return {}
    reachable = code_can_reach(ctx, [judge.function for judge in config.all_judges.values()])
    # None without an environment.
    episodes = by_name(read_rows((ctx.out / FOLDER).glob("*.parquet"), TrajectoryRow))
    judged = [v for name in config.all_judges for v in _verdicts(ctx, name, rows, groups, episodes)]
    write_table(ctx.out / "verdicts" / "part-00000.parquet", judged, VerdictRow.schema())
    problems = [problem for _, problem in placed]
    metrics = _about(config, problems) | figures(list(config.all_judges), config.samples, rows, judged) | reachable
    if "score" not in metrics:
        raise ValueError(
            f"judge {config.judge} applies to none of the problems: they may have no answer; name another "
            "evaluate.judge, or measure nothing (evaluate: null)"
        )
    if config.environment:
        metrics |= summary(list(episodes.values())) | _levels(config.environment, problems)
        metrics |= turns_summary(ctx.out / "turns", bool(config.environment.tools), episodes.values())
    # As content too: a stage that chooses by the scores has them in its key.
    (ctx.out / SCORES).write_text(json.dumps(metrics, indent=1, sort_keys=True) + "\n")
    return metrics


def drawn(table: Sequence[PromptRow], count: int) -> list[tuple[int, PromptRow]]:
    """Draw (place, problem) of `count` held-out problems by random groups (R22); 0: of all.

    They are the same in all runs on this data, whatever their seeds. A problem keeps its place, and so its samples,
    for any `count`.
    """
    groups = [problem.group or problem.prompt for problem in table]
    return [(place, table[place]) for place in some_by_group(groups, count or len(table), 0, "evaluate")]


Episodes = Mapping[tuple[int, int], TrajectoryRow]


def _levels(environment: Environment, problems: Sequence[PromptRow]) -> dict[str, Any]:
    """Return the success of random actions and of the best policy without observations in a built-in environment."""
    from rlhf.tuning.agents.environments import BUILT_IN

    # With tools alone the data names the task.
    names = {environment.name} if environment.name else {problem.source for problem in problems}
    if len(names) > 1 or not names <= set(BUILT_IN) or not hasattr(BUILT_IN[str(*names)], "levels"):
        return {}
    tasks = [task_of(problem) for problem in problems]
    levels = BUILT_IN[str(*names)].levels(tasks, turns=environment.turns, **environment.arguments)
    return {"levels": dataclasses.asdict(levels)}


def _verdicts(
    ctx: Context, name: str, rows: Sequence[CompletionRow], groups: Mapping[int, str], episodes: Episodes
) -> list[VerdictRow]:
    """Return a judge's verdict on each completion, in the order of the rows; those of an earlier try are read.

    Raises Outage and TooManyFailures (`rlhf.tuning.rewards.failures`).
    """
    from rlhf.tuning.evaluation.answers import answers_of
    from rlhf.tuning.rewards.failures import check_failures

    config: Config = ctx.config
    judge = config.all_judges[name]
    limits: dict[str, Any] = {"seconds": judge.seconds, "workers": config.workers}
    if judge.function == ENVIRONMENT:
        outcomes = [success_of(row, episodes) for row in rows]
    else:
        # By number: the name of a judge may not be a name of a file.
        file = f"verdicts-{list(config.all_judges).index(name)}"
        journal = Journal(ctx, f"judge {name}", file, functools.partial(sample_of, episodes=episodes))
        # An episode without an end is not judged: its environment failed, not the policy.
        calls = [[i] for i, row in enumerate(rows) if row.stop != FAILED]
        found = journaled(journal, rows, calls, judge.function, judge.arguments, **limits)
        ctx.saved()
        outcomes = [found.get(i, Outcome(None)) for i in range(len(rows))]
    setting, kept = "evaluate.max_failed_fraction", "the completions are kept, and every verdict on them"
    check_failures({name: outcomes}, config.max_failed_fraction, setting=setting, what="judge", kept=kept)
    samples, places = [Sample.of(row) for row in rows], [row.place for row in rows]
    answers = answers_of(judge.function, judge.arguments, samples, places, **limits)
    return [
        VerdictRow(
            place=row.place,
            sample=row.sample,
            prompt_id=row.prompt_id,
            group=groups[row.place],
            judge=name,
            answer=answer,
            score=outcome.value,
            failure=outcome.failure,
        )
        for row, outcome, answer in zip(rows, outcomes, answers, strict=True)
    ]


def _about(config: Config, problems: Sequence[PromptRow]) -> dict[str, Any]:
    """Return metrics of the problems alone."""
    from rlhf.tuning.evaluation.answers import answer_of
    from rlhf.tuning.evaluation.statistics import constant_baseline

    about: dict[str, Any] = {"problems": len(problems), "samples": config.samples}
    answers = [problem.answer for problem in problems if problem.answer is not None]
    if answers and config.judge in COMPARING:
        forms = [answer_of(config.judge, {}, answer) or answer for answer in answers]
        about["constant_answer"], about["constant_score"] = constant_baseline(answers, forms)
    return about


STAGE = Stage(
    "evaluate",
    1,
    Config,
    run,
    sources=source_digests,
    loads=loads,
    # Greedy completions depend on no seed; an environment may.
    draws=lambda config: config.temperature > 0 or config.environment is not None,
    work="sample",
    section="evaluate",
    title="evaluation",
    reads={"policy": Reads("policy"), "data": Reads("data", ("heldout/",)), "tokenizer": Reads("tokenizer")},
    headline=("score {score:.3f} [{score_low:.3f}, {score_high:.3f}]", "cut off {truncated:.2f}"),
    samples="rollouts/",
)
