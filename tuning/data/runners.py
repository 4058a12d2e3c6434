"""Runners of a Beam pipeline: this machine, or a cluster with its options. Other runners are refused, since they lose
records or download binaries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf.tuning.names import closest, nearest

LOCAL = "FnApiRunner"
CLUSTERS = ("FlinkRunner", "SparkRunner", "DataflowRunner", "PortableRunner")
JOB_SECONDS = 30 * 86_400
"""Limit for Beam to follow a portable job; by default it gives up after a minute without an answer."""
REACH_SECONDS = 10.0
# Options that follow from other settings and must not contradict them.
_OWN = {"runner", "direct_num_workers", "direct_running_mode"}


class RunnerError(ValueError):
    """An unusable runner or an unknown option; the message names the remedy."""


@dataclasses.dataclass(frozen=True)
class Runner:
    """A Beam runner: `workers` are the processes of the local one, `options` the pipeline options of a cluster."""

    name: str = LOCAL
    workers: int = 1
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def check(runner: Runner, scratch: str | None) -> None:
    """Raise RunnerError for a runner or options that do not work.

    scratch: the folder or URL that all workers write to; a cluster needs a URL.
    """
    known = (LOCAL, *CLUSTERS)
    if runner.name not in known:
        raise RunnerError(f"no runner {runner.name!r}; {nearest(runner.name, known)}")
    own = sorted(_OWN & set(runner.options))
    if own:
        raise RunnerError(f"runner option {own[0]} follows from `runner.name` and `workers`: remove it")
    if runner.options:
        _check_options(runner.options)
    if runner.name == LOCAL:
        return
    if runner.workers != 1:
        raise RunnerError(f"`workers` counts processes of this machine; {runner.name} takes its number by its options")
    if scratch is None or "://" not in scratch or scratch.startswith(("file:", "memory:")):
        raise RunnerError(
            f"{runner.name} runs on other machines: set runner.scratch to a URL that they reach, such as s3://bucket/scratch"
        )


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise RunnerError for options that Beam would ignore: unknown names, and false, which has no flag."""
    from apache_beam.options.pipeline_options import PipelineOptions

    known = PipelineOptions([]).get_all_options()
    for name, value in sorted(options.items()):
        if name not in known and name.removeprefix("no_") not in known:
            near = closest(name, known)
            hint = f"; did you mean {near}?" if near else ""
            raise RunnerError(f"Beam has no pipeline option {name!r}{hint}")
        if value is False:
            raise RunnerError(f"runner option {name}: remove it instead of setting false, or set no_{name} to true")


def flags_of(runner: Runner) -> list[str]:
    """Return the pipeline options in command-line form."""
    # Without an explicit runner, Beam's default first tries to download a binary.
    flags = [f"--runner={runner.name}", "--default_sdk_harness_log_level=ERROR"]
    if runner.name != LOCAL and "job_server_timeout" not in runner.options:
        flags.append(f"--job_server_timeout={JOB_SECONDS}")
    for name, value in sorted(runner.options.items()):
        # A list repeats the flag.
        for one in value if isinstance(value, list) else [value]:
            flags.append(f"--{name}" if one is True else f"--{name}={one}")
    return flags


def reach(runner: Runner) -> None:
    """Raise RunnerError if no job service answers at the runner's `job_endpoint`; Beam would wait for it."""
    endpoint = runner.options.get("job_endpoint")
    if endpoint in (None, "embed"):
        return
    import grpc

    with grpc.insecure_channel(str(endpoint)) as channel:
        try:
            grpc.channel_ready_future(channel).result(REACH_SECONDS)
        except grpc.FutureTimeoutError as error:
            raise RunnerError(
                f"runner option job_endpoint: no job service answers at {endpoint} within {REACH_SECONDS:g} s; "
                "expected its HOST:PORT"
            ) from error
