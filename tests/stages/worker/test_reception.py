"""Ranks get into their gang, and home, whoever else has come to the lead first and says nothing."""

import contextlib
import socket
import threading
import time

import pytest

from stages.worker import channel
from stages.worker.gang import Gang, GangLost
from stages.worker.joining import send_home
from stages.worker.places import Place
from stages.worker.reception import Reception

TOKEN = "0123456789abcdef"
HELLO = {"rank": 1, "host": "a", "pid": 1}


@contextlib.contextmanager
def idle(port, count=40):
    """Connections that say nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        yield


def lead(port, wait):
    place = Place(2, 0, "127.0.0.1", port, TOKEN, False, wait=wait)
    return Gang(place, print, print, print)


def test_a_rank_joins_behind_connections_that_say_nothing():
    with channel.listen("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        with idle(port):
            gang = lead(port, wait=30.0)
            waiting = threading.Thread(target=gang._welcome_all, args=[server], daemon=True)
            waiting.start()
            opened = channel.connect("127.0.0.1", port, TOKEN, HELLO, wait=15)
            # One handshake after the other, 40 of 20 s, would be longer than the gang waits.
            waiting.join(15)
            assert not waiting.is_alive() and gang._members[1].host == "a"
            opened.close()


def test_a_gang_whose_rank_does_not_come_ends_the_handshakes_of_others():
    with channel.listen("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=15) as stranger:
            with pytest.raises(GangLost, match=r"waited 0.5 s \(RLHF_GANG_WAIT\) in vain for rank 1 of 2"):
                lead(port, wait=0.5)._welcome_all(server)
            assert stranger.recv(1000).startswith(b'{"nonce"') and stranger.recv(1) == b""


def test_more_handshakes_than_are_held_end_the_oldest():
    taken = []
    with channel.listen("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        reception = Reception(server, TOKEN, lambda opened, hello: taken.append(hello), most=2)
        strangers = []
        for _ in range(3):
            strangers.append(socket.create_connection(("127.0.0.1", port), timeout=15))
            reception.accept()
        # On a busy machine it ends before its handshake has begun.
        begun = strangers[0].recv(1000)
        assert not begun or (begun.startswith(b'{"nonce"') and strangers[0].recv(1) == b"")
        threading.Thread(target=reception.accept, daemon=True).start()
        channel.connect("127.0.0.1", port, TOKEN, HELLO, wait=10).close()
        deadline = time.monotonic() + 15
        while not taken and time.monotonic() < deadline:
            time.sleep(0.01)
        reception.close()
        for stranger in strangers:
            stranger.close()
    assert taken == [HELLO]


def test_ranks_are_sent_home_behind_connections_that_say_nothing():
    with channel.listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    sending = threading.Thread(target=send_home, args=[Place(2, 0, "127.0.0.1", port, TOKEN, False)])
    sending.start()
    while True:
        with contextlib.suppress(ConnectionRefusedError), idle(port, 10):
            assert channel.connect("127.0.0.1", port, TOKEN, HELLO, wait=15).receive() == {"bye": "end"}
            break
    sending.join(15)
    assert not sending.is_alive()
