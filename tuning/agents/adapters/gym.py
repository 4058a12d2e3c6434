"""gymnasium's environments with text: a renderer of observations and a parser of actions.

Arguments of the recipe that are not the environment's own:

    renderer   module:function of (environment, observation) -> text; by default the text of render_mode `ansi`, or the
               observation as JSON
    parser     module:function of (text, environment) -> action, or None for a text without one; by default the last
               action in the text, by its number or its name
    actions    names of the actions in order, if the environment has no `get_action_meanings`
    options    for `reset`

`Arena` has TextArena's games of one player.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf.tuning.agents.adapters.step_environment import (
    Adapted,
    Result,
    Stepped,
    number,
    parts_of,
    reset_arguments,
    worded,
)
from rlhf.tuning.allowed import check_module
from rlhf.tuning.names import function_of


class Arena(Adapted):
    """A game of TextArena's registry for one player.

    Games of several players are refused: each seat has its own rewards and private observations, and a trajectory has
    one seat.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._name, self._arguments = name, dict(arguments)
        self._game: Any = None

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Make the game and begin it. Raises ValueError for a game of several players."""
        import textarena

        self._game = textarena.make(self._name, **self._arguments)
        # A game refuses other numbers of players.
        try:
            self._game.reset(num_players=1, seed=seed)
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"textarena:{self._name} cannot begin with one player ({error}); an episode is played by one: "
                "name a wrapper with an opponent (module:Class)"
            ) from error
        return self._observed(), {}

    def step(self, text: str) -> Result:
        done, info = self._game.step(text)
        info = dict(info or {})
        if not done:
            return self._observed(), 0.0, False, False, info
        rewards, game_info = self._game.close()
        own = (game_info or {}).get(0, {})
        reason = own.get("reason") if isinstance(own, Mapping) else None
        return reason, float((rewards or {}).get(0, 0.0)), True, False, {**info, "reason": reason}

    def _observed(self) -> str:
        return str(self._game.get_observation()[1])


OWN = ("renderer", "parser", "actions", "options")
# A coloured piece of a text marks a place on a terminal; brackets mark it here.
_COLOURED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def text_actions(arguments: Mapping[str, Any], name: str) -> bool:
    """Whether an argument of a custom class is the adapter's: the class may have arguments of these names too."""
    value = arguments.get(name)
    return isinstance(value, list) if name == "actions" else isinstance(value, str) and ":" in value


def made(name: str, arguments: Mapping[str, Any]) -> Any:
    """Make an environment of gymnasium's registry, ID or MODULE:ID, with `ansi` if it has that.

    Raises the errors of gymnasium.make, and NotAllowed.
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
    """An environment with actions that are not text."""

    def __init__(
        self, make: Callable[[Mapping[str, Any], Mapping[str, Any]], Any], arguments: Mapping[str, Any]
    ) -> None:
        own = {name: arguments[name] for name in OWN if name in arguments}
        rest = {name: value for name, value in arguments.items() if name not in OWN}
        super().__init__(lambda row: make(row, rest))
        self._state: dict[str, Any] = {}
        self._options, self._names = own.get("options"), own.get("actions")
        self._render: Callable[..., Any] = function_of(own["renderer"]) if "renderer" in own else shown
        self._parse: Callable[..., Any] | None = function_of(own["parser"]) if "parser" in own else None

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        self.environment = self._make(row)
        method = self.environment.reset
        given = reset_arguments(method, seed, row)
        if self._options is not None:
            given["options"] = self._options
        value = self.wait(method(**given))
        # A reset may make the space of actions.
        self._actions = Actions(self.environment, self._names)
        if self._parse is None:
            self._actions.check()
        raw, info = value if isinstance(value, tuple) else (value, {})
        return self._render(self.environment, raw), self._with_state(raw, info or {})

    def step(self, text: str) -> Result:
        """Step with the action in a text; answer a text without one, which changes nothing."""
        action = self._actions.parse(text) if self._parse is None else self._parse(text, self.environment)
        if action is None:
            answer = f"No action found. {self._actions.expected}"
            return answer, 0.0, False, False, {"valid": False, **self._state}
        value = self.wait(self.environment.step(action))
        # The observation need not be JSON: the renderer reads it.
        raw, reward, terminated, truncated, info = parts_of(value, self.environment)
        info = self._with_state(raw, {"action": self._actions.named(action), "valid": True, **info})
        return self._render(self.environment, raw), reward, terminated, truncated, info

    def _with_state(self, observation: Any, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the info with the observation as the state for anchors, unless the environment has another.

        Turns without an action have the same state.
        """
        with contextlib.suppress(TypeError):
            info = {"state": json.loads(json.dumps(observation, default=number)), **info}
        self._state = {"state": info["state"]} if "state" in info else {}
        return dict(info)


