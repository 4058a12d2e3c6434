"""What grows with the hosts of a gang: real processes under JAX, and a lead with ranks that compute nothing.

processes: each is a rank with a device, joined by the gang's own code, and JAX's collectives go over gloo. They save
and restore a checkpoint of 16 MB that is spread over all of them. Two cores have no room for more than eight.

ranks: the real lead in a process of its own, and so many connections from another one, which has the real ranks in
threads. They tell each other what an engine on each would: how full it is, before every step. Nothing is computed.

    python -m tests.bench.growth_hosts PORT SIZE all|RANK      the other ranks, all in threads or one with its device
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.worker.gang import Gang
from stages.worker.places import Place
from stages.worker.rank import Member

from stages.worker import channel, distributed
from tests.bench.round_memory import resident

HOST, TOKEN, WAIT = "127.0.0.1", "0123456789abcdef", 60.0
TURNS = {"processes": 5, "ranks": 40}
SIDE, LEAVES = 512, 16
"""Of the square float32 arrays of a checkpoint, and how many there are."""


def joined(port: int, size: int, numbers: Sequence[int]) -> list[Member]:
    """These ranks of a gang, once all have come."""
    opened = [channel.connect(HOST, port, TOKEN, {"rank": n, "host": "a", "pid": os.getpid()}, WAIT) for n in numbers]
    return [Member(n, one, WAIT) for n, one in zip(numbers, opened, strict=True)]


def others(port: int, size: int, *ranks: str) -> list[subprocess.Popen[bytes]]:
    """Processes of other ranks."""
    command = [sys.executable, "-m", "tests.bench.growth_hosts", str(port), str(size)]
    return [subprocess.Popen([*command, rank]) for rank in ranks]


def lead_of(size: int, port: int) -> Gang:
    """A lead that starts no ranks itself."""

    def ended(what: str, *more: Any) -> None:
        print(what, *more, file=sys.stderr, flush=True)

    return Gang(Place(size, 0, HOST, port, TOKEN, False, wait=WAIT), ended, ended, ended)


# -- processes -----------------------------------------------------------------------------


def work(folder: Path) -> dict[str, float]:
    """Saves and restores a checkpoint, on every rank; what it takes this one."""
    import jax
    import jax.numpy as jnp

    from tests.bench.growth_of import again
    from tuning.axes import Axes
    from tuning.mesh import make_mesh, put
    from tuning.training.checkpoint import Checkpoints

    mesh = make_mesh(Axes(1, -1, 1))
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    state = {str(i): put(jnp.full((SIDE, SIDE), i, jnp.float32), over) for i in range(LEAVES)}
    steps = iter(range(1, 1000))
    checkpoints = Checkpoints(folder)

    def save() -> None:
        checkpoints.save(next(steps), state, {})
        checkpoints.wait()

    def restore() -> None:
        assert checkpoints.restore(state) is not None

    found = {}
    for name, call in (("save", save), ("restore", restore)):
        call()
        found[f"{name}_seconds"], found[f"{name}_memory_mb"] = again(call, times=TURNS["processes"])
    checkpoints.close()
    return found


def processes(size: int) -> dict[str, Any]:
    """A checkpoint of so many processes: what the lead takes, the others in the middle, and all together."""
    import statistics

    from tuning import ranks

    port = channel.free_port(HOST)
    started = others(port, size, *map(str, range(1, size)))
    gang = lead_of(size, port)
    gang.start()
    ranks.use(gang)
    with tempfile.TemporaryDirectory() as folder:
        mine = work(Path(folder) / "checkpoints")
    told = gang.gather(mine)
    ranks.use(None)
    gang.close(again=False)
    for one in started:
        one.wait(WAIT)
    found: dict[str, Any] = {}
    for name, of_lead in mine.items():
        found[f"lead_{name}"] = of_lead
        found[f"other_{name}"] = statistics.median([one[name] for one in told[1:]] or [of_lead])
    return found | {f"{n}_seconds": sum(one[f"{n}_seconds"] for one in told) for n in ("save", "restore")}


def one_rank(port: int, size: int, rank: int) -> None:
    """Another process of `processes`."""
    from tuning import ranks

    (member,) = joined(port, size, [rank])
    distributed.initialize(member, member.coordinator)
    ranks.use(member)
    # The lead's folder: no other rank opens it.
    member.gather(work(Path("nowhere")))
    assert "bye" in member.orders.get()


# -- ranks ---------------------------------------------------------------------------------


class Sent:
    """Counts messages and bytes that this process sends over channels, but for signs of life."""

    def __init__(self) -> None:
        self.messages = self.bytes = 0
        plain = channel.Channel.send_encoded
        lock = threading.Lock()

        def counted(opened: channel.Channel, line: bytes) -> None:
            with lock:
                told = not line.startswith(b'{"beat"')
                self.messages, self.bytes = self.messages + told, self.bytes + told * len(line)
            plain(opened, line)

        channel.Channel.send_encoded = counted  # type: ignore[method-assign]


TOLD = [[1, 0]]
"""What a rank tells the others before an engine's step: room and load of its engine (`tuning.rollout.engine.gang`)."""


def flush(gang: Gang) -> None:
    """Waits until all that ranks are told is sent."""
    for member in gang._members.values():
        member.outbox.flush(time.monotonic() + WAIT)


def ranks(size: int) -> dict[str, Any]:
    """A step of a lead with so many ranks: its messages and bytes, and its processor seconds."""
    from tests.bench.growth_of import seconds

    with channel.listen(HOST, 0) as server:
        started = others(server.getsockname()[1], size, *(["all"] if size > 1 else []))
        gang = lead_of(size, 0)
        gang._welcome_all(server)
    for member in gang._members.values():
        member.outbox.start(member.name)
        threading.Thread(target=gang._read, args=[member], daemon=True).start()
    gang._tell({"welcome": {"ranks": size, "coordinator": "", "silence": WAIT}})
    gang.gather(TOLD)
    flush(gang)
    sent, turns = Sent(), TURNS["ranks"]
    taken = seconds(lambda: [gang.gather(TOLD) for _ in range(turns)]) / turns
    flush(gang)
    found = {"lead_messages": sent.messages / turns, "lead_mb": sent.bytes / turns / 1e6, "lead_seconds": taken}
    gang.close(again=False)
    for one in started:
        one.wait(WAIT)
    return found | {"lead_memory_mb": round(resident("VmHWM"), 1)}


def all_ranks(port: int, size: int) -> None:
    """The other process of `ranks`."""

    def run(member: Member) -> None:
        for _ in range(1 + TURNS["ranks"]):
            member.gather(TOLD)
        member.orders.get()

    threads = [threading.Thread(target=run, args=[member]) for member in joined(port, size, range(1, size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    port, size, rank = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    all_ranks(port, size) if rank == "all" else one_rank(port, size, int(rank))
    sys.stdout.flush()
    # JAX would wait for processes that have ended.
    os._exit(0)
