"""Whether the environment and the tools of a recipe are there and take their arguments, told before a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.stages.contract import signatures
from rlhf.stages.sampling.environment import PREFIXES, Environment
from rlhf.tuning.names import nearest


def check(environment: Environment) -> None:
    """Raises ValueError, naming the setting, for an environment or a tool that is not there, or does not take its
    arguments. Nothing of the user's is executed; what packages and servers register is not looked up."""
    kind, colon, _ = (environment.name or "").partition(":")
    if environment.name and not colon:
        _check_built_in(environment.name, environment.arguments)
    elif environment.name and kind not in PREFIXES:
        _check_own(environment.name, environment.arguments)
    for name in environment.tools:
        _check_tool(name, environment.tool_arguments)


def _check_built_in(name: str, arguments: Mapping[str, Any]) -> None:
    from rlhf.tuning.agents.adapters import built_in

    try:
        made = built_in(name)
    except ValueError as e:
        raise ValueError(f"environment.name: {e}") from e
    signatures.check_arguments(signatures.of_callable(made), arguments, "environment.arguments", name)
    try:
        made(**arguments)
    except (TypeError, ValueError) as e:
        raise ValueError(f"environment.arguments: {e}") from e


def _check_own(name: str, arguments: Mapping[str, Any]) -> None:
    from rlhf.tuning.agents.adapters.gym import OWN, text_actions

    parameters = signatures.of_name(name, "environment.name", "class")
    if parameters is None:
        return
    # With one of the first three a class is played as gymnasium's are, and all four are the adapter's.
    adapter = OWN if any(text_actions(arguments, n) for n in ("renderer", "parser", "actions")) else ()
    rest = [n for n in arguments if n not in adapter]
    signatures.check_arguments(parameters, rest, "environment.arguments", name)
    # A class that wants the task gets the prompt's row.
    signatures.check_required(parameters, rest, "environment.arguments", name, ["task"])


def _check_tool(name: str, arguments: Mapping[str, Mapping[str, Any]]) -> None:
    from rlhf.tuning.agents.tools import BUILT_IN

    kind, colon, function = name.partition(":")
    if kind == "mcp" and colon:
        return
    if colon:
        parameters = signatures.of_name(name, "environment.tools")
    elif name in BUILT_IN:
        parameters, function = signatures.of_callable(BUILT_IN[name]), name
    else:
        hint = nearest(name, BUILT_IN, "module:function, mcp:COMMAND or mcp:URL")
        raise ValueError(f"environment.tools: no tool {name!r}; {hint}")
    if parameters is not None:
        where = f"environment.tool_arguments.{function}"
        signatures.check_arguments(parameters, arguments.get(function, {}), where, name)
