"""Batches of requests, for `Engine` and `Replicas`."""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterator, Sequence

from flax import nnx

from rlhf.tuning.rollout.requests import Completion, Request, Sampling, Update


class Batches(abc.ABC):
    """Runs a batch of requests with `submit` and `step`."""

    @property
    @abc.abstractmethod
    def idle(self) -> bool:
        """Whether nothing waits or runs."""

    @property
    def broken(self) -> bool:
        """Whether one of several engines has failed twice in a row, while others may succeed."""
        return False

    @abc.abstractmethod
    def load(self, params: nnx.State) -> None:
        """Samples from these parameters from now on, runs in progress too. Compiles nothing new."""

    @abc.abstractmethod
    def submit(self, request: Request) -> int:
        """Queues a request and returns its number.

        Raises RefusedRequest, with the request's name, if it exceeds the model's positions or this engine's memory.
        """

    @abc.abstractmethod
    def step(self) -> list[Update]:
        """Decodes some tokens; returns one update for each sample that has got tokens or ended."""

    @abc.abstractmethod
    def _open(self, requests: Sequence[Request]) -> None:
        """Prepares for a batch. Raises RefusedRequest."""

    @abc.abstractmethod
    def _close(self, numbers: Collection[int]) -> None:
        """Ends the requests of a batch that have not ended."""

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Completion]]]:
        """(index, completions) of each request, as soon as the last of its samples has ended.

        On an idle engine the result is bit for bit independent of earlier requests: slots start empty.
        """
        index: dict[int, int] = {}
        ended: dict[int, dict[int, Completion]] = {}
        self._open(requests)
        try:
            for i, request in enumerate(requests):
                index[self.submit(request)] = i
            while not self.idle:
                for update in self.step():
                    if update.completion is None or update.number not in index:
                        continue
                    by_sample = ended.setdefault(update.number, {})
                    by_sample[update.sample] = update.completion
                    number = index[update.number]
                    if len(by_sample) == requests[number].samples:
                        # Not kept: a round has far more completions than are under way.
                        del ended[update.number]
                        yield number, [by_sample.pop(s) for s in range(len(by_sample))]
        finally:
            # A caller that closes the generator early must find the engine idle.
            self._close(index)

    def generate(
        self,
        params: nnx.State,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        max_tokens: int,
        sampling: Sampling,
        eos_ids: Sequence[int],
        seed: int,
        counters: Sequence[int],
    ) -> list[list[Completion]]:
        """`samples` completions of each prompt; `counters` are the prompts' places in the random stream.

        Raises RefusedRequest if a prompt with `max_tokens` exceeds the model's positions.
        """
        self.load(params)
        eos = tuple(eos_ids)
        requests = [
            Request(p, max_tokens, sampling, eos, seed, c, samples) for p, c in zip(prompts, counters, strict=True)
        ]
        completions = dict(self.run(requests))
        return [completions[i] for i in range(len(requests))]