def shown(environment: Any, observation: Any) -> str:
    """Return the text that the environment renders, else the observation as JSON."""
    if getattr(environment, "render_mode", None) == "ansi" and isinstance(text := environment.render(), str):
        return _COLOUR.sub("", _COLOURED.sub(r"[\1]", text)).strip("\n")
    return str(worded(observation))


class Actions:
    """The actions of an environment's space, by number and by name."""

    def __init__(self, environment: Any, names: list[str] | None) -> None:
        space = getattr(environment, "action_space", None)
        self._space = space
        self._count, self._start = int(getattr(space, "n", 0)), int(getattr(space, "start", 0))
        self._names = (
            [str(name) for name in names or _names_of(environment, self._count)] if hasattr(space, "n") else []
        )
        # The longest first: of `up left` and `up` the whole one is meant.
        listed = sorted((re.escape(name) for name in self._names), key=len, reverse=True)
        self._pattern = re.compile(rf"(?<![\w.-])(?:{'|'.join([*listed, r'-?[0-9]+'])})(?![\w-])", re.IGNORECASE)

    @property
    def _is_text(self) -> bool:
        return self._space is None or type(self._space).__name__ == "Text"

    def check(self) -> None:
        """Raise ValueError if `parse` cannot read an action, or `actions` has another number of names."""
        if not self._is_text and not hasattr(self._space, "n"):
            raise ValueError(
                f"the environment's actions are {self._space}: an argument `parser: module:function` is needed, which "
                "makes an action of (text, environment)"
            )
        if self._names and len(self._names) != self._count:
            raise ValueError(f"actions has {len(self._names)} names: expected {self._count}")

    def parse(self, text: str) -> Any:
        """Return the last action in the text; None without one."""
        if self._is_text:
            return text
        found = self._pattern.findall(text)
        if not found:
            return None
        last, names = found[-1].lower(), [name.lower() for name in self._names]
        # More digits are no action anywhere, and Python refuses very long ones.
        number = self._start + names.index(last) if last in names else int(last[:9])
        return number if self._start <= number < self._start + self._count else None

    @property
    def expected(self) -> str:
        """The answers that a policy may give, in words."""
        if self._names:
            return f"Answer with one of: {', '.join(self._names)}."
        if hasattr(self._space, "n"):
            return f"Answer with a number from {self._start} to {self._start + self._count - 1}."
        return "Answer with an action."

    def named(self, action: Any) -> Any:
        """Return the name of an action; the action itself without one."""
        place = action - self._start if isinstance(action, int) else -1
        return self._names[place] if 0 <= place < len(self._names) else action


def _names_of(environment: Any, count: int) -> Sequence[Any]:
    """Return the names of `count` actions in order; none if the environment has none."""
    inner = getattr(environment, "unwrapped", environment)
    if callable(meanings := getattr(inner, "get_action_meanings", None)):
        return list(meanings())
    enumeration = getattr(inner, "actions", None)
    if isinstance(enumeration, type) and issubclass(enumeration, enum.IntEnum):
        return [member.name for member in sorted(enumeration)][:count]
    # gymnasium's own games have constants for them, such as LEFT, DOWN, RIGHT and UP.
    constants = vars(sys.modules[type(inner).__module__])
    named = {v: k.lower() for k, v in constants.items() if k.isupper() and isinstance(v, int) and v < count}
    return [named[n] for n in range(count)] if sorted(named) == list(range(count)) else []
