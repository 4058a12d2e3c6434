"""A new policy over HTTP, a bucket at a time: staged beside the one in use, and swapped in whole between requests.

    GET  /weights                what is held: policy, fingerprint, config, and each tensor's type and shape
    POST /weights                begins a push: {"policy": name, "config": ..., "push": ID} -> {"push": ID}
    POST /weights/ID             a bucket (`tuning.rollout.inside.rlhf_weights.frames`)
    POST /weights/ID/commit      {"fingerprint": of all tensors}: swapped in, once the requests under way have ended
    DELETE /weights/ID           gives the push up

What was asked last may be asked again, where its answer was lost: it is done once.
Until the commit answers, and wherever a push breaks, the old policy answers; but an engine that has dropped it for one
that its devices do not take stops. The push that was begun last is the one
that counts: those before it are told so. The fingerprint is computed from what the engine holds.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import secrets
import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field

from stages.serving.server import Server
from tuning.rollout.inside.rlhf_weights.frames import BUCKET_BYTES, HEAD, HEADER_BYTES, first_difference, opened

if TYPE_CHECKING:
    from tuning.rollout.engine.staged import Layout, Staged

SILENT_SECONDS = 60.0
"""A push that brings nothing for so long is given up, and its memory."""
READING_SECONDS = 20.0
"""How long GET /weights waits for weights that another request reads or swaps."""
BODY_BYTES = BUCKET_BYTES + HEADER_BYTES
"""The body of a bucket, at most."""


class NotTaken(RuntimeError):
    """This server takes no weights."""


class PushEnded(RuntimeError):
    """There is no such push: another one began, it was given up, or the server has started again."""


class PushBusy(RuntimeError):
    """A policy is being swapped in, or weights are being read: ask again behind that."""


class Begun(BaseModel):
    """POST /weights."""

    model_config = ConfigDict(extra="forbid")
    policy: Annotated[str, Field(min_length=1, max_length=256)]
    """Its name."""
    config: dict[str, Any]
    """Its model's config, as GET /weights tells this server's."""
    push: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = None
    """The push's ID; null: the server chooses one."""


class Committed(BaseModel):
    """POST /weights/ID/commit."""

    model_config = ConfigDict(extra="forbid")
    fingerprint: str
    """`frames.Fingerprint` of what was sent."""


@dataclasses.dataclass(eq=False)
class _Push:
    name: str
    staged: Staged | None
    id: str
    touched: float = dataclasses.field(default_factory=time.monotonic)
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)
    arriving: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    """Held while a bucket's body is in memory."""
    before: bytes = b""
    """The head of the bucket before."""
    answer: concurrent.futures.Future[dict[str, Any]] | None = None
    """Of its commit."""


