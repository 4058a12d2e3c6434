"""TextArena's games of one player."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.tuning.agents.adapters.step_environment import Adapted, Result


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
