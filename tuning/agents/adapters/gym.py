"""gymnasium's environments with text: a renderer of observations and a parser of actions.

Arguments of the recipe that are not the environment's own:

    renderer   module:function of (environment, observation) -> text; else what render_mode `ansi` shows, else the
               observation as JSON
    parser     module:function of (text, environment) -> action, or None where the text holds none; else the last
               action in the text, by its number or its name
    actions    names of the actions in order, where the environment does not tell them
    options    for `reset`
"""

from __future__ import annotations

import enum
import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rlhf.tuning.agents.adapters.step_environment import (
    Result,
    Stepped,
    first_of,
    number,
    reset_arguments,
    result_of,
    worded,
)
from rlhf.tuning.allowed import check_module
from rlhf.tuning.names import function_of

OWN = ("renderer", "parser", "actions", "options")
# A coloured piece of a text: a terminal's way to mark a place, which is brackets here.
_COLOURED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def text_actions(arguments: Mapping[str, Any], name: str) -> bool:
    """Whether an argument of a class of one's own is the adapter's: a class may have arguments of these names too."""
    value = arguments.get(name)
    return isinstance(value, list) if name == "actions" else isinstance(value, str) and ":" in value


def made(name: str, arguments: Mapping[str, Any]) -> Any:
    """The environment of gymnasium's registry, ID or MODULE:ID, with `ansi` where it has that.

    Raises what gymnasium.make raises, and NotAllowed.
    """
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    given = dict(arguments)
    module, _, identifier = name.rpartition(":")
    if module:
        # It registers the id.
        check_module(module)
        importlib.import_module(module)
    spec = gymnasium.spec(identifier)
    creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    if "ansi" in (getattr(creator, "metadata", None) or {}).get("render_modes", ()):
        given.setdefault("render_mode", "ansi")
    return gymnasium.make(identifier, **given)