class Pushes:
    """The pushes to one server. Methods block, and may be called from any thread."""

    def __init__(
        self,
        server: Server,
        taken: bool = True,
        silent_seconds: float = SILENT_SECONDS,
        reading_seconds: float = READING_SECONDS,
    ):
        """taken: whether weights are taken at all, or only told of."""
        self._server, self.taken, self._silent, self._patience = server, taken, silent_seconds, reading_seconds
        self._lock = threading.Lock()
        self._now: _Push | None = None
        self._last: _Push | None = None
        """The one that was committed last."""
        self._layout: Layout | None = None
        self._reading = threading.Lock()
        """Held while weights are read or swapped: those that are read would stay in memory beside the next."""
        self._print: tuple[int, str] | None = None
        """Generation and fingerprint."""

    def told(self) -> dict[str, Any]:
        """GET /weights. The first call behind a swap reads all weights.

        Raises PushBusy where others read or swap them for longer than `READING_SECONDS`.
        """
        config, weights, dtype = self._server.live.look(_about)
        about = {"dtype": dtype, "config": config, "bucket_bytes": BUCKET_BYTES, "taken": self.taken}
        if not weights.dense:
            # No tensor can be read again as it came.
            return about | {"policy": self._server.policy, "fingerprint": None, "tensors": None}
        layout = self._layout_of()
        tensors = {name: [kind.dtype, list(kind.shape)] for name, kind in layout.kinds.items()}
        name, found = self._held(layout, self._patience)
        return about | {"policy": name, "fingerprint": found, "tensors": tensors}

    def _held(self, layout: Layout, patience: float = -1) -> tuple[str | None, str]:
        """Name and fingerprint of what the engine holds. patience: seconds to wait for others, -1 for any number."""
        from tuning.rollout.engine.staged import weights_of

        # While a swap waits for the requests under way nothing needs to be read.
        known = self._print
        if known is not None and known[0] == self._server.live.generation:
            return self._server.policies.get(known[0]), known[1]
        if not self._reading.acquire(timeout=patience):
            raise PushBusy("the weights are being read, or others are swapped in: ask again")
        try:
            generation, state = self._server.live.look(lambda engine, at: (at, weights_of(engine).now[1]))
            if self._print is None or self._print[0] != generation:
                self._print = generation, layout.fingerprint(state)
            return self._server.policies.get(generation), self._print[1]
        finally:
            self._reading.release()

    def _layout_of(self) -> Layout:
        from tuning.rollout.engine.staged import Layout, weights_of

        if self._layout is None:
            self._layout = Layout(*self._server.live.look(lambda engine, _: (engine.config, weights_of(engine))))
        return self._layout

    def begin(self, asked: Begun) -> dict[str, str]:
        """Begins a push, in place of one that is under way."""
        if not self.taken:
            raise NotTaken("this server takes no weights: start it with --take-weights")
        from tuning.rollout.engine.staged import Staged

        ours = self._server.live.look(_about)[0]
        other = first_difference(ours, asked.config)
        if other is not None:
            raise ValueError(
                f"config.{other} is {asked.config.get(other)!r}, and {ours.get(other)!r} in the model that is served: "
                "a server takes policies of its own model alone"
            )
        layout = self._layout_of()
        with self._lock:
            if self._now is not None and self._now.id == asked.push:
                return {"push": self._now.id}
            if self._last is not None and self._last.answer is not None and not self._last.answer.done():
                raise PushBusy(f"policy {self._last.name} is being swapped in: begin again")
            self._end_now()
            push = self._now = _Push(asked.policy, Staged(layout), asked.push or secrets.token_hex(16))
        threading.Thread(target=self._watch, args=(push,), name="push", daemon=True).start()
        return {"push": push.id}

    def arriving(self, number: str) -> asyncio.Lock:
        """What a bucket of a push holds while its body is in memory. Raises PushEnded; does not block."""
        return self._one(number).arriving

    def add(self, number: str, bucket: bytes) -> None:
        """Stages a bucket."""
        pieces, head = opened(bucket), bucket[: HEAD.size]
        with self._lock:
            push = self._one(number)
            assert push.staged is not None
            for piece, data in pieces if head != push.before else ():
                push.staged.write(piece, data)
            push.before, push.touched = head, time.monotonic()

    def commit(self, number: str, asked: Committed) -> dict[str, Any]:
        """Swaps a push in whose tensors are all there and are those that were sent. Asked again, the same answer."""
        with self._lock:
            push, mine = self._last, False
            if push is None or push.id != number:
                push, mine = self._one(number), True
                self._now, self._last = None, push
                push.answer = concurrent.futures.Future()
                push.ended.set()
        assert push.answer is not None
        if mine:
            try:
                push.answer.set_result(self._swapped(push, asked.fingerprint))
            except Exception as error:
                push.answer.set_exception(_alone(error))
        return push.answer.result()

    def _swapped(self, push: _Push, fingerprint: str) -> dict[str, Any]:
        from tuning.rollout.engine.staged import WeightsLost, take

        assert push.staged is not None
        staged, push.staged, layout = push.staged, None, self._layout_of()
        states = [staged.state()]
        del staged

        def swap(engine: Any, generation: int) -> None:
            try:
                take(engine, layout, states.pop())
            except WeightsLost as error:
                self._server.policies[generation - 1] = None
                print(f"push {push.id} of policy {push.name}: {error}", file=sys.stderr, flush=True)
                raise
            self._server.policies[generation] = push.name

        try:
            found = layout.fingerprint(states[0])
            if found != fingerprint:
                raise ValueError(
                    f"the fingerprint of what came is {found[:12]}, that of what was sent {fingerprint[:12]}: the old "
                    "policy stays; push it again"
                )
            with self._reading:
                self._server.live.swap(swap)
        finally:
            # An order that the engine never came to would hold it.
            states.clear()
        name, found = self._held(layout)
        return {"policy": name, "fingerprint": found}

    def drop(self, number: str) -> None:
        """Gives a push up."""
        with self._lock:
            self._one(number)
            self._end_now()

    def _one(self, number: str) -> _Push:
        now = self._now
        if now is None or now.id != number:
            raise PushEnded(
                "there is no such push: another one began, it was silent for too long, or the server has started "
                "again; the old policy stays"
            )
        return now

    def _end_now(self) -> None:
        if self._now is not None:
            self._now.ended.set()
            self._now.staged = None
            self._now = None

    def _watch(self, push: _Push) -> None:
        """Gives a push up whose client has left."""
        while (left := push.touched + self._silent - time.monotonic()) > 0:
            if push.ended.wait(left):
                return
        with self._lock:
            if self._now is push:
                self._end_now()


def _alone(error: Exception) -> Exception:
    """An error that is kept, without the frames that it came through: they hold the policy that was staged."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def _about(engine: Any, generation: int) -> tuple[dict[str, Any], Any, str]:
    """(config as JSON has it, weights, type of matrices) of an engine."""
    from tuning.rollout.engine.staged import weights_of

    weights = weights_of(engine)
    return json.loads(json.dumps(dataclasses.asdict(engine.config))), weights, weights.dtype


def add_routes(app: Any, pushes: Pushes) -> None:
    """The routes of weights. Threads do the work: no stream of others waits for it."""

    @app.get("/weights")
    def weights() -> Any:
        return pushes.told()

    @app.post("/weights")
    def begin(asked: Begun) -> Any:
        return pushes.begin(asked)

    @app.post("/weights/{number}")
    async def bucket(number: str, http: Request) -> Any:
        await asyncio.to_thread(pushes.add, number, await http.body())
        return {}

    @app.post("/weights/{number}/commit")
    def commit(number: str, asked: Committed) -> Any:
        return pushes.commit(number, asked)

    @app.delete("/weights/{number}")
    def drop(number: str) -> Any:
        pushes.drop(number)
        return {}
