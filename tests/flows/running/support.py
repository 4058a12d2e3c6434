"""Nodes that a test makes when it wants to, in place of stages."""

import threading
import types

from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.running.session import Session

ALL = ["workers.train={}", "workers.sample={}", "workers.score={}", "workers.data={}"]
EXACT = "rl.score.rewards.model.function=exact_match"


def recipe(folder, *sets):
    return load_recipe("smoke", sets=[f"store={folder / 'store'}", *sets])


NOTHING = types.SimpleNamespace(metrics={})
"""An artifact of which only the metrics are asked."""


class Told:
    """Makes the nodes of a session when the test says so: each is known by when it was begun and ended."""

    def __init__(self, session: Session):
        self.session, self.order = session, list[str]()
        self.at_work: dict[str, tuple[threading.Event, list[BaseException]]] = {}
        self.changed = threading.Condition()

    def make(self, name: str) -> None:
        go, errors = threading.Event(), list[BaseException]()
        with self.changed:
            self.order.append(name)
            self.at_work[name] = go, errors
            self.changed.notify_all()
        while not go.wait(0.02):
            if self.session.is_stopped:
                errors.append(InterruptedError(name))
                break
        if not errors:
            self.session.made[name] = NOTHING  # type: ignore[assignment]
        with self.changed:
            del self.at_work[name]
            self.changed.notify_all()
        if errors:
            raise errors[0]

    def until(self, *names: str) -> None:
        """Waits until exactly these are at work."""
        with self.changed:
            assert self.changed.wait_for(lambda: set(self.at_work) == set(names), 20), (names, list(self.at_work))

    def one_by_one(self, *names: str) -> None:
        for name in names:
            self.until(name)
            self.end(name)

    def end(self, name: str, error: BaseException | None = None) -> None:
        go, errors = self.at_work[name]
        if error is not None:
            errors.append(error)
        go.set()
