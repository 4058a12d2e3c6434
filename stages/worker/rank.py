"""A rank of a gang that is not its lead: runs the stages that the lead gives it, and keeps nothing of what they write.

It ends when its lead does. Its output is its log: that of the lead, where the lead has started it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from stages.common.compilation import configure_jax, use_precision
from stages.contract.place import place_of
from stages.worker import channel, distributed, joining, loaded, places
from stages.worker.channel import Channel, Message
from stages.worker.gang import BEAT_SECONDS, GRACE_SECONDS, TICK_SECONDS
from stages.worker.parent import die_with_parent
from stages.worker.process import inputs_of, is_compiling, name_new, names_kept, settings_of
from stages.worker.protocol import Request
from tuning import ranks


class Abandoned(RuntimeError):
    """The lead has ended the stage."""


class Member:
    """This process in its gang. It is a rank's `tuning.ranks.Ranks`."""

    def __init__(self, rank: int, opened: Channel, wait: float):
        """Waits for the welcome, so many seconds. Raises Refused, EOFError or OSError where none comes."""
        self.rank = rank
        first = opened.receive(wait)
        if first is None:
            raise EOFError("the lead has ended")
        channel.check_taken(first)
        self.sent_home = "bye" in first
        if self.sent_home:
            return
        self.size = int(first["welcome"]["ranks"])
        self.coordinator = str(first["welcome"]["coordinator"])
        self.orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        """What the main thread does: run, go, named and bye."""
        self._channel = opened
        self._silence = 2 * float(first["welcome"]["silence"]) + GRACE_SECONDS
        self._quiet = 0.0
        self._changed = threading.Condition()
        # By the number of the request and of the share within it. The lead may be one request ahead of the main thread.
        self._shared: dict[tuple[int, int], Any] = {}
        self._number = self._count = 0
        self._asked, self._abandoned = 0, -1
        self._left = threading.Event()
        self._status = joining.AGAIN
        """The exit status where the main thread does not come to an end."""
        for target in (self._read, self._watch, self._beat):
            threading.Thread(target=target, name=f"rank{target.__name__}", daemon=True).start()

    def _read(self) -> None:
        for message in self._channel:
            self._quiet = 0.0
            with self._changed:
                if "share" in message:
                    self._shared[message["request"], message["share"]] = message["value"]
                elif "stacks" in message:
                    print(f"rank {self.rank}: what its threads do, for the lead", file=sys.stderr, flush=True)
                    faulthandler.dump_traceback(all_threads=True)
                elif "beat" not in message:
                    self._asked = message["request"] if "run" in message else self._asked
                    self._abandoned = message.get("abandon", self._abandoned)
                    if "bye" in message:
                        self._status = status_of(message)
                        self._left.set()
                    self.orders.put(message)
                self._changed.notify_all()
            if "bye" in message:
                return
        print(f"rank {self.rank}: the lead has ended", file=sys.stderr, flush=True)
        os._exit(joining.AGAIN)

    def _watch(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            # In ticks: time in which all processes were stopped does not count.
            self._quiet += TICK_SECONDS
            if self._quiet > self._silence:
                why = f"the lead has sent nothing for {self._silence:g} s"
                if self._left.is_set():
                    why = f"sent home, and still at work {self._silence:g} s later"
                print(f"rank {self.rank}: {why}", file=sys.stderr, flush=True)
                os._exit(self._status)

    def _beat(self) -> None:
        while not self._left.is_set():
            self.send({"beat": is_compiling()})
            self._left.wait(BEAT_SECONDS)

    def send(self, message: Message) -> None:
        """Sends to the lead; nothing where it has ended, which the reader sees."""
        with contextlib.suppress(OSError):
            self._channel.send(message)

    def answer(self, **message: Any) -> None:
        """Sends an answer to the request."""
        self.send(message | {"request": self._number})

    def begin(self, number: int) -> None:
        """What follows belongs to this request."""
        with self._changed:
            self._number, self._count = number, 0
            self._shared = {name: value for name, value in self._shared.items() if name[0] >= number}

    def share(self, owner: int, value: Any) -> Any:
        """As `tuning.ranks.Ranks.share`. Raises Abandoned where the lead has ended the stage."""
        name = self._next()
        if owner == self.rank:
            self.answer(share=name[1], value=value)
            return value
        return self._await(name)

    def gather(self, value: Any) -> list[Any]:
        """As `tuning.ranks.Ranks.gather`. Raises Abandoned where the lead has ended the stage."""
        name = self._next()
        self.answer(gather=name[1], value=value)
        return list(self._await(name))

    def _next(self) -> tuple[int, int]:
        name = self._number, self._count
        self._count += 1
        return name

    def _await(self, name: tuple[int, int]) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: name in self._shared or self._is_over(name[0]))
            if name in self._shared:
                return self._shared.pop(name)
        raise Abandoned("the lead has ended the stage")

    def _is_over(self, number: int) -> bool:
        """Whether the lead shares nothing more for this request."""
        return number <= self._abandoned or number < self._asked or self._left.is_set()


def status_of(bye: Message) -> int:
    """The exit status of a rank that is sent home: whether another lead follows."""
    return joining.AGAIN if bye["bye"] == "again" else joining.ENDED


