"""Several HTTP servers used as one engine, with `load` and `run` as `engine.Engine` has them.

No sample is taken from a server before it has reported the policy's weights and its log-probabilities have agreed with
the trainer's (R18). A lost server is waited for, or started again, and must prove its weights again; its unfinished
requests go to the next free server. A sample's seed depends on the request alone (R15); its bits also depend on the
batch in which the server computed it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import httpx
import numpy as np

from rlhf.tuning.rollout.requests import Completion, Request
from rlhf.tuning.rollout.servers.protocol import Policy, ServerKind, ServerLost, ServerRefused, StalePolicy
from rlhf.tuning.rollout.servers.server import RemoteServer

Sync = Literal["auto", "transfer", "weights", "adapter", "restart", "none"]
T = TypeVar("T")
Job = tuple[int, Request, int]
"""Index, request, number of servers that lost it so far."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How servers are used; none of it changes the distribution that is sampled from."""

    sync: Sync = "auto"
    """How they get new weights. `auto`: by their own endpoints; a child that has none is restarted."""
    concurrency: int = 64
    """Requests at one server at a time."""
    tries: int = 4
    """How often a request is given to a server that is then lost."""
    start_seconds: float = 900.0
    """Time for a started server to become healthy."""
    wait_seconds: float = 60.0
    """Time for a lost server to come back."""
    tolerance: float = 0.1
    """Largest mean absolute difference between a server's log-probabilities and the trainer's."""
    version: str | None = None
    """The version that servers must have, if they report one."""


