"""The section `workers` of a recipe: the roles that run at the same time, and the hosts and devices of each.

Only `device` is part of keys.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhf.stages.contract.definition import Work

ALL: tuple[Work, ...] = get_args(Work)
TRAIN: Work = "train"
"""The role that runs the stages of roles that a recipe does not name."""
DATA: Work = "data"
"""The role that reads files: on a cluster it stays on the host of the run unless the recipe names it."""
ON_CLUSTER = ("cpus", "gpus", "tpu", "resources", "device")
"""Settings that need a cluster."""


class WorkerSettings(BaseModel):
    """A role: one worker process, or a process on each of several hosts, that runs one stage at a time."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    devices: list[Annotated[int, Field(ge=0)]] | None = None
    """Accelerators of this host that the role uses: the numbers that nvidia-smi prints, or TPU chips. []: none; null:
    all, or the CPU. Several processes of this host divide the list evenly, in order. Only without a cluster."""
    hosts: Annotated[int, Field(ge=1)] = 1
    """Processes that compute each stage of the role together, one on each host; without a cluster all of them run on
    this host. The mesh of a stage spans the devices of all of them."""
    cpus: Annotated[float, Field(ge=0)] | None = None
    """Processors to reserve on each host of the cluster; null: 1."""
    gpus: Annotated[int, Field(ge=1)] | None = None
    """GPUs to reserve on each host of the cluster; null: none."""
    tpu: Annotated[str, Field(pattern=r"^v\d+[a-z]*:\d+(x\d+){1,2}$")] | None = None
    """A TPU slice to reserve, VERSION:TOPOLOGY such as "v6e:4x4"; it determines `hosts`."""
    resources: dict[str, Annotated[float, Field(gt=0)]] | None = None
    """Custom Ray resources to reserve on each host of the cluster, by name."""
    device: Annotated[str, Field(pattern="^[a-z]+:.+$")] | None = None
    """The kind of device that the role's hosts have, PLATFORM:KIND where `rlhf doctor` prints PLATFORM (KIND), such as
    "gpu:NVIDIA H100 80GB HBM3"; it is part of the keys of the role's stages. null: the kind of the run's own host."""

    @model_validator(mode="after")
    def _possible(self) -> WorkerSettings:
        if self.tpu is not None and (self.gpus is not None or self.hosts != 1):
            raise ValueError("tpu determines the number of hosts and their devices: leave hosts and gpus out")
        if (count := len(self.devices or ())) % self.hosts:
            raise ValueError(f"{count} devices cannot be divided among {self.hosts} processes (hosts)")
        return self

    @property
    def shares(self) -> list[list[int]] | None:
        """The devices of each process of this host; None where they are not listed."""
        return None if self.devices is None else [part.devices or [] for part in self.divided(self.hosts)]

    def divided(self, count: int) -> list[WorkerSettings]:
        """Return the settings of each of several workers, which divide the listed devices evenly, in order."""
        found, size = self.devices, len(self.devices or ()) // count
        parts = [found and found[i * size : (i + 1) * size] for i in range(count)]
        return [self.model_copy(update={"devices": part}) for part in parts]

    def bundle(self) -> dict[str, float]:
        """The resources of one host by Ray's names; without those of a TPU slice."""
        found = {"CPU": 1.0 if self.cpus is None else self.cpus, "GPU": float(self.gpus or 0), **(self.resources or {})}
        return {name: amount for name, amount in found.items() if amount}


class Workers(BaseModel):
    """The roles of a run; a stage starts when its inputs are made and its role is free."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    cluster: Annotated[str, Field(pattern="^(auto|[^:/]+:[0-9]+)$")] | None = None
    """Address of a Ray cluster, HOST:PORT, or "auto" for the one that this host belongs to; null: the roles run on this
    host."""
    train: WorkerSettings = WorkerSettings()
    """Trains policies and reward models, and runs the stages of roles that are not listed."""
    sample: WorkerSettings | None = None
    """Samples rollouts, refills, greedy baselines and evaluations; null: the role train does it."""
    score: WorkerSettings | None = None
    """Scores rollouts; null: the role train does it."""
    data: WorkerSettings | None = None
    """Runs base, prepare, select, gate and export; null: the role train does it, or, with a cluster, a worker on the
    run's own host."""

    wait_seconds: Annotated[float, Field(ge=0)] = 600.0
    """How long a role waits for resources that the cluster does not have, such as nodes that an autoscaler starts;
    for resources that are in use it waits without limit."""

    @model_validator(mode="after")
    def _possible(self) -> Workers:
        counts = Counter(number for worker in self.named.values() for number in worker.devices or ())
        if twice := sorted(number for number, count in counts.items() if count > 1):
            raise ValueError(f"two roles use device {twice[0]}: give each role its own devices")
        for name, role in self.named.items():
            if self.cluster is None and (given := [s for s in ON_CLUSTER if getattr(role, s) is not None]):
                raise ValueError(f"{name}.{given[0]} needs a Ray cluster: name it in workers.cluster, or remove it")
            if self.on_cluster(name) and role.devices is not None:
                raise ValueError(
                    f"{name}.devices are devices of this host: on a cluster give {name}.gpus or {name}.tpu"
                )
            if self.on_cluster(name) and role.tpu is None and not role.bundle():
                raise ValueError(f"{name} reserves nothing on the cluster: give {name}.cpus, gpus or resources")
        return self

    @property
    def named(self) -> dict[Work, WorkerSettings]:
        """The settings of the run's roles by name."""
        found = {work: getattr(self, work) for work in ALL}
        if self.cluster is not None and self.data is None:
            found[DATA] = WorkerSettings()
        return {work: settings for work, settings in found.items() if settings is not None}

    def divided(self, count: int) -> list[Workers]:
        """Return the roles of each of several crews (`WorkerSettings.divided`); a cluster reserves devices for each."""
        roles = {} if self.cluster is not None else {n: role.divided(count) for n, role in self.named.items()}
        return [self.model_copy(update={n: parts[i] for n, parts in roles.items()}) for i in range(count)]

    def on_cluster(self, name: str) -> bool:
        """Whether the role's workers run on the cluster."""
        return self.cluster is not None and (name != DATA or self.data is not None)

    def of(self, work: Work) -> Work:
        """The role that runs the stages of this kind of work."""
        return work if work in self.named else TRAIN
