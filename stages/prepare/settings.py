"""Settings of the stage `prepare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, model_validator

from rlhf.stages.contract.definition import StageConfig, execution_setting
from rlhf.stages.store.keys import WRITTEN

if TYPE_CHECKING:
    from rlhf.tuning.data.runners import Runner

Split = Literal["sft", "preference", "labelled", "prompts", "heldout"]
# fmt: off
Layout = Literal[
    "auto", "native", "prompt", "prompt-completion", "messages", "preference", "labelled", "alpaca", "sharegpt", "hh",
    "verifiable", "text",
]
# fmt: on
Verifier = Literal["exact_match", "number_match", "math_equal", "code_passes"]
Scalar = str | int | float | bool | None
ALONE = ("source", "source_args", "rename", "fields", "layout")
"""Settings of a single source, which nothing reads where `sources` are given."""


class FieldSettings(StageConfig):
    """Names and values of fields of a source."""

    # In a list, where Prefect's form shows the model itself.
    model_config = ConfigDict(use_attribute_docstrings=True)

    rename: dict[str, str | None] = Field(default_factory=dict)
    """Field names of the source mapped to those of the record layout, such as {question: prompt}; null drops a
    field."""
    fields: dict[str, str | dict[Literal["from", "pattern", "template"], str]] = Field(default_factory=dict)
    """Values for fields of the record layout, computed from other fields: a path, {from, pattern} or {template}."""

    @model_validator(mode="after")
    def _readable(self) -> FieldSettings:
        if self.fields:
            from rlhf.tuning.data.fields import Mapper

            Mapper(self.rename, self.fields)
        return self


class SourceSettings(FieldSettings):
    """A source of records."""

    source: str = execution_setting("addition")
    """Built-in task (addition, reasoning_gym, critics, words), environment (guess, calculator, frozenlake, or
    episodes for one of your own), `module:function`, path, folder, glob or URL of files, or `dataset:NAME` of the
    store; in the key by content, not by name."""
    source_args: dict[str, Scalar] = Field(default_factory=dict)
    """Arguments of the task or function."""
    layout: Layout = "auto"
    """Layout of the records; a record of another layout is a dead letter. auto decides by the fields of each record."""


class DataSource(SourceSettings):
    """One of several sources."""

    # `for` is a word of Python.
    model_config = ConfigDict(serialize_by_alias=True)

    weight: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Number of times that each training record is used: 0.5 keeps half of them, chosen by a hash; 2 uses each
    twice."""
    uses: Annotated[list[Split], Field(min_length=1)] | None = Field(default=None, alias="for")
    """Outputs that its records are for, such as [sft] or [prompts]. Evaluation problems are the held-out share of
    sources for prompts or heldout, and all records of a source for [heldout]. Each of several sources states it, unless
    its records fit one output of training alone; null: each that they fit."""


class Decontaminate(FieldSettings):
    """Training records that share a run of words with an evaluation prompt are dropped."""

    sources: list[str] = execution_setting(..., min_length=1)
    """Tasks, functions or files with the evaluation prompts; in the key by content, not by name."""
    words: Annotated[int, Field(ge=1)] = 13
    """Length in words of a run that is a match; a prompt of fewer words must occur in full. In scripts without spaces,
    such as Chinese or Thai, each character is a word; symbols are words, punctuation is not, and case is ignored."""


class RunnerSettings(StageConfig):
    """Who executes the Beam pipeline."""

    name: str = "FnApiRunner"
    """FnApiRunner runs on this machine; FlinkRunner, SparkRunner, DataflowRunner and PortableRunner run on clusters."""
    options: dict[str, Scalar | list[str]] = Field(default_factory=dict)
    """Beam's pipeline options by name, such as {flink_master: "host:8081"}."""
    scratch: str | None = None
    """URL that all workers and this machine can reach, for pieces of data; required on a cluster."""