def serve(member: Member) -> int:
    """Runs what the lead asks for until it sends this rank home; the exit status."""
    memory: dict[str, Any] = {}
    while True:
        order = member.orders.get()
        if "bye" in order:
            return status_of(order)
        if "named" in order or "abandon" in order:
            name_new(memory, order.get("named"))
        elif "run" in order:
            member.begin(order["request"])
            _answer(member, order["run"], memory, order["kept"])


def _answer(member: Member, asked: dict[str, Any], memory: dict[str, Any], kept: list[str]) -> None:
    """Says whether this process can run a request, and runs it when the lead says so."""
    try:
        request = _request(asked)
        stage, config = settings_of(request)
        loaded.check_before(request)
        loaded.check_elsewhere(request, stage.sources(config), "on the lead")
        use_precision(config, memory)
    except loaded.CodeDiffers as e:
        member.answer(ready=True, changed=str(e))
    except Exception as e:
        traceback.print_exc()
        member.answer(ready=True, refused=f"{place_of(e)}{type(e).__name__}: {e}")
    else:
        member.answer(ready=True, same=names_kept(memory) == kept)
    order = member.orders.get()
    if "go" not in order:
        # Another rank has refused it, or this one.
        if "bye" in order:
            member.orders.put(order)
        return
    if order["forget"]:
        memory.clear()
    try:
        ranks.use(member)
        _run(request, stage, config, memory)
        member.answer(ended="")
    except BaseException as e:
        if not isinstance(e, Abandoned):
            traceback.print_exc()
        sys.stderr.flush()
        name_new(memory, None)
        from tuning.rewards.failures import kind_of

        member.answer(ended=f"{place_of(e)}{type(e).__name__}: {e}", outage=kind_of(e) == "outage")
        if not isinstance(e, Exception):
            raise
    finally:
        ranks.use(None)


def _request(asked: dict[str, Any]) -> Request:
    """The request as the lead has sent it. Raises RuntimeError where that is of another version of this project."""
    known = {field.name for field in dataclasses.fields(Request)}
    for names, which in ((asked.keys() - known, "have"), (known - asked.keys(), "lack")):
        if names:
            fields = ", ".join(f"`{name}`" for name in sorted(names))
            does = "does not know" if which == "have" else "needs"
            raise RuntimeError(
                f"requests of the lead {which} {fields}, which this rank's version {does}; "
                "install the same on all hosts"
            )
    return Request(**asked)


def _run(request: Request, stage: Any, config: Any, memory: dict[str, Any]) -> None:
    from stages.contract.definition import Context
    from stages.store.artifacts import Store

    inputs = inputs_of(Store(request.store), request)
    with tempfile.TemporaryDirectory(prefix="rlhf-rank-") as folder:
        out, work = Path(folder) / "out", Path(folder) / "work"
        out.mkdir()
        work.mkdir()
        stage.run(
            Context(
                config=config,
                inputs=inputs,
                out=out,
                work=work,
                seed=request.seed,
                progress=_silent,
                log=lambda line: None,
                memory=memory,
                is_lead=False,
                name=f"{request.run}.{request.stage}",
            )
        )
    loaded.check_after_on_rank(request)


def _silent(done: int, total: int, unit: str, **metrics: float) -> None:
    pass


def _status_after(error: Exception) -> int:
    """The exit status of a rank that has not joined."""
    match error:
        case channel.NoLead():
            return joining.GONE
        case TimeoutError():
            # Its host has vanished behind the handshake, or it hangs.
            return joining.AGAIN
        case OSError() | EOFError() | channel.Refused(for_good=False):
            return joining.LATER
        case _:
            return joining.REFUSED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--join", required=True, metavar="HOST:PORT", help="where the lead listens")
    parser.add_argument("--rank", type=int, required=True, help="number of this rank, from 1")
    parser.add_argument("--parent", type=int, required=True, help="the process with which it ends")
    parser.add_argument("--joined", type=int, metavar="FD", help="where a byte says that this rank is in the gang")
    args = parser.parse_args()
    # Those that start ranks, a lead and `rlhf join`, do so in their main threads.
    die_with_parent(args.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    host, port = places.address_of(args.join)
    hello = {"rank": args.rank, "host": socket.gethostname(), "pid": os.getpid()}
    try:
        wait = places.seconds(os.environ, places.WAIT, places.Place.wait)
        opened = channel.connect(host, port, places.token_of(), hello, wait)
        # The lead's own wait for all ranks has begun before, and ends first.
        member = Member(args.rank, opened, wait + GRACE_SECONDS)
    except (OSError, EOFError, channel.Refused, places.PlaceError) as e:
        lost = isinstance(e, TimeoutError) and not isinstance(e, channel.NoLead)
        why = f"the lead at {args.join} has taken it and said nothing more ({e})" if lost else str(e)
        print(f"rank {args.rank}: {why}", file=sys.stderr, flush=True)
        os._exit(_status_after(e))
    if member.sent_home:
        os._exit(joining.ENDED)
    if args.joined is not None:
        os.write(args.joined, b"1")
        os.close(args.joined)
    try:
        distributed.initialize(member, member.coordinator)
        configure_jax()
        status = serve(member)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        status = 1
    # JAX would wait for the other processes: minutes for those that work, and some may have ended already.
    os._exit(status)


if __name__ == "__main__":
    main()
