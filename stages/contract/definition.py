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
    """Reports `done` of `total` units of work; `metrics` are shown beside them."""

    def __call__(self, done: int, total: int, unit: str, **metrics: float) -> None: ...


@dataclasses.dataclass
class Context:
    """Everything that `run` may read, write and call."""

    config: Any
    """The stage's resolved config."""
    inputs: Mapping[str, Artifact]
    """Committed artifacts by input name."""
    out: Path
    """A local folder. Its content when `run` returns becomes the artifact."""
    work: Path
    """A local folder that survives a kill, the same for each try at this key: checkpoints, finished shards."""
    seed: int
    """The root of all randomness of this stage (derived from the run's seed and the stage's name)."""
    progress: Progress
    """Reports work done; rate and time left are derived from the calls."""
    log: Callable[[str], None]
    """Shows one line on the console and in the log."""
    memory: dict[str, Any]
    """Objects that this worker keeps between stages, by content digest (params on device, tokenizers)."""
    saved: Callable[[], None] = lambda: None
    """Call after each finished folder in `work`: a remote store gets its copy, and a group joins a checkpoint."""
    fetch: Callable[[Iterable[Path]], None] = lambda paths: None
    """Brings files of an earlier try's checkpoints to their paths in `work`."""

    is_primary: bool = True
    """Whether this is process 0 of its group, which alone writes tables; others write shards of checkpoints."""

    name: str = "stage"
    """Label of the metrics in TensorBoard and Weights & Biases."""
    _metrics: Any = dataclasses.field(default=None, init=False, repr=False)

    def metrics_line(self, **values: Any) -> None:
        """Adds a row of metrics (`rlhf.stages.contract.metrics`); timings are allowed: logs are no content."""
        if not self.is_primary:
            return
        # Opened with the first row: most stages write none, and the logs import TensorBoard.
        if self._metrics is None:
            from rlhf.stages.contract.metrics import Metrics

            self._metrics = Metrics(self.out / "logs", self.name)
        self._metrics.write(values)

    def close(self) -> None:
        """Closes the logs that `metrics_line` has opened."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


def _always(config: Any, splits: Collection[str]) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Reads:
    """One input of a stage: which artifact of the run it is, and which parts of that are read."""

    role: str
    """`policy`: the policy trained so far. `base`, `tokenizer`, `data`, `reward`: those of the run. In a round of RL
    also `reference` (the policy before the first round), `rollouts`, `scores`, `greedy_scores`, `scale` (the
    scores of the round's own rollouts). `NAME_*`: every
    artifact whose role begins so, each an input under its own role."""
    parts: tuple[str, ...] = ()
    """Path prefixes that are read: only their content is in the key. Empty: what the role offers, mostly all of it."""
    when: Callable[[Any, Collection[str]], bool] = _always
    """(settings, splits of the prepared data) -> whether the input is read."""


class _Figures(string.Formatter):
    """`str.format` for metrics. A format that ends in M counts in millions; a mapping shows its entries."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, Mapping):
            return "  ".join(f"{k} {v}" for k, v in value.items())
        if format_spec.endswith("M"):
            # `{bytes:.0fM}` is the number in millions, formatted by what stands before the M.
            value, format_spec = value / 1e6, format_spec[:-1]
        return str(format(value, format_spec))


Work = Literal["data", "train", "sample", "score"]
"""What a stage does: a recipe may name a worker for each (`rlhf.flows.recipe.workers`)."""
Processes = Literal["all", "primary"]
"""Which processes of a process group run a stage."""
Figure = str | Callable[[Mapping[str, Any]], str]
"""A template over metrics, such as `loss {loss:.4f}`, or a function of them for what no template can say."""


def _no_sources(config: Any) -> dict[str, str]:
    return {}


def _loads_nothing(config: Any) -> tuple[str, ...]:
    return ()


def _computes(config: Any) -> bool:
    return True


def _leaves_nothing(ctx: Context) -> None:
    pass


def _by_all(config: Any) -> Processes:
    return "all"


@dataclasses.dataclass(frozen=True)
class Stage:
    """All that the pipeline knows of a stage: each stage's module ends with one, called STAGE.

    `run`, `config` and what they import are in the key. The fields from `section` on are not: they place the stage
    in a run and describe it (`rlhf.stages.contract.fingerprint.DESCRIPTION`).
    """

    name: str
    """As its module is called."""
    version: int
    """Part of the key: raised where old artifacts must not be used although neither code nor settings say so."""
    config: type[StageConfig]
    """Its settings."""
    run: Callable[[Context], dict[str, Any]]
    """Writes files under `ctx.out` and returns the metrics for the manifest (JSON values)."""
    sources: Callable[[Any], dict[str, str]] = _no_sources
    """Settings -> digests of what is read from outside the inputs: files, a user's functions, models."""
    loads: Callable[[Any], tuple[str, ...]] = _loads_nothing
    """Settings -> modules of this project that the stage loads by name: their code is part of the key."""
    libraries: tuple[str, ...] = NUMERIC_LIBRARIES
    """Libraries whose versions are part of the key."""
    computes: Callable[[Any], bool] = _computes
    """Settings -> whether it computes on the device, whose kind is then part of the key: bits differ between kinds."""
    processes: Callable[[Any], Processes] = _by_all
    """Settings -> which processes of a group run it: all, each with the devices that it has, or process 0 alone."""
    restore: Callable[[Context, Artifact], tuple[Any, Any]] | None = None
    """(DecoderConfig, parameters) of an artifact that may hold no weights; None: its folder `model` has them."""
    section: str = ""
    """Dotted place of its settings in a recipe, such as rl.rollout; empty: they follow from other sections."""
    title: str = ""
    """Its result in tables, such as SFT for the policy after sft."""
    reads: Mapping[str, Reads] = dataclasses.field(default_factory=dict)
    """Its inputs by name."""
    makes: str = ""
    """The role of its artifact for the stages that follow; empty: none reads it."""
    headline: tuple[Figure, ...] = ()
    """The figures to look at first. One whose metrics are missing is left out."""
    work: Work = "train"
    """What it does, by which a run with several workers gives it to one of them."""
    tidy: Callable[[Context], None] = _leaves_nothing
    """Removes what it has left beside `out` and `work`, once that is of no use."""
    samples: str = ""
    """Path prefix of a table with prompts and completions for display; empty: there is none."""

    @property
    def module(self) -> str:
        """The module in which the stage is defined, with which its fingerprint begins."""
        return self.run.__module__

    def tidied(self, ctx: Context) -> None:
        """Calls `tidy`, since the artifact is committed or the next try begins anew. An error is logged alone."""
        try:
            self.tidy(ctx)
        except Exception as e:
            ctx.log(without_userinfo(f"what {self.name} has left was not removed ({type(e).__name__}: {e})"))

    def figures(self, metrics: Mapping[str, Any]) -> str:
        """The headline of these metrics, in one line."""
        return "  ".join(text for figure in self.headline if (text := _shown(figure, metrics)))

    def inputs(self, config: Any, splits: Collection[str]) -> dict[str, Reads]:
        """The inputs that these settings read."""
        return {name: reads for name, reads in self.reads.items() if reads.when(config, splits)}


def _shown(figure: Figure, metrics: Mapping[str, Any]) -> str:
    """The figure as text; empty where one of its metrics is missing."""
    if callable(figure):
        return figure(metrics)
    names = [name for _, name, _, _ in string.Formatter().parse(figure) if name]
    return "" if any(metrics.get(n) is None for n in names) else _Figures().format(figure, **metrics)