class Fleet:
    """Samples with servers of one kind. Not thread-safe."""

    def __init__(
        self,
        kind: ServerKind,
        servers: Sequence[RemoteServer],
        options: Options,
        log: Callable[[str], None] = lambda line: None,
    ):
        self._kind, self._servers, self._options, self._log = kind, servers, options, log
        self._policy: Policy | None = None
        self._dead: dict[RemoteServer, Exception] = {}
        self._trainer = threading.Lock()
        self.gaps: dict[str, float] = {}
        """By URL, the mean absolute difference of log-probabilities when the server last proved its weights."""

    def load(self, policy: Policy) -> None:
        """Samples from this policy from now on.

        Raises StalePolicy, ServerRefused or ServerLost where no server can be brought to have it.
        """
        self._policy = policy
        self._dead, self.gaps = {}, {}
        with concurrent.futures.ThreadPoolExecutor(len(self._servers)) as pool:
            prepared = {server: pool.submit(self._prepare, server) for server in self._servers}
        for server, result in prepared.items():
            error = result.exception()
            if error is not None and not isinstance(error, ServerLost | ServerRefused | StalePolicy):
                raise error
            if isinstance(error, Exception):
                self._dead[server] = error
        if len(self._dead) == len(self._servers):
            raise list(self._dead.values())[-1]
        for error in self._dead.values():
            self._log(f"going on without a server: {error}")

    def check(self, request: Request) -> None:
        """Raises RefusedRequest for a request that servers of this kind cannot serve. RuntimeError without a policy."""
        self._kind.body(request, self._loaded)

    @property
    def _loaded(self) -> Policy:
        if self._policy is None:
            raise RuntimeError("the engine has no policy; call load(policy) first")
        return self._policy

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Completion]]]:
        """(index, completions) of each request, as soon as all its samples have ended.

        Raises what `load` raises when the last server is given up, and ServerLost for a request that lost `tries`
        servers.
        """
        policy = self._loaded
        bodies = [self._kind.body(r, policy) for r in requests]
        jobs: asyncio.Queue[Job] = asyncio.Queue()
        results: asyncio.Queue[tuple[int, list[Completion]] | Exception] = asyncio.Queue()
        for i, request in enumerate(requests):
            jobs.put_nowait((i, request, 0))
        loop = asyncio.new_event_loop()
        tasks: list[asyncio.Task[None]] = []

        # Each turn of an episode is a run of one request: turns of one prompt begin with the server that has it cached.
        first = zlib.crc32(requests[0].name.encode()) % len(self._servers) if requests else 0

        async def begin() -> None:
            for server in (*self._servers[first:], *self._servers[:first]):
                if server not in self._dead:
                    tasks.append(asyncio.create_task(self._drive(server, policy, bodies, jobs, results)))

        async def end() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        try:
            loop.run_until_complete(begin())
            for _ in requests:
                result = loop.run_until_complete(results.get())
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            # Closing the connection of a request in flight makes its server end it.
            loop.run_until_complete(end())
            loop.close()

    async def _drive(
        self, server: RemoteServer, policy: Policy, bodies: Sequence[Any], jobs: asyncio.Queue[Job], results: Any
    ) -> None:
        """Sends jobs to one server, `concurrency` at a time, until it is given up or the caller cancels this task."""
        losses = 0
        """How often it was lost since its last answer."""
        while True:
            lost: list[Exception] = []

            async def work(client: httpx.AsyncClient, lost: list[Exception] = lost) -> None:
                nonlocal losses
                while not lost:
                    job = await jobs.get()
                    try:
                        results.put_nowait((job[0], await self._sample(client, server, policy, job[1], bodies[job[0]])))
                        losses = 0
                    except asyncio.CancelledError:
                        jobs.put_nowait(job)
                        raise
                    except (ServerLost, StalePolicy) as e:
                        lost.append(e)
                        self._again(job, e, jobs, results)
                    except Exception as e:
                        results.put_nowait(e)

            many = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            async with httpx.AsyncClient(limits=many, **server.options) as client:
                tasks = [asyncio.create_task(work(client)) for _ in range(self._options.concurrency)]
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    # One request that lost the server means that all have. Idle workers must not take further jobs.
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
            self._log(f"{lost[0]}\n  its prompts go to the next free server")
            losses += 1
            try:
                if losses == self._options.tries:
                    raise ServerLost(f"{server.url} was lost {losses} times without an answer; the last: {lost[0]}")
                await asyncio.to_thread(self._prepare, server)
            except (ServerLost, ServerRefused, StalePolicy) as e:
                self._dead[server] = e
                self._log(f"a server is given up: {e}")
                if len(self._dead) == len(self._servers):
                    results.put_nowait(e)
                return
            except Exception as e:
                results.put_nowait(e)
                return

    async def _sample(
        self, client: httpx.AsyncClient, server: RemoteServer, policy: Policy, request: Request, body: Any
    ) -> list[Completion]:
        answer = await server.ask(client, self._kind.path, body)
        try:
            completions = self._completions(policy, request, answer)
        except ServerLost as e:
            raise ServerLost(f"{server.url}, request {request.name or request.counter}: {e}") from e
        has = _understood(server, lambda: self._kind.answered_by(policy, answer))
        if has is None and self._kind.counted is not None:
            with contextlib.suppress(ServerRefused):
                named = await server.ask(client, self._kind.counted)
                has = _understood(server, lambda: self._kind.answered_by(policy, named))
        if has not in (None, policy.weights):
            raise StalePolicy(f"{server.url} was given policy {has} while it sampled from {policy.weights}")
        return completions

    def _completions(self, policy: Policy, request: Request, answer: Any) -> list[Completion]:
        """The samples of an answer. Raises ServerLost for one with ids that the policy has not."""
        done = self._kind.completions(request, answer)
        largest = max(token for one in done for token in one.tokens)
        if policy.vocabulary is not None and largest >= policy.vocabulary:
            raise ServerLost(f"it gave the token id {largest}; the policy's are below {policy.vocabulary}")
        return done

    def _again(self, job: Job, error: Exception, jobs: asyncio.Queue[Job], results: Any) -> None:
        index, request, tries = job
        if tries + 1 < self._options.tries:
            jobs.put_nowait((index, request, tries + 1))
        else:
            who = request.name or request.counter
            results.put_nowait(ServerLost(f"request {who} has lost its server {tries + 1} times; the last: {error}"))

    def _prepare(self, server: RemoteServer) -> None:
        """Makes a server healthy, gives it the policy's weights and checks its log-probabilities; records the gap.

        Raises ServerLost, ServerRefused or StalePolicy.
        """
        policy, options, began = self._policy, self._options, time.monotonic()
        assert policy is not None
        with server.lock:
            fresh = server.child is not None and not server.answers()
            if fresh:
                self._start(server, policy)
            elif server.child is None:
                server.wait(options.wait_seconds if self.gaps else options.start_seconds)
            try:
                gap = self._prove(server, policy)
            except (ServerLost, ServerRefused, StalePolicy) as e:
                if fresh or server.child is None or options.sync not in ("auto", "restart"):
                    raise
                if options.sync != "restart":
                    self._log(f"{e}\n  it is started again")
                self._start(server, policy)
                gap = self._prove(server, policy)
        self.gaps[server.url] = gap
        self._log(
            f"{self._kind.name} at {server.url} has policy {policy.digest[:12]} after "
            f"{time.monotonic() - began:.1f} s; its log-probabilities are {gap:.2g} from the trainer's"
        )

    def _start(self, server: RemoteServer, policy: Policy) -> None:
        """Starts the child on the policy's folder and waits until it is healthy."""
        server.start(policy.folder())
        server.wait(self._options.start_seconds)
        server.given = server.started_on = policy.weights

    def _prove(self, server: RemoteServer, policy: Policy) -> float:
        """Gives a healthy server the weights if it lacks them; returns its gap to the trainer.

        Raises StalePolicy if it cannot have them, or its gap exceeds the tolerance.
        """
        version, wanted = _understood(server, lambda: self._kind.version(server)), self._options.version
        if wanted is not None and version not in (None, wanted):
            raise ServerRefused(f"{server.url} has {self._kind.name} {version}, and {wanted} was asked for")
        has = self._weights(server, policy)
        if server.started_on == policy.weights and has != policy.weights:
            self._kind.label(server, policy)
            has = self._weights(server, policy)
        elif has != policy.weights and not (has is None and self._options.sync == "none"):
            if self._options.sync in ("none", "restart"):
                raise self._stale(server, has, "its weights are not changed from here")
            server.started_on = server.given = None
            self._kind.reload(server, policy)
            server.given = policy.weights
            has = self._weights(server, policy)
        if has not in (None, policy.weights):
            raise self._stale(server, has, "it was told to load it")
        if policy.adapter is not None:
            self._kind.adapt(server, policy, server.adapter)
            server.adapter = policy.digest
        gap = self._gap(server, policy)
        if not gap <= self._options.tolerance:
            raise self._stale(
                server,
                has,
                f"its log-probabilities are {gap:.2g} from the trainer's on average and {self._options.tolerance:g} is "
                "let pass; it has other weights, or reports those before the temperature (vLLM: start it with "
                "--logprobs-mode processed_logprobs)",
            )
        return gap

    def _weights(self, server: RemoteServer, policy: Policy) -> str | None:
        """Name of the dense weights that a server has, None if unknown.

        A child that does not report it has those it was last given: it is on loopback, and only this process uses it.
        """
        reported = _understood(server, lambda: self._kind.weights(server, policy))
        return server.given if reported is None and server.child is not None else reported

    def _stale(self, server: RemoteServer, has: str | None, why: str) -> StalePolicy:
        assert self._policy is not None
        says = f"says that it has policy {has}" if has else "does not say which policy it has"
        return StalePolicy(f"{server.url} {says}, wanted is {self._policy.weights}; nothing is sampled from it: {why}")

    def _gap(self, server: RemoteServer, policy: Policy) -> float:
        """Mean absolute difference of log-probabilities between a server and the trainer, over the policy's probe."""
        pairs, theirs = [], []
        for request in policy.probe:
            answer = server.post(self._kind.path, self._kind.body(request, policy))
            for completion in self._completions(policy, request, answer):
                pairs.append((request.prompt, completion.tokens))
                theirs += completion.logps
        with self._trainer:
            ours = policy.logps(pairs, policy.probe[0].sampling.temperature or 1.0)
        return float(np.mean(np.abs(np.concatenate([np.asarray(x, np.float64) for x in ours]) - np.asarray(theirs))))


def _understood(server: RemoteServer, read: Callable[[], T]) -> T:
    """What is read from a server's answer. Raises ServerLost for one of another form."""
    try:
        return read()
    except (AttributeError, KeyError, TypeError, IndexError) as e:
        raise ServerLost(f"{server.url} gave an answer of no known form ({type(e).__name__}: {e})") from e
