"""What a stage is: a config, the names of its inputs and a function of a context.

A stage lives in one module, `stages/NAME.py`, or in a folder with `stages/NAME/stage.py`. The module imports nothing
heavy at the top: `tuning` and JAX are imported inside `run`, which only ever executes in the worker process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from stages.contract.fingerprint import NUMERIC_LIBRARIES
from stages.store.artifacts import Artifact
from stages.store.keys import EXECUTION


class StageConfig(BaseModel):
    """Base of every stage's settings: strict, closed, immutable, canonical as JSON."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def execution_setting(default: Any, **constraints: Any) -> Any:
    """A field that cannot change the result (batch split, cadence of checkpoints): not in the key."""
    return Field(default, json_schema_extra=EXECUTION, **constraints)


class Progress(Protocol):
    def __call__(self, done: int, total: int, unit: str, **metrics: float) -> None: ...


@dataclasses.dataclass
class Context:
    """What `run` may touch. Everything else is out of bounds for a stage."""

    config: Any
    """The stage's resolved config."""
    inputs: Mapping[str, Artifact]
    """Committed artifacts by input name."""
    out: Path
    """A local folder. What is in it when `run` returns becomes the artifact."""
    work: Path
    """A local folder that outlives a kill, the same for each try at this key: checkpoints, finished shards."""
    seed: int
    """The root of all randomness of this stage (derived from the run's seed and the stage's name)."""
    progress: Progress
    """Reports work done; rate and time left are derived from the calls."""
    log: Callable[[str], None]
    """One line for people."""
    memory: dict[str, Any]
    """What this worker keeps between stages, by content digest (params on device, tokenizers)."""
    saved: Callable[[], None] = lambda: None
    """Call after each finished folder in `work`: a remote store gets its copy."""

    name: str = "stage"
    """What the metrics are filed under."""
    _metrics: Any = dataclasses.field(default=None, init=False, repr=False)

    def metrics_line(self, **values: Any) -> None:
        """Adds a row of metrics (`stages.contract.metrics`); timings are allowed: logs are no content."""
        if self._metrics is None:
            from stages.contract.metrics import Metrics

            self._metrics = Metrics(self.out / "logs", self.name)
        self._metrics.write(values)

    def close(self) -> None:
        """Ends what `metrics_line` began."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


def _no_sources(config: Any) -> dict[str, str]:
    return {}


def _loads_nothing(config: Any) -> tuple[str, ...]:
    return ()


@dataclasses.dataclass(frozen=True)
class Stage:
    """What a stage is called and made of: each stage's module ends with one, called STAGE."""

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
    restore: Callable[[Context, Artifact], tuple[Any, Any]] | None = None
    """(DecoderConfig, parameters) of an artifact that may hold no weights; None: its folder `model` has them."""

    @property
    def module(self) -> str:
        """The module in which the stage is defined, with which its fingerprint begins."""
        return self.run.__module__
