"""A message for a rank goes out as it was when it was said, and one that cannot go is an error of who says it."""

from __future__ import annotations

import socket
import time

import pytest

from stages.worker.channel import Channel
from stages.worker.outbox import Outbox


def test_a_message_is_what_it_was_when_it_was_said() -> None:
    here, there = socket.socketpair()
    outbox, rank = Outbox(Channel(here)), Channel(there)
    rows = [1, 2, 3]
    assert outbox.put({"rows": rows}, 5)
    rows.append(4)
    with pytest.raises(TypeError, match="JSON"):
        outbox.put({"rows": {1, 2}}, 5)
    outbox.start("rank 1")
    assert outbox.put({"then": 1}, 5)
    outbox.flush(time.monotonic() + 30)
    assert [rank.receive(15), rank.receive(15)] == [{"rows": [1, 2, 3]}, {"then": 1}]
    here.close()
    there.close()
