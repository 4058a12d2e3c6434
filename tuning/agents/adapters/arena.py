"""TextArena's games of one player."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.tuning.agents.adapters.step_environment import Result


class Arena:
    """A game of TextArena's registry for one player.

    One of several is refused: seats have rewards and private observations of their own, which one trajectory does not.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._name, self._arguments = name, dict(arguments)
        self._game: Any = None

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return []

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Makes the game and begins it. Raises ValueError for a game of several players."""
        import textarena

        self._game = textarena.make(self._name, **self._arguments)
        # A game says how many it is for by refusing the others.
        try:
            self._game.reset(num_players=1, seed=seed)
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"textarena:{self._name} cannot begin with one player ({error}); an episode is played by one: "
                "name a wrapper with an opponent (module:Class)"
            ) from error
        return self._observed(), {}

    def step(self, text: str) -> Result:
        """Gives the game a move."""
        done, info = self._game.step(text)
        told = dict(info or {})
        if not done:
            return self._observed(), 0.0, False, False, told
        rewards, game_info = self._game.close()
        own = (game_info or {}).get(0, {})
        reason = own.get("reason") if isinstance(own, Mapping) else None
        return reason, float((rewards or {}).get(0, 0.0)), True, False, {**told, "reason": reason}

    def finish(self) -> Result:
        """A game that is cut has no reward."""
        return None, 0.0, False, True, {}

    def close(self) -> None:
        """A game is closed with its last step."""

    def _observed(self) -> str:
        return str(self._game.get_observation()[1])