class Config(SourceSettings):
    """Settings of the stage `prepare`."""

    sources: list[DataSource] = Field(default_factory=list)
    """Several sources in place of `source` and its settings."""
    extra_fields: Literal["error", "metadata"] = "error"
    """Fields that the layout does not know: `error` rejects the record, `metadata` moves them into its metadata."""
    system_prompt: str | None = None
    """First message of every prompt that has no system message."""
    seed: int = 0
    """Seed of the source and of the split. It is separate from the run's seed, so that runs with other seeds have the
    same held-out problems."""
    splits: list[Split] = Field(default=["sft", "preference", "prompts", "heldout"], min_length=1)
    """The wanted outputs; an empty one is an error. A recipe that leaves it out wants those that its sections read."""
    verifiers: list[Verifier] = Field(default_factory=list)
    """Rewards that read answers: a prompt whose answer one of them cannot read is a dead letter. A recipe that leaves
    it out has those of `rl.score.rewards` and `evaluate.judge`."""
    heldout_fraction: float = Field(default=0.2, ge=0, lt=1)
    """Share of the groups that is held out. Records that name their split are not counted and stay there."""
    sft_fraction: float = Field(default=0.33, ge=0, le=1)
    """Share of the training groups that feeds `sft`; all of a source that is for SFT alone. A recipe that leaves it out
    and reads neither prompts nor pairs has 1."""
    preference: Literal["sft", "all-training"] = "all-training"
    """Training groups from which pairs, or completions with a label, are taken."""
    prompts: Literal["rest", "all-training"] = "rest"
    """Training groups whose prompts are used for RL: those outside `sft` (rest), or all. A record without a completion
    cannot feed `sft`: its prompt is used in both cases."""
    rules: list[str] = Field(default_factory=list)
    """Filters for quality or language, each `module:function` of a record; it returns False, or the reason as text, to
    drop the record."""
    near_duplicates: Annotated[float, Field(ge=0.3, le=1)] | None = None
    """Similarity (Jaccard, of 5-word runs) from which only one of several records stays; null: equal ones only. It is
    estimated from 128 hashes (standard error 0.04 at 0.7), and 98 % of the pairs at the threshold are compared."""
    decontaminate: Decontaminate | None = None
    """Evaluation prompts that the training data must not contain."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Maximum tokens of a prompt, chat template included."""
    max_completion_tokens: int = Field(default=512, ge=1)
    """Maximum tokens of a completion, end of turn included."""
    too_long: Literal["drop", "truncate", "error"] = "drop"
    """Longer rows are dropped, truncated (a prompt keeps its end, a completion its start, without the end of turn) or
    rejected."""
    shards: int = Field(default=0, ge=0, le=512)
    """Files of each output; 0: one for each 64 MB of raw data, at most 512. A file is sorted in memory, and a column of
    it is less than 2 GiB."""
    max_dead_fraction: float = Field(default=0.1, ge=0, le=1)
    """Maximum share of unreadable records; more fail the stage."""
    workers: int = execution_setting(1, ge=1)
    """Processes on this machine. Several take 3 s to start, and pay off from tens of thousands of records."""
    chunk_megabytes: float = execution_setting(8.0, gt=0)
    """Raw data that one process works on at a time; memory is about twelve times this. With another size a killed
    stage starts again."""
    runner: RunnerSettings = execution_setting(RunnerSettings())
    """Runner of the Beam pipeline."""

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Config:
        from rlhf.tuning.data import runners

        own = {n: type(self).model_fields[n].get_default(call_default_factory=True) for n in ALONE}
        written = self.model_fields_set if info.context == WRITTEN else ()
        if self.sources and (given := [n for n in ALONE if n in written or getattr(self, n) != own[n]]):
            raise ValueError(
                f"`sources` stands in place of `{given[0]}`, which each entry of `sources` may have: give one of them"
            )
        runners.check(self.beam_runner(), self.runner.scratch)
        return self

    def all_sources(self) -> list[DataSource]:
        """The sources, one or several."""
        return self.sources or [DataSource(**{name: getattr(self, name) for name in ALONE})]

    def beam_runner(self) -> Runner:
        """The runner as the pipeline takes it."""
        from rlhf.tuning.data.runners import Runner

        options: dict[str, Any] = dict(self.runner.options)
        return Runner(self.runner.name, self.workers, options)
