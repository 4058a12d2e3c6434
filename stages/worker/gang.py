"""The lead of a gang: one stage on many processes, of which this one has the pipes, the store and the reports.

    lead                                 each other rank (`stages.worker.rank`)
      request            ---------->       compares code, packages and device with the request
                         <----------       ready, or why not
      go                 ---------->       runs the stage
      share              <--------->       what one rank alone knows (`tuning.ranks`), handed on by the lead
                         <----------       gather: what each rank knows; the lead shares all of it
                         <----------       ended, well or with an error
      named              ---------->       the digest under which what is in memory is kept
      beat               <--------->       every two seconds

Requests come over TCP and not by a collective: a rank that waits for one holds none. A rank that is lost ends the gang,
since a collective waits for it for ever; the parent starts another worker, which resumes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from stages.worker import channel, distributed, interpreter
from stages.worker.channel import Channel, Message, encoded
from stages.worker.loaded import CodeDiffers
from stages.worker.outbox import Outbox
from stages.worker.places import TOKEN, WAIT, Place
from stages.worker.protocol import Request
from stages.worker.reception import Reception

BEAT_SECONDS = 2.0
TICK_SECONDS = 1.0
JOIN_SECONDS = 0.1
"""Between looks at which ranks have joined."""
TELL_SECONDS = 60.0
"""Between lines about ranks that have not joined."""
GRACE_SECONDS = 10.0
"""Beside the silence in which a rank may be found to be lost: then an error of its own is told."""


class GangLost(RuntimeError):
    """A rank is not there, or not any more. The message is that of the event `Lost`."""


class RankFailed(RuntimeError):
    """The stage has raised on another rank."""

    def __init__(self, what: str, outage: bool):
        super().__init__(what)
        self.outage = outage


@dataclasses.dataclass
class _Member:
    """A rank that has joined."""

    rank: int
    host: str
    pid: int
    channel: Channel
    outbox: Outbox
    quiet: float = 0.0
    """Seconds without a word, counted in ticks: time in which both processes are stopped does not count."""
    compiling: bool = False
    ready: Message | None = None
    ended: Message | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class Gang:
    """The ranks of this worker. It is the lead's `tuning.ranks.Ranks`."""

    rank = 0

    def __init__(
        self,
        place: Place,
        lost: Callable[[str], None],
        failed: Callable[[str, bool], None],
        told: Callable[[str], None],
    ):
        """lost: called once, from any thread, with which rank is lost and how; failed: with the error of a rank that
        has failed alone, and whether it is an outage. Behind either this process ends. told: called with a line for
        the log."""
        self.size = place.ranks
        self._place, self._lost, self._failed, self._told = place, lost, failed, told
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._members: dict[int, _Member] = {}
        self._changed = threading.Condition()
        self._shared: dict[int | tuple[int, int], Any] = {}
        self._number = self._count = 0
        self._open = True
        self._busy = False
        self._failing = 0.0
        self.broken = False
        """Whether ranks have not ended the last stage: this process cannot run another."""

    def start(self) -> None:
        """Waits for all ranks, then sets JAX up over them. Raises GangLost where one does not join, OSError.

        Behind an error no rank is left that this one has started, and others wait for the next lead.
        """
        try:
            self._gather()
        except BaseException:
            self._open = False
            for member in self._members.values():
                member.channel.close()
            for child in self._children.values():
                child.kill()
                child.wait()
            raise

    def _gather(self) -> None:
        server = channel.listen(self._place.host, self._place.port)
        try:
            self._start_children(server.getsockname()[1])
            self._welcome_all(server)
        finally:
            server.close()
        coordinator = f"{self._place.host}:{channel.free_port(self._place.host)}"
        for member in self._members.values():
            member.outbox.start(member.name)
            threading.Thread(target=self._read, args=[member], name=member.name, daemon=True).start()
        self._tell({"welcome": {"ranks": self.size, "coordinator": coordinator, "silence": self._place.silence}})
        threading.Thread(target=self._watch, name="gang-watch", daemon=True).start()
        threading.Thread(target=self._beat, name="gang-beat", daemon=True).start()
        distributed.initialize(self, coordinator)

    def _start_children(self, port: int) -> None:
        if not self._place.starts:
            return
        address = f"{self._place.host}:{port}"
        for rank in range(1, self.size):
            arguments = ["--join", address, "--rank", str(rank), "--parent", str(os.getpid())]
            self._children[rank] = subprocess.Popen(
                interpreter.command("stages.worker.rank", *arguments),
                stdin=subprocess.DEVNULL,
                env=os.environ | {TOKEN: self._place.token},
            )

    def _welcome_all(self, server: socket.socket) -> None:
        server.settimeout(JOIN_SECONDS)
        with contextlib.closing(Reception(server, self._place.token, self._take_in)) as reception:
            self._wait_for_all(reception)

    def _wait_for_all(self, reception: Reception) -> None:
        left = self._place.wait
        # Those that this process has started come by themselves.
        silent = 0.0 if self._place.starts else TELL_SECONDS
        while missing := self._missing():
            for rank, child in self._children.items():
                if rank in missing and child.poll() is not None:
                    raise GangLost(f"lost rank {rank} of {self.size}, which {_end_of(child)} before all had joined,")
            if silent >= TELL_SECONDS:
                self._told(f"waiting for {self._named(missing)}, {left:.0f} s at most ({WAIT})")
                silent = 0.0
            started = time.monotonic()
            with contextlib.suppress(TimeoutError):
                reception.accept()
            passed = time.monotonic() - started
            left, silent = left - passed, silent + passed
            if left <= 0:
                raise GangLost(self._in_vain(missing))

    def _missing(self) -> list[int]:
        """The ranks that have not joined, or have ended since."""
        with self._changed:
            for member in list(self._members.values()):
                if member.channel.is_at_end():
                    member.channel.close()
                    del self._members[member.rank]
            return [rank for rank in range(1, self.size) if rank not in self._members]

    def _named(self, missing: list[int]) -> str:
        numbers = ", ".join(map(str, missing))
        where = "on this machine" if self._place.starts else f"at {self._place.host}:{self._place.port}"
        return f"rank{'s' if len(missing) > 1 else ''} {numbers} of {self.size} {where}"

    def _in_vain(self, missing: list[int]) -> str:
        advice = "what such a rank has written to the log below says how far it came"
        if not self._place.starts:
            command = f"`rlhf join {self._place.host}:{self._place.port} --rank {missing[0]}`"
            advice = (
                f"start what is missing, as by {command}; the log of one that was started says why it has not joined"
            )
        return f"waited {self._place.wait:g} s ({WAIT}) in vain for {self._named(missing)}\n  {advice}"

    def _take_in(self, opened: Channel, hello: Message) -> None:
        rank = hello.get("rank")
        # Another process of a rank may come as soon as the one before has ended.
        self._missing()
        if not isinstance(rank, int) or not 1 <= rank < self.size:
            channel.refuse(opened, f"rank {rank} is none of the {self.size} of this gang; they are numbered from 0")
        elif rank in self._members:
            channel.refuse(opened, f"rank {rank} is there already, on {self._members[rank].host}", for_good=False)
        else:
            with self._changed:
                host, pid = str(hello.get("host")), int(hello.get("pid", 0))
                self._members[rank] = _Member(rank, host, pid, opened, Outbox(opened))

    # -- threads ---------------------------------------------------------------------------

    def _read(self, member: _Member) -> None:
        for message in member.channel:
            member.quiet = 0.0
            if "beat" in message:
                member.compiling = bool(message["beat"])
            elif message.get("request") == self._number:
                self._take(member, message)
        self._lose(member, "has ended")

    def _take(self, member: _Member, message: Message) -> None:
        if "share" in message:
            line = encoded(message)
            for other in self._members.values():
                if other is not member:
                    # Without waiting: the next word of this one would be late.
                    self._send(other, line, 0)
        with self._changed:
            if "share" in message:
                self._shared[message["share"]] = message["value"]
            elif "gather" in message:
                self._shared[message["gather"], member.rank] = message["value"]
            elif "ready" in message:
                member.ready = message
            elif "ended" in message:
                member.ended = message
            self._changed.notify_all()

    def _watch(self) -> None:
        while self._open:
            time.sleep(TICK_SECONDS)
            for member in self._members.values():
                member.quiet += TICK_SECONDS
                if member.quiet > self._place.silence:
                    self._lose(member, f"has sent nothing for {self._place.silence:g} s")
            error = self._error() if self._busy else None
            self._failing = self._failing + TICK_SECONDS if error is not None else 0.0
            if error is not None and self._failing > self._place.silence + GRACE_SECONDS:
                # This process waits in a collective for a rank that has left it.
                self._failed(str(error), error.outage)
                self._leave()

    def _beat(self) -> None:
        while self._open:
            for member in self._members.values():
                member.outbox.beat()
            time.sleep(BEAT_SECONDS)

    def _lose(self, member: _Member, how: str) -> None:
        with self._changed:
            if not self._open:
                return
            self._open = False
        child = self._children.get(member.rank)
        if child is not None and how == "has ended":
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=2)
            how = _end_of(child)
        self._lost(f"lost {member.name} of {self.size}, which {how},")
        self._leave()

    def _leave(self) -> NoReturn:
        """Ends this process and the ranks that it has started; others end with the connection."""
        for child in self._children.values():
            child.kill()
        distributed.leave()

    def _send(self, member: _Member, line: bytes, seconds: float) -> None:
        if not member.outbox.put_encoded(line, seconds):
            self._lose(member, "does not read what it is sent")

    def _tell(self, message: Message) -> None:
        line = encoded(message)
        for member in self._members.values():
            self._send(member, line, self._place.silence)

    def write_stacks(self) -> None:
        """Has each rank write the stacks of its threads to its log."""
        self._tell({"stacks": True})

    @property
    def compiling(self) -> bool:
        """Whether a rank is compiling."""
        return any(member.compiling for member in self._members.values())

    # -- a request -------------------------------------------------------------------------

    def ask(self, request: Request, kept: Collection[str]) -> bool:
        """Gives a request to all ranks, which wait for `go`; whether each keeps in memory what the lead does, `kept`.

        Raises CodeDiffers where a rank has older code than the request names, RuntimeError, naming the rank, for one
        with other code, packages or devices.
        """
        with self._changed:
            self._number += 1
            self._count = 0
            self._shared.clear()
            for member in self._members.values():
                member.ready = member.ended = None
        self._tell({"run": dataclasses.asdict(request), "request": self._number, "kept": sorted(kept)})
        members = self._members.values()
        with self._changed:
            self._changed.wait_for(lambda: all(member.ready is not None for member in members))
        answers = [(member, member.ready or {}) for member in members]
        refused = next(((m, a) for m, a in answers if a.get("changed") or a.get("refused")), None)
        if refused is not None:
            self._tell({"abandon": self._number})
            member, answer = refused
            if answer.get("changed"):
                raise CodeDiffers(f"{member.name}: {answer['changed']}")
            raise RuntimeError(f"{member.name} refuses {request.stage}: {answer['refused']}")
        return all(answer["same"] for _, answer in answers)

    def go(self, forget: bool) -> None:
        """Lets the ranks run the stage; with `forget` without what they keep in memory."""
        self._busy = True
        self._tell({"go": self._number, "forget": forget})

    def share(self, owner: int, value: Any) -> Any:
        """As `tuning.ranks.Ranks.share`. Raises RankFailed where a rank has ended the stage instead."""
        number = self._count
        self._count += 1
        if owner == 0:
            self._tell({"share": number, "request": self._number, "value": value})
            return value
        return self._await(number)

    def gather(self, value: Any) -> list[Any]:
        """As `tuning.ranks.Ranks.gather`. Raises RankFailed where a rank has ended the stage instead."""
        told = [self._await((self._count, rank)) for rank in range(1, self.size)]
        return list(self.share(0, [value, *told]))

    def _await(self, name: int | tuple[int, int]) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: name in self._shared or self._error() is not None)
            if name in self._shared:
                return self._shared.pop(name)
        error = self._error()
        assert error is not None
        raise error

    def _error(self) -> RankFailed | None:
        for member in self._members.values():
            if member.ended and member.ended["ended"]:
                return RankFailed(f"{member.name}: {member.ended['ended']}", bool(member.ended.get("outage")))
        return None

    def together(self) -> None:
        """Waits until all ranks have ended the stage. Raises RankFailed where one has failed."""
        members = self._members.values()
        with self._changed:
            self._changed.wait_for(lambda: all(member.ended for member in members) or self._error() is not None)
        if error := self._error():
            raise error
        self._busy = False

    def abandon(self) -> None:
        """Ends the stage on all ranks, behind an error here; `broken` says whether some are still at it."""
        self._tell({"abandon": self._number})
        members = self._members.values()
        with self._changed:
            # Long enough to see that one is lost, which is why the others and this one have failed.
            limit = self._place.silence + GRACE_SECONDS
            self.broken = not self._changed.wait_for(lambda: all(member.ended for member in members), limit)
        self._busy = False

    def name(self, digest: str | None) -> None:
        """Has the ranks keep what the stage left in memory under this digest; None: drop it."""
        self._tell({"named": digest, "request": self._number})

    def close(self, again: bool) -> None:
        """Sends the ranks home; `again`: another lead follows this one."""
        self._open = False
        self._tell({"bye": "again" if again else "end"})
        deadline = time.monotonic() + GRACE_SECONDS
        for member in self._members.values():
            member.outbox.flush(deadline)
        for child in self._children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=GRACE_SECONDS)
            child.kill()


def _end_of(child: subprocess.Popen[bytes]) -> str:
    code = child.poll()
    return "has closed its connection" if code is None else interpreter.end_of(code)
