"""Requests to an engine and its results: token ids in, token ids out. Imports no JAX, for clients of servers."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence

MAX_STOP_IDS = 16
"""Token ids that can end one request."""


class RefusedRequest(ValueError):
    """A request that this engine cannot serve; other requests are not affected."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Restrictions apply in this order, as in transformers: temperature, top_k, top_p, min_p."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """The fewest most probable tokens that hold this much probability (Holtzman et al., 2020)."""
    top_k: int = 0
    """The most probable tokens; 0 for all."""
    min_p: float = 0.0
    """Tokens at least this probable, as a share of the most probable one (Nguyen et al., 2024)."""

    def __post_init__(self) -> None:
        in_range = {
            "temperature": 0 <= self.temperature < math.inf,
            "top_p": 0 < self.top_p <= 1,
            # Engines hold it in 32 bits.
            "top_k": 0 <= self.top_k < 2**31,
            "min_p": 0 <= self.min_p <= 1,
        }
        for name, good in in_range.items():
            if not good:
                raise ValueError(f"Sampling.{name} is {getattr(self, name)}, out of its range")


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled completion, as recorded (R3)."""

    tokens: list[int]
    """Token ids, the EOS that ended it included."""
    logps: list[float]
    """log mu of each token, under the distribution sampled from."""
    stop: str
    """`eos`; `length` when `max_tokens` cut it off; `string`; `cancelled`."""
    top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    """For each token the most probable ids with their log-probabilities, if the engine records them."""
    routing: bytes | None = None
    """With `Request.routing`, the experts of a mixture that all tokens of prompt and completion but the last took,
    [tokens, layers, experts of a token] of `DecoderConfig.expert_type`."""


@dataclasses.dataclass
class Update:
    """The tokens that one step of an engine added to one sample of a request.

    Not frozen: a step makes one for each row, and each field of a frozen one takes a call.
    """

    number: int
    sample: int
    tokens: list[int]
    logps: list[float]
    completion: Completion | None
    """The entire sample, once it has ended; None before."""
    top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    """For each of `tokens`, as in `Completion.top`."""


@dataclasses.dataclass(frozen=True)
class Request:
    """`samples` completions of one prompt.

    Raises RefusedRequest for values that no engine accepts.
    """

    prompt: Sequence[int]
    """Token ids: a list, or of many tokens `rlhf.tuning.columns.Numbers`, which holds no object for each."""
    max_tokens: int
    """The longest completion in tokens, EOS included."""
    sampling: Sampling = Sampling()
    """How tokens are chosen."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end a completion, and are its last."""
    seed: int = 0
    """Randomness depends on it, on `counter`, on the numbers of sample and token, on nothing else (R15)."""
    counter: int = 0
    samples: int = 1
    find_stop: Callable[[Sequence[int]], int | None] | None = None
    """Tokens so far -> how many of them to keep if their text holds a stop string, else None."""
    name: str = ""
    """Name of the prompt, for errors."""
    after: int | None = None
    """Number of an ended request with `keep` whose prompt and completion begin this prompt: this request takes over
    the cache of that one, and in slots also its slot."""
    keep: bool = False
    """Whether the slot of its single sample stays reserved at its end, for a request `after` it or until
    `Engine.release`."""
    routing: bool = False
    """Whether its completions record their experts."""

    def __post_init__(self) -> None:
        who = f"request {self.name or self.counter}"
        if not len(self.prompt):
            raise RefusedRequest(f"{who} has an empty prompt; a model needs at least one token, such as its BOS")
        if self.max_tokens < 1 or self.samples < 1:
            raise RefusedRequest(f"{who}: max_tokens is {self.max_tokens}, samples {self.samples}; both are 1 or more")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise RefusedRequest(f"{who} has {len(self.stop_ids)} stop ids; at most {MAX_STOP_IDS}: use find_stop")
        # Engines hold token ids in 32 bits.
        if strange := [t for t in self.stop_ids if not 0 <= t < 2**31]:
            raise RefusedRequest(f"{who}: {strange[0]} among its stop ids is not a token id")

    def same_prompt(self, other: Request) -> bool:
        """Whether both have the same prompt."""
        mine, its = self.prompt, other.prompt
        return mine is its or (len(mine) == len(its) and all(map(operator.eq, mine, its)))

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt with its longest completion."""
        return len(self.prompt) + self.max_tokens


def stop_strings(
    decode: Callable[[Sequence[int]], str], strings: Sequence[str]
) -> Callable[[Sequence[int]], int | None]:
    """A `find_stop` for texts: keeps the fewest tokens with a text that holds one of `strings`.

    `decode` turns token ids into text. The kept text includes the string; the caller removes it.
    """

    def find(tokens: Sequence[int]) -> int | None:
        def holds(count: int) -> bool:
            text = decode(tokens[:count])
            return any(s in text for s in strings)

        if not holds(len(tokens)):
            return None
        # Binary search: a text that holds a string holds it with more tokens too.
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle + 1, high)
        return low

    return find
