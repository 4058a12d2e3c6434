"""The processes of a JAX process group, and the small values that they share.

    multihost.initialize()                       # once, before any computation; does nothing for a process alone
    step = multihost.from_primary(latest_step)   # called on process 0 alone, returned on every process
    sizes = multihost.gather(len(files))         # the value of each process, on every process

Every process of a group runs the same program on the same values, and calls these functions in the same order. Values
travel through the key-value store of JAX's coordination service: a process that waits there holds no collective, and
JAX ends it when another process of the group is lost. Importing this module does not import JAX.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""JAX's own environment variables, by which the launcher of the processes describes their group."""
MAIN = "main"
"""The channel of exchanges that no other thread makes."""
LONGEST_MS = 30 * 24 * 3600 * 1000
"""A stage may keep the others waiting for as long as its limits allow: a lost process ends the wait, not the clock."""


class _Group:
    """This process and its group; one process alone until `initialize`."""

    def __init__(self) -> None:
        self.index, self.count = 0, 1
        self.client: Any = None
        self.numbers: dict[str, itertools.count[int]] = collections.defaultdict(itertools.count)
        self.unread: dict[str, list[str]] = collections.defaultdict(list)
        """Keys by channel that other processes may still have to read."""
        self.lock = threading.Lock()


_group = _Group()


def variables(address: str, count: int, index: int) -> dict[str, str]:
    """The environment of process `index` of `count` whose coordinator, process 0, listens at `address` (HOST:PORT)."""
    return {ADDRESS: address, COUNT: str(count), INDEX: str(index)}


