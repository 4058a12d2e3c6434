"""Check before a run that the environment and the tools of a recipe exist and accept their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.stages.contract import signatures
from rlhf.stages.sampling.environment import PREFIXES, Environment
from rlhf.tuning.names import nearest


def check(environment: Environment) -> None:
    """Raise ValueError with the setting for a missing environment or tool, or one that does not accept its arguments.

    Executes no code of the user, and does not look up names that packages and servers register.
    """
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
    # One of the first three makes a class play like gymnasium's; all four are the adapter's.
    adapter = OWN if any(text_actions(arguments, n) for n in ("renderer", "parser", "actions")) else ()
    rest = [n for n in arguments if n not in adapter]
    signatures.check_arguments(parameters, rest, "environment.arguments", name)
    # A parameter `task` gets the prompt's row.
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
        raise ValueError(f"environment.tools: unknown tool {name!r}; {hint}")
    if parameters is not None:
        where = f"environment.tool_arguments.{function}"
        signatures.check_arguments(parameters, arguments.get(function, {}), where, name)
