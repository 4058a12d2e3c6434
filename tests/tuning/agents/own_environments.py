"""Environments and tools as a user would write them, and ones that go wrong."""

import asyncio
import contextlib
import ctypes
import os
import random
import time
import types
from typing import Literal

import numpy as np


class Dice:
    """Draws from the global generators, as GEM's and TextArena's games do."""

    def __init__(self, sides: int = 1000) -> None:
        self.sides = sides

    def reset(self, *, seed):
        return f"{random.randrange(self.sides)} {np.random.randint(self.sides)}", {"state": [seed]}

    def step(self, action):
        thrown = random.randrange(self.sides) + np.random.randint(self.sides)
        return f"{action}: {thrown}", float(thrown), thrown % 7 == 0, False, {"action": action}


class Asynchronous(Dice):
    """The same with coroutines."""

    async def reset(self, *, seed):
        await asyncio.sleep(0)
        return super().reset(seed=seed)

    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)


class Faulty:
    """Goes wrong as its first action says, or at reset as its argument says."""

    def __init__(self, at_reset: str = "", closed: str = "") -> None:
        self.at_reset, self.closed = at_reset, closed

    def reset(self, *, seed):
        return self.step(self.at_reset)[0], {}

    def step(self, action):
        if action == "sleep":
            time.sleep(600)
        if action == "spin in c":
            # Holds the interpreter's lock: no signal handler of Python runs.
            ctypes.PyDLL(None).pause()
        if action == "raise":
            raise RuntimeError("no such room")
        if action == "exit":
            os._exit(3)
        if action == "nan":
            return "", float("nan"), False, False, {}
        if action == "tuple":
            return "", 1.0
        return action, 0.0, action == "end", False, {}

    def close(self):
        if self.closed:
            open(self.closed, "w").close()


class Odd:
    """Answers with observations and flags at the edge of the contract."""

    def reset(self, *, seed):
        return [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "two"}], {}

    def step(self, action):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        observation: object = {
            "surrogate": "file \udcff.txt",
            "assistant": [{"role": "assistant", "content": "no"}],
            "none": [{"role": "user"}],
            "parts": [{"role": "user", "content": parts}],
            "image": [{"role": "user", "content": [{"type": "image"}]}],
        }.get(action, "ok")
        success = {"one": 1, "real": 0.0, "numpy": np.bool_(True), "word": "yes", "many": 2}.get(action)
        return observation, 1.0, False, False, {"success": success, "state": {"name \udcff": "x"}}


class Older:
    """Tunix' and rLLM's contract: the task at construction, a tuple of four."""

    def __init__(self, task: dict, *, bonus: float = 0.0) -> None:
        self.task, self.bonus = task, bonus

    def reset(self):
        return {"question": self.task["question"]}, {"level": 1}

    def step(self, action):
        return "", float(action == self.task["answer"]) + self.bonus, True, {"right": self.task["answer"]}


class Steps:
    """GRL's contract: `reset(seed)`, objects."""

    def reset(self, seed):
        self.place = seed
        return types.SimpleNamespace(state=f"at {self.place}", info={})

    def step(self, action):
        self.place += int(action)
        flags = {"terminated": self.place > 9, "truncated": self.place < 0}
        return types.SimpleNamespace(state=f"at {self.place}", reward=0.5, info={"place": self.place}, **flags)


class Counter:
    """TRL's environment class, as its guide shows one."""

    def __init__(self):
        self.count = 0

    def reset(self, start: int = 0, **kwargs) -> str | None:
        self.count = start
        return f"\nThe counter is at {start}."

    def add(self, amount: int, twice: bool = False) -> str:
        """Adds to the counter.

        Args:
            amount: How much to add.
            twice: Whether to add it two times.

        Returns:
            What the counter says.
        """
        if amount < 0:
            raise ValueError("the counter only grows")
        self.count += amount * (1 + twice)
        return f"The counter is at {self.count}."

    async def wait(self, seconds: float) -> str:
        """Waits.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return "waited"

    def _secret(self):
        return 1

    async def get_reward(self) -> float:
        return self.count / 10


class Shop:
    """TRL's methods, and a constructor that wants the task."""

    def __init__(self, task):
        self.left = task["budget"]

    def reset(self):
        return f" The budget is {self.left}."

    def buy(self, price: int) -> str:
        """Buys.

        Args:
            price: What it costs.
        """
        self.left -= price
        return f"{self.left} left"

    @classmethod
    def currency(cls) -> str:
        """Names the currency."""
        return "euro"

    @staticmethod
    def helper(x):
        return x

    def get_reward(self):
        return self.left


class Attribute:
    """TRL's older examples: no get_reward, the reward function reads `reward`."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs):
        return None

    def press(self) -> dict:
        """Presses the button."""
        self.reward = 1.0
        return {"pressed": True}


def shout(text: str, times: int = 1) -> str:
    """Writes in capitals.

    Args:
        text: What to write.
        times: How often.
    """
    return " ".join([text.upper()] * times)


def unanswered() -> str:
    """A tool whose own request gets no answer."""
    raise TimeoutError("the service did not answer")


async def unanswered_later() -> str:
    """The same, awaited."""
    raise TimeoutError("the service did not answer")


async def doze(seconds: float) -> str:
    """Waits, and lets others go on.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "awake"


def stall(seconds: float) -> str:
    """Waits without a word.

    Args:
        seconds: How long.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(Exception):
            time.sleep(0.01)
    return "done"


def choose(
    way: str,
    kind: Literal["a", "b"],
    sizes: list[int],
    more: dict[str, float],
    then: int | None = None,
    some: bool = True,
) -> list[str]:
    """Chooses among several.

    In two paragraphs, which say
    what it is for.

    Args:
        way: Where to go, one of
            several ways. (choices: ["left", "right"])
        kind: Which kind: a or b.
        sizes: How large.
        more: Further numbers.
        then: What next.
        some: Whether some
            are enough.

    Returns:
        What was chosen.
    """
    return [way, kind, str(sizes), str(more), str(then), str(some)]


def untold(thing):
    return thing


def first_letter(text, environment):
    """A parser."""
    return {"l": 0, "d": 1, "r": 2, "u": 3}.get(text[:1])


class Walk:
    """Makes its actions in the reset, and steps to a mapping or an object, as OpenEnv's clients do."""

    def __init__(self, form):
        self.form, self.place = form, 0

    def reset(self, *, seed):
        self.action_space = types.SimpleNamespace(n=2)
        return 0

    def step(self, action):
        self.place += 1 if action else -1
        values = {"observation": self.place, "reward": 0.5, "done": False}
        return values if self.form == "mapping" else types.SimpleNamespace(**values)


def seen(environment, observation):
    """A renderer."""
    return f"square {observation}"
