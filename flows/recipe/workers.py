"""The section `workers` of a recipe: which stages run beside each other, and where.

Of it the kind of device alone is in keys.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stages.contract.definition import Work

ALL: tuple[Work, ...] = get_args(Work)
TRAIN: Work = "train"
"""The worker that does what no other is named for."""


class WorkerSettings(BaseModel):
    """One worker: a process, or a process group, that makes one stage after another."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    hosts: Annotated[int, Field(ge=1)] = 1
    """Processes that compute each stage together, one per host; on this machine as long as no cluster is named. The
    mesh of a stage is over the devices of all of them."""

    devices: list[Annotated[int, Field(ge=0)]] | None = None
    """Numbers of the accelerators of this host that it has, as nvidia-smi counts them or as chips of a TPU; []: none,
    for stages that do not compute on them; null: where there is none, the processor. Several processes of this host
    get equal shares, in this order."""
    pool: Annotated[str, Field(min_length=1)] | None = None
    """A work pool of the Prefect server, whose hosts run it, with all devices of the one that takes it; the store has
    to be one that they see. null: this host."""
    device: Annotated[str, Field(pattern="^[a-z]+:.+$")] | None = None
    """The kind of device that hosts of the pool have, PLATFORM:KIND where `rlhf doctor` there says PLATFORM (KIND),
    such as "gpu:NVIDIA H100 80GB HBM3": it is in the keys of what is computed. null: the kind of this host."""

    @model_validator(mode="after")
    def _in_one_place(self) -> WorkerSettings:
        if self.pool is not None and self.devices is not None:
            raise ValueError("devices are of this host, and a worker in a pool has those of its own: leave one out")
        if self.pool is None and self.device is not None:
            raise ValueError("device is of the hosts of a pool: name the pool, or leave it out")
        count = len(self.devices or ())
        if count % self.hosts:
            raise ValueError(f"{count} devices cannot be divided among {self.hosts} processes (hosts)")
        return self

    @property
    def shares(self) -> list[list[int]] | None:
        """The devices of each process; None where they are not listed."""
        if self.devices is None:
            return None
        size = len(self.devices) // self.hosts
        return [self.devices[i * size : (i + 1) * size] for i in range(self.hosts)]


class Workers(BaseModel):
    """Which workers a run has; a stage begins when what it reads is made and its worker is free."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    train: WorkerSettings = WorkerSettings()
    """Trains policies and reward models, and does what no other worker here is named for; it is always there."""
    sample: WorkerSettings | None = None
    """Samples: rollouts, refills, greedy baselines, evaluations. null: train does it."""
    score: WorkerSettings | None = None
    """Scores rollouts. null: train does it."""
    data: WorkerSettings | None = None
    """The base model, data, choices and the export. null: train does it."""

    silence_seconds: Annotated[float, Field(ge=15)] = 300.0
    """Without a sign of life for so long a worker in a pool counts as gone, and so does the run for the worker."""

    idle_seconds: Annotated[float, Field(ge=10)] = 900.0
    """A worker in a pool of which nothing is asked for so long gives its place to others; the run asks for another."""

    @model_validator(mode="after")
    def _of_their_own(self) -> Workers:
        counts = Counter(number for worker in self.named.values() for number in worker.devices or ())
        if twice := sorted(number for number, count in counts.items() if count > 1):
            raise ValueError(f"device {twice[0]} is given twice: each worker has devices of its own")
        return self

    @property
    def named(self) -> dict[Work, WorkerSettings]:
        """The workers by what they do."""
        found = {work: getattr(self, work) for work in ALL}
        return {work: settings for work, settings in found.items() if settings is not None}

    @property
    def pooled(self) -> bool:
        """Whether any is in a pool."""
        return any(worker.pool is not None for worker in self.named.values())

    def settings(self, work: Work | str) -> WorkerSettings:
        """The settings of the worker of this name. Raises KeyError for one that is not named."""
        return {str(name): found for name, found in self.named.items()}[work]

    def of(self, work: Work) -> Work:
        """The worker that does this."""
        return work if work in self.named else TRAIN
