"""Hosts on the nodes of a Ray cluster: an actor on each, with a host process there (`rlhf.tuning.parallel.local`).

The host process ends with its actor, whose end closes its stream. Imported only when a cluster is named.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf.tuning.allowed import RULES
from rlhf.tuning.parallel.local import STOP_SECONDS, Deliver, Local

RUNTIME_ENVIRONMENT = "RLHF_CLUSTER_RUNTIME_ENV"
"""The environment variable with Ray's `runtime_env` of the actors, as JSON."""
WAIT_SECONDS = 5.0
"""Longest time of one call that waits for messages of a node."""


class Agent:
    """The actor: passes messages between the pool and the host process of its node."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._news: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._host = Local(settings, lambda host, message: self._news.put(message))

    def send(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Pass messages to the host."""
        self._host.send(messages)

    def receive(self) -> list[dict[str, Any]]:
        """Return what the host has sent; wait for the first message."""
        news: list[dict[str, Any]] = []
        with contextlib.suppress(queue.Empty):
            news.append(self._news.get(timeout=WAIT_SECONDS))
            while True:
                news.append(self._news.get_nowait())
        return news

    def close(self) -> None:
        """End the host process, with its children and folders."""
        self._host.close()


class Node:
    """The host of a node, as the pool sees it."""

    blocks = 4

    def __init__(self, node: Mapping[str, Any], settings: Mapping[str, Any], deliver: Deliver) -> None:
        self.name = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        self._deliver = deliver
        options: dict[str, Any] = {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        }
        runtime = json.loads(os.environ.get(RUNTIME_ENVIRONMENT, "{}"))
        rules = {name: os.environ[name] for name in RULES if name in os.environ}
        if rules:
            runtime["env_vars"] = {**runtime.get("env_vars", {}), **rules}
        if runtime:
            options["runtime_env"] = runtime
        processes = max(1, int(node["Resources"].get("CPU", 1)))
        grouped: dict[str, Any] = {"concurrency_groups": {"receive": 1}}
        actor = ray.remote(**grouped)(Agent).options(**options)
        self._agent: Any = actor.remote({**settings, "processes": processes})
        threading.Thread(target=self._receive, name="jobs", daemon=True).start()

    def _receive(self) -> None:
        receive = self._agent.receive.options(concurrency_group="receive")
        try:
            while True:
                for message in ray.get(receive.remote()):
                    self._deliver(self, message)
        except Exception as error:
            # Ray's own errors of a lost actor or node, and any other: nothing more comes from it.
            reason = str(error).strip().partition("\n")[0]
            self._deliver(self, {"lost": f"{type(error).__name__}: {reason}"})

    def send(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Send messages. The thread that receives reports a node that is lost."""
        self._agent.send.remote(messages)

    def close(self) -> None:
        """End the actor, and with it the host process of the node."""
        with contextlib.suppress(Exception):
            # Ray kills the processes that an actor has started, but not those further below.
            ray.get(self._agent.close.remote(), timeout=2 * STOP_SECONDS)
        with contextlib.suppress(Exception):
            ray.kill(self._agent)


def open_nodes(address: str, settings: Mapping[str, Any], deliver: Deliver) -> list[Node]:
    """Return a host for each living node of the cluster that has processors for jobs."""
    if not ray.is_initialized():
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    return [Node(node, settings, deliver) for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
