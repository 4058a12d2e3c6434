"""Several HTTP servers used as one engine, with `load` and `run` of `engine.Engine`.

A server is used after it has reported the policy's weights and its log-probabilities have agreed with the trainer's
(R18). A lost server is waited for or restarted, and must prove its weights again; its unfinished requests go to the
next free server. With `Options.seeds` a sample's seed depends only on the request (R15); its bits also depend on the
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
from typing import Any, Literal

import httpx
import numpy as np

from rlhf.tuning.rollout.requests import Completion, Request
from rlhf.tuning.rollout.servers.kinds import ServerKind
from rlhf.tuning.rollout.servers.protocol import TAGS, Policy, ServerLost, ServerRefused, StalePolicy
from rlhf.tuning.rollout.servers.server import RemoteServer

Sync = Literal["auto", "transfer", "weights", "adapter", "restart", "none"]
Job = tuple[int, Request, int]
"""Index, request, number of servers that have lost it."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Use of servers; no option changes the distribution that is sampled from."""

    sync: Sync = "auto"
    """Way of new weights to servers. `auto`: by their own endpoints, or a restart of a child without them."""
    concurrency: int = 64
    """Requests at one server at a time."""
    tries: int = 4
    """Servers that a request may lose."""
    start_seconds: float = 900.0
    """Time for a started server to become healthy."""
    wait_seconds: float = 60.0
    """Time for a lost server to come back."""
    tolerance: float = 0.1
    """Largest mean absolute difference between a server's log-probabilities and the trainer's."""
    version: str | None = None
    """The version that servers must have, if they report one."""
    seeds: bool = False
    """Whether each request has its own seed."""


class StageEnded(RuntimeError):
    """A request has outlived its stage."""


