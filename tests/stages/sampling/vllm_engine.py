"""What `rlhf_weights.routes` asks of vLLM's engine, over this project's engine: pauses, a name, and one worker."""

from __future__ import annotations

import asyncio
from typing import Any

from tuning.rollout.engine.staged import Layout, Staged, Unfit, take, weights_of
from tuning.rollout.inside.rlhf_weights.arriving import Arriving, PushRefused
from tuning.rollout.inside.rlhf_weights.frames import BrokenBucket, Piece


class Worker:
    """The methods of `rlhf_weights.vllm.Worker`; what has come is held until the push is whole."""

    def __init__(self, live: Any):
        self._live = live
        self._push: tuple[Arriving, Staged] | None = None
        self._given: str | None = None
        self._last: tuple[str, str] | None = None
        self._ended: tuple[str, bool] | None = None
        self._layout = live.look(lambda engine, _: Layout(engine.config, weights_of(engine)))

    def rlhf_told(self) -> dict[str, Any]:
        dtype = next(iter(self._layout.kinds.values())).dtype
        return {"dtype": dtype, "tied": True, "fingerprint": None if self._push else self._given, "compared": 0}

    def rlhf_begin(self, number: str, policy: str, tied: bool) -> dict[str, Any]:
        self._end()
        self._push = Arriving(number, policy), Staged(self._layout)
        return {}

    def rlhf_add(self, number: str, bucket: bytes) -> dict[str, Any]:
        if self._push is None or self._push[0].number != number:
            return {"refused": "there is no such push: another one began, or it was given up", "status": 404}
        try:
            for name, kind, data in self._push[0].add(bucket):
                self._push[1].write(Piece(name, kind, 0, kind.shape[0]), memoryview(data))
        except BrokenBucket as error:
            return {"refused": str(error), "status": 400}
        except (PushRefused, Unfit) as error:
            self._end()
            return {"refused": str(error), "status": 400}
        return {}

    def rlhf_commit(self, number: str, fingerprint: str) -> dict[str, Any]:
        if self._push is None and self._last is not None and (number, fingerprint) == (self._last[0], self._given):
            return {"policy": self._last[1], "again": True}
        assert self._push is not None
        arriving, staged = self._push
        try:
            arriving.check(fingerprint)
            state = staged.state()
        except (PushRefused, Unfit) as error:
            self._end()
            return {"refused": str(error), "status": 400}
        self._live.look(lambda engine, _: take(engine, self._layout, state))
        self._push, self._given, self._last = None, fingerprint, (number, arriving.policy)
        return {"policy": arriving.policy}

    def rlhf_drop(self, number: str | None = None) -> dict[str, Any]:
        if self._push is not None and number in (None, self._push[0].number):
            self._end()
        if number is None:
            self._given = None
        return {"intact": number is not None and self._ended == (number, True)}

    def _end(self) -> None:
        if self._push is not None:
            arriving, self._push = self._push[0], None
            self._ended = arriving.number, not arriving.given
            if arriving.given:
                self._given = None


class Client:
    """vLLM's `EngineClient`, as far as a push goes."""

    def __init__(self, state: Any):
        self._state, self._worker = state, Worker(state.live)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [await asyncio.to_thread(getattr(self._worker, method), *args)]

    async def pause_generation(self, *, mode: str) -> None:
        assert mode == "wait"
        self._state.running.clear()

    async def resume_generation(self) -> None:
        self._state.running.set()

    async def is_paused(self) -> bool:
        return not self._state.running.is_set()

    async def reset_prefix_cache(self, *, reset_connector: bool) -> bool:
        assert not reset_connector
        # vLLM's refuses while a request has keys and values.
        return not self._state.running.is_set()

    async def update_weight_version(self, version: str) -> None:
        self._state.version = version

    async def get_weight_version(self) -> str:
        version: str = self._state.version
        return version