class Gym(Stepped):
    """An environment whose actions are no text."""

    def __init__(
        self, make: Callable[[Mapping[str, Any], Mapping[str, Any]], Any], arguments: Mapping[str, Any]
    ) -> None:
        own = {name: arguments[name] for name in OWN if name in arguments}
        rest = {name: value for name, value in arguments.items() if name not in OWN}
        super().__init__(lambda row: make(row, rest))
        self._at: dict[str, Any] = {}
        self._options = own.get("options")
        self._names: list[str] | None = own.get("actions")
        self._render: Callable[..., Any] = function_of(own["renderer"]) if "renderer" in own else shown
        self._parse: Callable[..., Any] | None = function_of(own["parser"]) if "parser" in own else None

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Makes the environment and begins its episode."""
        self.environment = self._make(row)
        method = self.environment.reset
        given = reset_arguments(method, seed, row)
        if self._options is not None:
            given["options"] = self._options
        value = self.wait(method(**given))
        raw = value[0] if isinstance(value, tuple) else value
        if self._parse is None:
            self._parse = parser_of(self.environment, self._names)
        _, info = first_of((None, value[1])) if isinstance(value, tuple) else (None, {})
        return self._render(self.environment, raw), self._told({**_state(raw), **info})

    def step(self, text: str) -> Result:
        """Steps with the action in a text; without one nothing happens but an answer that says so."""
        assert self._parse is not None
        action = self._parse(text, self.environment)
        if action is None:
            # Nothing has moved: the next turn begins where this one did.
            told = {"valid": False, **self._at}
            return f"No action found. {expected(self.environment, self._names)}", 0.0, False, False, told
        value = self.wait(self.environment.step(action))
        if not isinstance(value, tuple) or len(value) not in (4, 5):
            # Raises the TypeError that says what is expected.
            return result_of(value, self.environment)
        raw = value[0]
        _, reward, terminated, truncated, info = result_of((None, *value[1:]), self.environment)
        told = {"action": _named(action, self.environment, self._names), "valid": True, **_state(raw), **info}
        self._told(told)
        return self._render(self.environment, raw), reward, terminated, truncated, told

    def _told(self, info: dict[str, Any]) -> dict[str, Any]:
        """The same info; its state is kept for turns without an action."""
        self._at = {"state": info["state"]} if "state" in info else {}
        return info


def shown(environment: Any, observation: Any) -> str:
    """What the environment renders as text, else the observation as JSON."""
    if getattr(environment, "render_mode", None) == "ansi" and isinstance(text := environment.render(), str):
        return _COLOUR.sub("", _COLOURED.sub(r"[\1]", text)).strip("\n")
    return str(worded(observation))


def names_of(environment: Any, given: list[str] | None) -> list[str]:
    """Names of the actions in order; empty where nobody tells them."""
    space = getattr(environment, "action_space", None)
    count = int(getattr(space, "n", 0))
    if given:
        return [str(name) for name in given]
    inner = getattr(environment, "unwrapped", environment)
    if callable(meanings := getattr(inner, "get_action_meanings", None)):
        return [str(name) for name in meanings()]
    actions = getattr(inner, "actions", None)
    if isinstance(actions, type) and issubclass(actions, enum.IntEnum):
        return [member.name for member in sorted(actions)][:count]
    # gymnasium's own games have constants for them, such as LEFT, DOWN, RIGHT and UP.
    constants = vars(sys.modules[type(inner).__module__])
    named = {v: k.lower() for k, v in constants.items() if k.isupper() and isinstance(v, int) and v < count}
    return [named[n] for n in range(count)] if sorted(named) == list(range(count)) and count else []


def parser_of(environment: Any, given: list[str] | None) -> Callable[[str, Any], Any]:
    """The parser of a space of actions. Raises ValueError where it needs one of the user's."""
    space: Any = getattr(environment, "action_space", None)
    if type(space).__name__ == "Text" or space is None:
        return lambda text, _: text
    if not hasattr(space, "n"):
        raise ValueError(
            f"actions of {type(environment).__name__} are {space}: an argument `parser: module:function` is needed, "
            "which makes an action of (text, environment)"
        )
    start, count = int(getattr(space, "start", 0)), int(space.n)
    names = [name.lower() for name in names_of(environment, given)]
    if names and len(names) != count:
        raise ValueError(f"actions has {len(names)} names: expected {count}")
    # The longest first: of `up left` and `up` the whole one is meant.
    listed = sorted((re.escape(name) for name in names), key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w.-])(?:{'|'.join([*listed, r'-?[0-9]+'])})(?![\w-])", re.IGNORECASE)

    def parse(text: str, _: Any) -> int | None:
        found = pattern.findall(text)
        if not found:
            return None
        last = found[-1].lower()
        # More digits are no action anywhere, and Python refuses very long ones.
        number = start + names.index(last) if last in names else int(last[:9])
        return number if start <= number < start + count else None

    return parse


def expected(environment: Any, given: list[str] | None) -> str:
    """What the policy may answer, in words."""
    space: Any = getattr(environment, "action_space", None)
    names = names_of(environment, given) if hasattr(space, "n") else []
    if names:
        return f"Answer with one of: {', '.join(names)}."
    if hasattr(space, "n"):
        start = int(getattr(space, "start", 0))
        return f"Answer with a number from {start} to {start + int(space.n) - 1}."
    return "Answer with an action."


def _named(action: Any, environment: Any, given: list[str] | None) -> Any:
    names = names_of(environment, given) if isinstance(action, int) else []
    start = int(getattr(getattr(environment, "action_space", None), "start", 0))
    return names[action - start] if names and 0 <= action - start < len(names) else action


def _state(observation: Any) -> dict[str, Any]:
    """The observation as the state for anchors, unless the environment tells another."""
    try:
        return {"state": json.loads(json.dumps(observation, default=number))}
    except TypeError:
        return {}
