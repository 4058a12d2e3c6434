"""Work pools of a Prefect server, and the deployments of `rlhf-worker` in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, WorkPoolFilter, WorkPoolFilterName
from prefect.context import SyncClientContext
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.recipe.model import Recipe, RecipeError
from stages.store.keys import without_userinfo

FLOW = "rlhf-worker"
ASK_SECONDS = 5.0
"""For an answer of Prefect: the thread that waits for it hears nothing else."""


@contextlib.contextmanager
def answering() -> Iterator[Any]:
    """A client that asks once and waits for seconds; else Prefect's tries for minutes."""
    # Of its own: inside of a flow Prefect takes that flow's client, which waits for a minute.
    own = {"timeout": ASK_SECONDS}
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: ASK_SECONDS}),
        SyncClientContext(httpx_settings=own) as context,
    ):
        yield context.client


def check_pools(recipe: Recipe) -> None:
    """Raises RecipeError for a pool that the Prefect server does not have, or that no deployment of `rlhf-worker` is
    in, or that takes fewer flow runs at a time than this run has workers in it; and for a store whose address holds a
    password, which Prefect would show."""
    settings = {} if recipe.workers is None else recipe.workers.named
    pools = {work: s.pool for work, s in settings.items() if s.pool is not None}
    if pools and without_userinfo(recipe.store) != recipe.store:
        raise RecipeError(
            "store: its address holds a password or token, which workers in pools would get as a visible parameter; "
            "give it by the environment of each host"
        )
    with get_client(sync_client=True) as client:
        for work, pool in pools.items():
            try:
                found = client.read_work_pool(pool)
            except ObjectNotFound:
                raise RecipeError(
                    f"workers.{work}.pool: the Prefect server {client.api_url} has no work pool {pool}; "
                    "`prefect work-pool ls` lists them"
                ) from None
            deployment_of(client, work, pool)
            sharing = sum(other == pool for other in pools.values())
            if found.concurrency_limit is not None and found.concurrency_limit < sharing:
                raise RecipeError(
                    f"workers.{work}.pool: pool {pool} runs {found.concurrency_limit} at a time, and this recipe has "
                    f"{sharing} workers in it"
                )


def deployment_of(client: Any, work: str, pool: str) -> Any:
    """The deployment of `rlhf-worker` in a pool. Raises RecipeError where there is none, or are several."""
    found = client.read_deployments(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[FLOW])),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
    )
    named = [deployment for deployment in found if deployment.name == pool] if len(found) > 1 else found
    if len(named) == 1:
        return named[0]
    if found:
        names = ", ".join(sorted(deployment.name for deployment in found))
        raise RecipeError(
            f"workers.{work}.pool: pool {pool} has several deployments of {FLOW} ({names}); call one of them {pool}"
        )
    raise RecipeError(
        f"workers.{work}.pool: pool {pool} has no deployment of {FLOW}; in the project's folder of its hosts: "
        f"`prefect deploy flows/worker.py:rlhf_worker --name {pool} --pool {pool}`"
    )
