"""`rlhf mcp`: a store as tools of the Model Context Protocol, so that an agent can ask about runs. It only reads.

    claude mcp add rlhf -- rlhf mcp --store /path/to/store

The tools are the methods of `rlhf.open` (`rlhf.flows.client`), with frames as CSV.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from rlhf.flows.client import OpenStore
from rlhf.flows.records import find_run
from rlhf.flows.report.comparison import compare
from rlhf.flows.report.run_view import RunView
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.keys import published

MOST_ROWS = 200
CELL = 2000
"""Longest text in characters."""


def make_server(url: str) -> Any:
    """Return the server of a store. Raises ImportError without the extra `agents`."""
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError as e:
        raise ImportError("rlhf mcp needs the package mcp: pip install 'rlhf-pipeline[agents]'") from e
    store, place = OpenStore(url), Store(url)
    server = MCPServer("rlhf", instructions="Runs of a post-training pipeline: begin with `runs`, then ask for one.")

    def tool(function: Callable[..., str]) -> None:
        @functools.wraps(function)
        def answer(**arguments: Any) -> str:
            try:
                return function(**arguments)
            except (ArtifactError, OSError, KeyError, ValueError) as e:
                raise ToolError(str(e)) from e

        server.tool()(answer)

    @tool
    def runs(newest: int = 50) -> str:
        """List the newest runs: recipe, status, times, stages made and cached, held-out scores by policy."""
        return _csv(store.runs().tail(newest))

    @tool
    def recipe(run: str) -> str:
        """Return the resolved recipe of a run (a name, or a recipe's name for its newest run) as JSON."""
        return json.dumps(published(find_run(place, run)["recipe"]))

    @tool
    def nodes(run: str) -> str:
        """List the stages of a run with state, seconds and metrics; a failed one has its error."""
        return _csv(store.run(run).nodes())

    @tool
    def scores(run: str) -> str:
        """Return the evaluations of a run: score with its 95 % interval, pass@k, lengths, for each policy."""
        return _csv(store.run(run).scores())

    @tool
    def rounds(run: str) -> str:
        """Return the measures of each round of RL: reward, KL, entropy, clipping, lengths and others."""
        return _csv(store.run(run).rounds())

    @tool
    def steps(run: str, node: str) -> str:
        """Return the metrics of the steps of a stage that trains, such as sft; of many, evenly chosen ones."""
        frame = store.run(run).steps(node)
        return _csv(frame.iloc[:: -(-len(frame) // MOST_ROWS) or 1])

    @tool
    def samples(run: str, round: int, most: int = 10) -> str:
        """Return completions of a round with their rewards, the best and the worst first."""
        frame = store.run(run).samples(round).dropna(subset="total").sort_values("total")
        half = max(1, most // 2)
        chosen = frame if len(frame) <= most else frame.iloc[[*range(half), *range(-half, 0)]]
        return _csv(chosen[[c for c in ("prompt", "answer", "text", "stop", "total") if c in chosen]])

    @tool
    def answers(run: str, policy: str, most: int = 20) -> str:
        """Return held-out completions of an evaluated policy (base, sft, rl) with the judge's scores."""
        frame = store.run(run).answers(policy).head(most)
        return _csv(frame[[c for c in ("prompt", "answer", "text", "stop", "score") if c in frame]])

    @tool
    def diff(first: str, second: str) -> str:
        """Compare two runs: settings, data, code, metrics, and paired differences of the evaluations, as JSON."""
        return json.dumps(compare(*(RunView(place, find_run(place, name)) for name in (first, second))), default=str)

    return server


def _csv(frame: Any) -> str:
    """Return a frame of at most MOST_ROWS rows as CSV, with long texts cut."""
    more = f"\n({len(frame) - MOST_ROWS} more rows)" if len(frame) > MOST_ROWS else ""
    texts = frame.head(MOST_ROWS).map(lambda value: value[:CELL] if isinstance(value, str) else value)
    return str(texts.to_csv()) + more
