"""Lets `prefect deployment run rlhf-pipeline` name a flow alone: its only deployment, or the one called `default`.

Prefect's command line asks for FLOW/DEPLOYMENT. It loads this module as a plugin where plugins are
enabled (`prefect.toml` in the project's folder). Only `prefect deployment ...` is touched, and there
only names without a slash. `rlhf-pipeline/default` works everywhere, with or without the plugin.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from typing import Any

from prefect.plugins import register_hook


@register_hook
def setup_environment(*, ctx: Any) -> None:
    """Called by Prefect when it is imported."""
    if "deployment" in sys.argv[1:3]:
        resolve_bare_names(ctx.logger_factory("prefect.rlhf"))


def resolve_bare_names(logger: logging.Logger) -> None:
    """Makes the client accept flow names. A client with another signature is left as it is, with a warning."""
    try:
        from prefect.client.orchestration import PrefectClient
        from prefect.client.schemas.filters import FlowFilter, FlowFilterName

        by_name = PrefectClient.read_deployment_by_name
        if not inspect.iscoroutinefunction(by_name) or list(inspect.signature(by_name).parameters) != ["self", "name"]:
            raise TypeError("read_deployment_by_name is not what it was")
    except Exception as e:
        logger.warning("this Prefect resolves no bare flow names (%s); write rlhf-pipeline/default", e)
        return

    @functools.wraps(by_name)
    async def read_deployment_by_name(self: Any, name: str) -> Any:
        if "/" not in name:
            flow = FlowFilter(name=FlowFilterName(any_=[name]))
            name = f"{name}/{choose(name, [d.name for d in await self.read_deployments(flow_filter=flow)])}"
        return await by_name(self, name)

    setattr(PrefectClient, "read_deployment_by_name", read_deployment_by_name)  # noqa: B010


def choose(flow: str, deployments: list[str]) -> str:
    """The only deployment or `default`. Several without a default end the command."""
    if len(deployments) == 1:
        return deployments[0]
    if "default" in deployments or not deployments:
        return "default"
    names = " or ".join(f"{flow}/{d}" for d in sorted(deployments))
    raise SystemExit(f"flow {flow} has several deployments: write {names}")
