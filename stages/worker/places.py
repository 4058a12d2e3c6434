"""Where a gang's ranks are, by the environment: how many, which one this process is, and the address of the lead.

    RLHF_GANG=2                  ranks on this machine; the lead starts the others
    RLHF_GANG=4@HOST:PORT        the lead listens at this address of its own, and the others join it
    RLHF_GANG=auto               as 4@HOST:PORT, by what Slurm, a TPU slice of GKE or an indexed job of Kubernetes say

RLHF_GANG_RANK is this process's number where the place does not say it; without one it is the lead, 0.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
from collections.abc import Mapping

GANG = "RLHF_GANG"
RANK = "RLHF_GANG_RANK"
TOKEN = "RLHF_GANG_TOKEN"
"""The secret that ranks and lead prove to each other; made up where the lead starts all ranks itself."""
SILENCE = "RLHF_GANG_SILENCE"
"""Seconds without a sign of life after which a rank counts as stopped."""
WAIT = "RLHF_GANG_WAIT"
"""Seconds in which all ranks have to join, and a rank waits for a lead."""
PORT = 9765
"""Where the lead listens under `auto`."""


class PlaceError(ValueError):
    """The environment describes no gang; the message says which variable."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A gang, and this process in it."""

    ranks: int
    rank: int
    host: str
    port: int
    """0: any that is free."""
    token: str = dataclasses.field(repr=False)
    starts: bool
    """Whether the lead starts the other ranks, on this machine."""
    silence: float = 60.0
    wait: float = 600.0


def place_of(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The gang that the environment names; None for one process. Raises PlaceError."""
    text = environment.get(GANG, "").strip()
    if not text:
        return None
    limits = {"silence": seconds(environment, SILENCE, 60.0), "wait": seconds(environment, WAIT, 600.0)}
    if text.isdigit():
        token = environment.get(TOKEN) or secrets.token_hex(16)
        return Place(_counted(int(text)), 0, "127.0.0.1", 0, token, True, **limits)
    if text == "auto":
        found = _scheduled(environment)
        if found is None:
            return None
        ranks, rank, host, port = *found, PORT
    else:
        match = re.fullmatch(r"(\d+)@(\S+):(\d+)", text)
        if match is None:
            raise PlaceError(f"{GANG} is {text!r}; say a number of ranks (2), 2@HOST:PORT, or auto")
        ranks, host, port = int(match[1]), match[2], int(match[3])
        number = environment.get(RANK) or environment.get("JOB_COMPLETION_INDEX") or "0"
        rank = _number(RANK, number)
    if not 0 <= rank < _counted(ranks):
        raise PlaceError(f"rank {rank} is none of the {ranks} that {GANG} has: they are numbered from 0")
    return Place(ranks, rank, host, port, token_of(environment), False, **limits)


def token_of(environment: Mapping[str, str] = os.environ) -> str:
    """The secret of a gang whose ranks join. Raises PlaceError where there is none."""
    token = environment.get(TOKEN, "")
    if len(token) < 16:
        raise PlaceError(
            f"{TOKEN} is {'too short' if token else 'not set'}: ranks and lead prove by it who they are; give all of "
            "them the same, such as the output of `openssl rand -hex 16`"
        )
    return token


def address_of(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`. Raises PlaceError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise PlaceError(f"{text!r} is no address of a lead; say HOST:PORT")
    return host, int(port)


def seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    """A number of seconds in the environment. Raises PlaceError for what is none."""
    text = environment.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise PlaceError(f"{name} is {text!r}; it is a number of seconds above 0")
    return value


def _counted(ranks: int) -> int:
    if ranks < 1:
        raise PlaceError(f"{GANG} asks for {ranks} ranks; one is the least")
    return ranks


def _number(name: str, text: str) -> int:
    if not text.isdigit():
        raise PlaceError(f"{name} is {text!r}; it is the number of this rank, from 0")
    return int(text)


def _scheduled(environment: Mapping[str, str]) -> tuple[int, int, str] | None:
    """(ranks, this rank, host of the lead) by what started this process; None where that started one alone."""
    found: tuple[int, int, str] | None = None
    if "SLURM_STEP_NUM_TASKS" in environment:
        # Of the step: a batch script is no task of it, and the job may have more than `srun` has started.
        ranks, rank = (_number(n, environment[n]) for n in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"))
        found = ranks, rank, first_host(environment["SLURM_STEP_NODELIST"])
    elif "TPU_WORKER_HOSTNAMES" in environment:
        hosts = environment["TPU_WORKER_HOSTNAMES"].split(",")
        found = len(hosts), _number("TPU_WORKER_ID", environment.get("TPU_WORKER_ID", "")), hosts[0]
    else:
        raise PlaceError(
            f"{GANG} is auto, but neither SLURM_STEP_NUM_TASKS (start it with srun) nor TPU_WORKER_HOSTNAMES is set; "
            f"say {GANG}=RANKS@HOST:PORT and {RANK}"
        )
    return None if found[0] == 1 else found


def first_host(nodes: str) -> str:
    """The first host of a list as Slurm writes it, such as `node[07-09,12],login1`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise PlaceError(f"SLURM_STEP_NODELIST is {nodes!r}, in which no host is found")
    return match[1] + (match[2] or "") + (match[3] or "")