UNUSABLE = (ServerLost, ServerRefused, StalePolicy)
"""Errors after which the other servers continue."""


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
        """Sample from this policy from now on.

        Raises StalePolicy, ServerRefused or ServerLost if no server gets it.
        """
        self._policy, self._dead, self.gaps = policy, {}, {}
        with concurrent.futures.ThreadPoolExecutor(len(self._servers)) as pool:
            prepared = [pool.submit(self._prepare, server, policy) for server in self._servers]
        for result in prepared:
            with contextlib.suppress(*UNUSABLE):
                result.result()
        if len(self._dead) == len(self._servers):
            raise list(self._dead.values())[-1]

    def close(self) -> None:
        """Leave the servers and the trainer to others until the next `load`: a request that still runs gets neither."""
        with self._trainer:
            self._policy = None

    def sleep(self) -> None:
        """As `close`, and have the servers give their GPUs' memory back; a server that fails to is ended."""
        self.close()
        # The next policy replaces all weights but those under an adapter.
        discard = self._options.sync != "adapter"

        def lay(server: RemoteServer) -> None:
            with server.lock:
                if server.asleep == TAGS:
                    return
                try:
                    if server.asleep:
                        raise ServerLost(f"{server.url} has woken up in part")
                    self._kind.sleep(server, discard)
                    server.asleep = list(TAGS)
                except UNUSABLE as e:
                    self._log(f"a server does not sleep, and is ended: {e}")
                    server.end()

        with concurrent.futures.ThreadPoolExecutor(len(self._servers)) as pool:
            list(pool.map(lay, self._servers))

    def _wake(self, server: RemoteServer, tag: str) -> None:
        if tag in server.asleep:
            self._kind.wake(server, tag)
            server.asleep.remove(tag)

    def check(self, request: Request) -> None:
        """Raise RefusedRequest for a request that servers of this kind cannot serve; RuntimeError without a policy."""
        self._body(request, self._loaded)

    def _body(self, request: Request, policy: Policy) -> dict[str, Any]:
        return self._kind.body(request, policy, self._options.seeds)

    @property
    def _loaded(self) -> Policy:
        if self._policy is None:
            raise RuntimeError("the engine has no policy; call load(policy) first")
        return self._policy

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (index, completions) of each request, as soon as all its samples have ended.

        Raises the error of the last server that is given up, and ServerLost for a request that lost `tries` servers.
        """
        policy = self._loaded
        bodies = [self._body(r, policy) for r in requests]
        jobs: asyncio.Queue[Job] = asyncio.Queue()
        results: asyncio.Queue[tuple[int, list[Completion]] | Exception] = asyncio.Queue()
        for i, request in enumerate(requests):
            jobs.put_nowait((i, request, 0))
        loop = asyncio.new_event_loop()
        # Each turn of an episode is a run of one request. Turns of a prompt begin with the server that has it cached.
        first = zlib.crc32(requests[0].name.encode()) % len(self._servers) if requests else 0
        tasks = [
            loop.create_task(self._drive(server, policy, bodies, jobs, results))
            for server in (*self._servers[first:], *self._servers[:first])
            if server not in self._dead
        ]
        if not tasks:
            results.put_nowait(list(self._dead.values())[-1])
        try:
            for _ in requests:
                result = loop.run_until_complete(results.get())
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            # A server ends a running request when its connection is closed.
            loop.run_until_complete(_cancel(tasks))
            loop.close()

    async def _drive(
        self, server: RemoteServer, policy: Policy, bodies: Sequence[Any], jobs: asyncio.Queue[Job], results: Any
    ) -> None:
        """Send jobs to one server, `concurrency` at a time, until it is given up or this task is cancelled."""
        losses = 0
        """Losses since its last answer."""
        while True:
            lost: list[Exception] = []
            proofs = server.proofs

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
                        index, request, tries = job[0], job[1], job[2] + 1
                        if tries < self._options.tries:
                            jobs.put_nowait((index, request, tries))
                        else:
                            who = request.name or request.counter
                            text = f"request {who} has lost its server {tries} times; the last: {e}"
                            results.put_nowait(ServerLost(text))
                    except Exception as e:
                        results.put_nowait(e)

            many = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            async with httpx.AsyncClient(limits=many, **server.options) as client:
                tasks = [asyncio.create_task(work(client)) for _ in range(min(self._options.concurrency, len(bodies)))]
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    # If one request has lost the server, all have. Idle workers must not take further jobs.
                    await _cancel(tasks)
            self._log(f"{lost[0]}\n  its prompts go to the next free server")
            losses += 1
            try:
                if losses == self._options.tries:
                    raise ServerLost(f"{server.url} was lost {losses} times without an answer; the last: {lost[0]}")
                await asyncio.to_thread(self._prepare, server, policy, proofs)
            except UNUSABLE as e:
                self._give_up(server, e)
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
        has = self._kind.answered_by(policy, answer)
        if has is None and self._kind.counted is not None:
            with contextlib.suppress(ServerRefused):
                named = await server.ask(client, self._kind.counted)
                has = self._kind.answered_by(policy, named)
        if has not in (None, policy.weights):
            raise StalePolicy(f"{server.url} was given policy {has} while it sampled from {policy.weights}")
        return completions

    def _completions(self, policy: Policy, request: Request, answer: Any) -> list[Completion]:
        """Return the samples of an answer. Raises ServerLost for ids that are not the policy's."""
        done = self._kind.completions(request, answer)
        largest = max(token for one in done for token in one.tokens)
        if policy.vocabulary is not None and largest >= policy.vocabulary:
            raise ServerLost(f"it gave the token id {largest}; the policy's are below {policy.vocabulary}")
        return done

    def _prepare(self, server: RemoteServer, policy: Policy, proofs: int | None = None) -> None:
        """Make a server healthy, give it the policy's weights, check its log-probabilities and record the gap.

        proofs: those of the server when the caller began to use it; if there are more by now, it is ready.
        Raises ServerLost, ServerRefused or StalePolicy for a server that is given up, and StageEnded after `close`.
        """
        began = time.monotonic()
        with server.lock:
            self._check(policy)
            if proofs not in (None, server.proofs):
                return
            # All requests that have lost it come here, one after another.
            if server in self._dead:
                raise self._dead[server]
            try:
                gap = self._proved(server, policy)
            except UNUSABLE as e:
                self._give_up(server, e)
                raise
            server.proofs += 1
        self.gaps[server.url] = gap
        self._log(
            f"{self._kind.name} at {server.url} has policy {policy.digest[:12]} after "
            f"{time.monotonic() - began:.1f} s; its log-probabilities are {gap:.2g} from the trainer's"
        )

    def _give_up(self, server: RemoteServer, error: Exception) -> None:
        if server not in self._dead:
            self._dead[server] = error
            self._log(f"a server is given up: {error}")

    def _proved(self, server: RemoteServer, policy: Policy) -> float:
        """Make a server healthy and give it the policy's weights; return its gap. Raises as `_prepare` does."""
        options = self._options
        fresh = server.child is not None and not server.answers()
        if fresh:
            self._start(server, policy)
        elif server.child is None:
            seconds = options.wait_seconds if self.gaps else options.start_seconds
            if not server.answers():
                self._log(f"waiting up to {seconds:g} s for {server.url} to become healthy")
            server.wait(seconds)
        self._check(policy)
        try:
            self._wake(server, "weights")
            return self._prove(server, policy)
        except UNUSABLE as e:
            if server.asleep:
                # Nobody knows which memory it has.
                server.end()
            if fresh or server.child is None or options.sync not in ("auto", "restart"):
                raise
            if options.sync != "restart":
                self._log(f"{e}\n  it is started again")
            self._start(server, policy)
            return self._prove(server, policy)

    def _check(self, policy: Policy) -> None:
        if self._policy is not policy:
            raise StageEnded(f"the stage of policy {policy.digest[:12]} has ended")

    def _start(self, server: RemoteServer, policy: Policy) -> None:
        """Start the child on the policy's folder, wait until it is healthy, and name its weights."""
        self._check(policy)
        server.start(policy.folder())
        assert server.child is not None
        self._log(f"{self._kind.name} starts at {server.url}; its log is {server.child.log}")
        server.wait(self._options.start_seconds)
        # A version without names of weights still has those of its start.
        with contextlib.suppress(ServerRefused):
            self._kind.label(server, policy)
        server.given = policy.weights

    def _prove(self, server: RemoteServer, policy: Policy) -> float:
        """Give a healthy server the weights if it lacks them; returns its gap to the trainer.

        Raises StalePolicy if it does not get them, or its gap exceeds the tolerance.
        """
        version, wanted = self._kind.version(server), self._options.version
        if wanted is not None and version not in (None, wanted):
            raise ServerRefused(f"{server.url} has {self._kind.name} {version}, and {wanted} was asked for")
        has = self._weights(server, policy)
        if has != policy.weights and not (has is None and self._options.sync == "none"):
            if self._options.sync in ("none", "restart"):
                raise _stale(server, policy, has, "sync does not change its weights")
            server.given = None
            self._kind.reload(server, policy)
            server.given = policy.weights
            has = self._weights(server, policy)
        if has not in (None, policy.weights):
            raise _stale(server, policy, has, "it has loaded the policy")
        self._wake(server, "kv_cache")
        if policy.adapter is not None:
            self._kind.adapt(server, policy, server.adapter)
            server.adapter = policy.digest
        gap = self._gap(server, policy)
        if not gap <= self._options.tolerance:
            raise _stale(
                server,
                policy,
                has,
                f"its log-probabilities are {gap:.2g} from the trainer's on average, and the tolerance is "
                f"{self._options.tolerance:g}; it has other weights, or reports log-probabilities before the "
                "temperature (vLLM: start it with --logprobs-mode processed_logprobs)",
            )
        return gap

    def _weights(self, server: RemoteServer, policy: Policy) -> str | None:
        """Return the name of a server's dense weights, None if unknown.

        A child that does not report it has the weights that it was last given: only this process uses it.
        """
        reported = self._kind.weights(server, policy)
        return server.given if reported is None and server.child is not None else reported

    def _gap(self, server: RemoteServer, policy: Policy) -> float:
        """Return the mean absolute difference to the trainer's log-probabilities over the policy's probe."""
        pairs, theirs = [], []
        for request in policy.probe:
            answer = server.post(self._kind.path, self._body(request, policy))
            for completion in self._completions(policy, request, answer):
                pairs.append((request.prompt, completion.tokens))
                theirs += completion.logps
        with self._trainer:
            self._check(policy)
            ours = policy.logps(pairs, policy.probe[0].sampling.temperature or 1.0)
        return float(np.mean(np.abs(np.concatenate([np.asarray(x, np.float64) for x in ours]) - np.asarray(theirs))))


def _stale(server: RemoteServer, policy: Policy, has: str | None, why: str) -> StalePolicy:
    says = f"says that it has policy {has}" if has else "does not say which policy it has"
    return StalePolicy(f"{server.url} {says}, wanted is {policy.weights}; nothing is sampled from it: {why}")


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
