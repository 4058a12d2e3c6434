"""`rlhf mcp`: an agent asks about a store over the Model Context Protocol."""

import asyncio
import json

import pytest
from mcp import Client, StdioServerParameters

from tests.support import RLHF


def test_an_agent_reads_a_run(smoke_store):
    async def ask():
        async with Client(
            StdioServerParameters(command=str(RLHF), args=["mcp", "--store", str(smoke_store)])
        ) as client:
            tools = [tool.name for tool in (await client.list_tools()).tools]

            async def call(name, **arguments):
                result = await client.call_tool(name, arguments)
                return result.is_error, result.content[0].text

            return tools, [
                await call("runs"),
                await call("recipe", run="smoke"),
                await call("scores", run="first"),
                await call("rounds", run="first"),
                await call("steps", run="first", node="sft"),
                await call("samples", run="first", round=0, most=4),
                await call("answers", run="first", policy="rl", most=3),
                await call("nodes", run="first"),
                await call("diff", first="first", second="first"),
                await call("scores", run="nobody"),
            ]

    tools, (runs, recipe, scores, rounds, steps, samples, answers, nodes, diff, missing) = asyncio.run(ask())
    assert tools == ["runs", "recipe", "nodes", "scores", "rounds", "steps", "samples", "answers", "diff"]
    found = (runs, recipe, scores, rounds, steps, samples, answers, nodes, diff)
    assert [error for error, _ in found] == [False] * len(found), found
    assert "first,smoke,finished" in runs[1] and json.loads(recipe[1])["name"] == "smoke"
    assert {line.partition(",")[0] for line in scores[1].splitlines()[1:]} == {"base", "sft", "rl"}
    assert len(rounds[1].splitlines()) == 1 + 3 and len(steps[1].splitlines()) == 1 + 9
    assert "prompt,answer,text,stop,total" in samples[1] and "prompt,answer,text,stop,score" in answers[1]
    assert "round-002.update" in nodes[1] and json.loads(diff[1])["settings"] == []
    assert missing[0] and "no run or recipe 'nobody'" in missing[1]


@pytest.mark.parametrize("words", [["mcp", "--store", "/nowhere"]])
def test_a_store_that_is_not_there_is_refused(rlhf_here, words):
    assert "no store at /nowhere" in rlhf_here(*words, code=2).stderr