def in_group(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment describes a group of several processes."""
    return bool(environment.get(ADDRESS)) and int(environment.get(COUNT, "1")) > 1


def initialize(heartbeat_seconds: int = 100) -> None:
    """Joins the process group that the environment describes; returns when every process has joined.

    heartbeat_seconds: after so long without a heartbeat JAX takes a process for lost and ends the others.
    """
    if not in_group() or _group.client is not None:
        return
    import jax
    from jax._src import distributed  # the key-value client has no public name; Orbax uses it so too

    address, count, index = os.environ[ADDRESS], int(os.environ[COUNT]), int(os.environ[INDEX])
    # Only CPUs read it.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        count,
        index,
        # By default the coordinator listens at every address of the host.
        coordinator_bind_address=address if index == 0 else None,
        heartbeat_timeout_seconds=heartbeat_seconds,
    )
    _listen_at(_own_address(address), distributed.global_state.client)
    if (jax.process_index(), jax.process_count()) != (index, count):
        raise RuntimeError(
            f"process {index} of {count} is process {jax.process_index()} of {jax.process_count()} to its devices: "
            f"number the processes ({INDEX}) as the devices' platform does"
        )
    _group.index, _group.count, _group.client = index, count, distributed.global_state.client
    if jax.default_backend() == "cpu":
        from jax.experimental import multihost_utils

        # The first collective gives all processes 30 s to connect: here they are in step, later one may still compile.
        multihost_utils.sync_global_devices("rlhf")


def _own_address(coordinator: str) -> str:
    """The address of this host on the network of the coordinator (HOST:PORT)."""
    host, _, port = coordinator.rpartition(":")
    [(family, *_, there), *_] = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Without a packet: it only chooses a route.
        probe.connect(there)
        return str(probe.getsockname()[0])


def _listen_at(host: str, client: Any) -> None:
    """Has the collectives of CPUs listen at an address; by default they use that of the host's name, which may be a
    loopback address."""
    from jax._src import xla_bridge
    from jaxlib import _jax

    collectives = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=host)
    factory = functools.partial(xla_bridge.make_cpu_client, collectives=collectives)
    xla_bridge.register_backend_factory("cpu", factory, fail_quietly=False)


def process_index() -> int:
    """The number of this process in its group; 0 for one alone."""
    return _group.index


def process_count() -> int:
    """The number of processes of the group; 1 for one alone."""
    return _group.count


def is_primary() -> bool:
    """Whether this is process 0, which alone reads and writes what a stage keeps in one piece."""
    return _group.index == 0


def from_primary(make: Callable[[], Any]) -> Any:
    """Return the JSON value of `make`, which is called on process 0 alone, on every process."""
    return json.loads(bytes_from_primary(lambda: json.dumps(make()).encode())) if _group.count > 1 else make()


def bytes_from_primary(make: Callable[[], bytes]) -> bytes:
    """Return the bytes of `make`, which is called on process 0 alone, on every process."""
    if _group.count == 1:
        return make()
    key = _next(MAIN)
    if _group.index == 0:
        value = make()
        _group.client.key_value_set_bytes(key, value)
        _group.unread[MAIN].append(key)
        return value
    return bytes(_group.client.blocking_key_value_get_bytes(key, LONGEST_MS))


def gather(value: Any, channel: str = MAIN) -> list[Any]:
    """Return the JSON values of all processes, in the order of their numbers, on every process.

    channel: values of different channels may be shared by different threads at a time; within one the order counts.
    """
    if _group.count == 1:
        return [value]
    key = _next(channel)
    own = f"{key}/{_group.index}"
    _group.client.key_value_set(own, json.dumps(value))
    found = [json.loads(_group.client.blocking_key_value_get(f"{key}/{i}", LONGEST_MS)) for i in range(_group.count)]
    # Every process has come as far as this call, and so has read all that was shared before it.
    for read in _group.unread.pop(channel, ()):
        _group.client.key_value_delete(read)
    _group.unread[channel].append(own)
    return found


def to_primary(values: Iterable[T], encode: Callable[[T], bytes], decode: Callable[[bytes], T]) -> Iterator[T]:
    """On process 0 yields the values of all processes as they arrive; on the others sends theirs and yields nothing.

    The order is that of arrival. encode and decode: a value as bytes, and back.
    """
    if _group.count == 1:
        yield from values
        return
    key, client = _next(MAIN), _group.client
    if _group.index > 0:
        number = 0
        for number, value in enumerate(values, start=1):
            client.key_value_set_bytes(f"{key}/{_group.index}/{number}", b"+" + encode(value))
        client.key_value_set_bytes(f"{key}/{_group.index}/{number + 1}", b".")
        return
    following = dict.fromkeys(range(1, _group.count), 1)

    def arrived(index: int, wait: bool) -> Iterator[T]:
        """The values of a process that have arrived; with `wait` those that are still to come, too."""
        while index in following:
            name = f"{key}/{index}/{following[index]}"
            try:
                found = client.blocking_key_value_get_bytes(name, LONGEST_MS if wait else 1)
            except Exception:
                if wait:
                    raise
                return
            client.key_value_delete(name)
            following[index] += 1
            if found == b".":
                del following[index]
            else:
                yield decode(found[1:])

    for value in values:
        yield value
        for index in list(following):
            yield from arrived(index, wait=False)
    for index in list(following):
        yield from arrived(index, wait=True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within it all of this module treats this process as a group of one: process 0 works without the others.

    Devices stay those of all processes: code in this context must not compute over them.
    """
    before = _group.index, _group.count
    _group.index, _group.count = 0, 1
    try:
        yield
    finally:
        _group.index, _group.count = before


def barrier(channel: str = MAIN) -> None:
    """Return when every process has called this."""
    gather(None, channel)


def to_host(value: Any) -> Any:
    """Return the whole value of an array as a NumPy array on every process.

    An array that several processes have a part of is copied to each device: pass large ones a layer at a time.
    """
    import jax

    if not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated:
        return jax.device_get(value)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(value, tiled=True)


def _next(channel: str) -> str:
    with _group.lock:
        return f"rlhf/{channel}/{next(_group.numbers[channel])}"
