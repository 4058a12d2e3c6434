"""The definition of a stage: its settings, the artifacts it reads, a function of a context, and its description.

A stage lives in one module, `stages/NAME.py`, or in a folder with `stages/NAME/stage.py`. The module imports nothing
heavy at the top: `tuning` and JAX are imported inside `run`, which executes in the worker process alone.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from rlhf.stages.contract.fingerprint import NUMERIC_LIBRARIES
from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.store.keys import EXECUTION, without_userinfo


class StageConfig(BaseModel):
    """Base of every stage's settings: strict, closed, immutable, canonical as JSON."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def execution_setting(default: Any, **constraints: Any) -> Any:
    """A field that cannot change the result (batch split, cadence of checkpoints): not in the key."""
    return Field(default, json_schema_extra=EXECUTION, **constraints)


class Progress(Protocol):
    """Report `done` of `total` units of work, with metrics."""

    def __call__(self, done: int, total: int, unit: str, **metrics: float) -> None: ...


@dataclasses.dataclass
class Context:
    """The inputs, folders and callbacks of a stage's `run`."""

    config: Any
    """The stage's resolved config."""
    inputs: Mapping[str, Artifact]
    """Committed artifacts by input name."""
    out: Path
    """A local folder; its content becomes the artifact when `run` returns."""
    work: Path
    """A local folder that survives a kill, for checkpoints and finished shards; all tries at this key share it."""
    seed: int
    """The root of all randomness of this stage (from the run's seed and the stage's name), or 0 if it `draws` none."""
    progress: Progress
    """Reports finished work; the rate and the time left follow from the calls."""
    log: Callable[[str], None]
    """Shows one line on the console and in the log."""
    memory: dict[str, Any]
    """Objects that this worker keeps between stages, by content digest (params on device, tokenizers)."""
    saved: Callable[[], None] = lambda: None
    """Call after each finished folder in `work`: a remote store gets its copy, and a group joins a checkpoint."""
    fetch: Callable[[Iterable[Path]], None] = lambda paths: None
    """Downloads files of an earlier try's checkpoints to their paths in `work`."""

    is_primary: bool = True
    """Whether this is process 0 of its group. Only it writes tables; all processes write shards of checkpoints."""

    name: str = "stage"
    """Label of the metrics in TensorBoard and Weights & Biases."""
    _metrics: Any = dataclasses.field(default=None, init=False, repr=False)

    def metrics_line(self, **values: Any) -> None:
        """Write a row of metrics (`rlhf.stages.contract.metrics`), also timings: logs are not content."""
        if not self.is_primary:
            return
        # Opened by the first row: most stages write none, and the logs import TensorBoard.
        if self._metrics is None:
            from rlhf.stages.contract.metrics import Metrics

            self._metrics = Metrics(self.out / "logs", self.name)
        self._metrics.write(values)

    def close(self) -> None:
        """Close the logs that `metrics_line` has opened."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


@dataclasses.dataclass(frozen=True)
class Reads:
    """One input of a stage: which artifact of the run it is, and which parts of that are read."""

    role: str
    """`policy`: the policy trained so far. `base`, `tokenizer`, `data`, `reward`: those of the run. In a round of RL
    also `reference` (the policy before the first round), `rollouts`, `scores`, `greedy_scores`, `scale` (the
    scores of the round's own rollouts). `NAME_*`: every artifact with a role that begins with `NAME_`, each as an input
    under its own role."""
    parts: tuple[str, ...] = ()
    """Path prefixes that are read; only their content is in the key. Empty: the default of the role, mostly all."""
    when: Callable[[Any, Collection[str]], bool] = lambda config, splits: True
    """(settings, splits of the prepared data) -> whether the input is read."""


Work = Literal["data", "train", "sample", "score"]
"""Kinds of work; a recipe may name a worker for each (`rlhf.flows.recipe.workers`)."""
Processes = Literal["all", "primary"]
"""Which processes of a process group run a stage."""
Figure = str | Callable[[Mapping[str, Any]], str]
"""A template over metrics, such as `loss {loss:.4f}`, or a function of them."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """The definition of a stage; each stage's module ends with one, called STAGE.

    `run`, `config` and their imports are in the key. The fields from `section` on are not: they place the stage
    in a run and describe it (`rlhf.stages.contract.fingerprint.DESCRIPTION`).
    """

    name: str
    """The name of its module."""
    version: int
    """Part of the key: raise it if old artifacts are wrong and neither code nor settings change."""
    config: type[StageConfig]
    """Its settings."""
    run: Callable[[Context], dict[str, Any]]
    """Writes files under `ctx.out` and returns the metrics for the manifest (JSON values)."""
    sources: Callable[[Any], dict[str, str]] = lambda config: {}
    """Settings -> digests of files, functions of users and models that are read besides the inputs."""
    loads: Callable[[Any], tuple[str, ...]] = lambda config: ()
    """Settings -> modules of this project that the stage loads by name: their code is part of the key."""
    libraries: tuple[str, ...] = NUMERIC_LIBRARIES
    """Libraries whose versions are part of the key."""
    computes: Callable[[Any], bool] = lambda config: True
    """Settings -> whether it computes on the device, whose kind is then part of the key: bits differ between kinds."""
    draws: Callable[[Any], bool] = lambda config: True
    """Settings -> whether the result depends on `ctx.seed`. If not, the seed is 0: all runs share the artifact."""
    processes: Callable[[Any], Processes] = lambda config: "all"
    """Settings -> the processes of a group that run it: all, each with its devices, or only process 0."""
    restore: Callable[[Context, Artifact], tuple[Any, Any]] | None = None
    """(DecoderConfig, parameters) of an artifact that may hold no weights; None: its folder `model` has them."""
    section: str = ""
    """Dotted place of its settings in a recipe, such as rl.rollout; empty: they follow from other sections."""
    title: str = ""
    """Its result in tables, such as SFT for the policy after sft."""
    reads: Mapping[str, Reads] = dataclasses.field(default_factory=dict)
    """Its inputs by name."""
    makes: str = ""
    """The role of its artifact for later stages; empty: none reads it."""
    headline: tuple[Figure, ...] = ()
    """The most important figures; those with missing metrics are skipped."""
    work: Work = "train"
    """The kind of work, which chooses its worker in a run with several."""
    tidy: Callable[[Context], None] = lambda ctx: None
    """Removes files outside of `out` and `work` that are not needed any more."""
    samples: str = ""
    """Path prefix of a table with prompts and completions for display; empty: there is none."""

    @property
    def module(self) -> str:
        """The module that defines the stage, where its fingerprint begins."""
        return self.run.__module__

    def tidied(self, ctx: Context) -> None:
        """Call `tidy` after a commit, or before a try from the beginning; log an error and continue."""
        try:
            self.tidy(ctx)
        except Exception as e:
            ctx.log(without_userinfo(f"leftovers of {self.name} were not removed ({type(e).__name__}: {e})"))

    def figures(self, metrics: Mapping[str, Any]) -> str:
        """Return the headline of these metrics, in one line."""
        return "  ".join(text for figure in self.headline if (text := _shown(figure, metrics)))

    def inputs(self, config: Any, splits: Collection[str]) -> dict[str, Reads]:
        """Return the inputs that these settings read."""
        return {name: reads for name, reads in self.reads.items() if reads.when(config, splits)}


def _shown(figure: Figure, metrics: Mapping[str, Any]) -> str:
    """Return the figure as text; empty if one of its metrics is missing."""
    if callable(figure):
        try:
            return figure(metrics)
        except KeyError:
            return ""
    names = [name for _, name, _, _ in string.Formatter().parse(figure) if name]
    if any(metrics.get(n) is None for n in names):
        return ""
    tables = {n: "  ".join(f"{k} {v}" for k, v in t.items()) for n, t in metrics.items() if isinstance(t, Mapping)}
    return figure.format(**{**metrics, **tables})
