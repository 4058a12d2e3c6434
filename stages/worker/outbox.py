"""What a lead sends to one rank, by a thread of its own: a rank that reads slowly keeps no other waiting."""

from __future__ import annotations

import contextlib
import queue
import threading
import time

from stages.worker.channel import Channel, Message, encoded

MOST = 256
"""Messages that wait: what one rank alone knows goes in turns, of which no rank is so many behind."""


class Outbox:
    """The messages for a rank, in order."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._waiting: queue.Queue[bytes] = queue.Queue(MOST)

    def start(self, name: str) -> None:
        """Sends from now on."""
        threading.Thread(target=self._send, name=f"to {name}", daemon=True).start()

    def put(self, message: Message, seconds: float) -> bool:
        """Has a message sent as it is now; False where too many have waited for so many seconds."""
        return self.put_encoded(encoded(message), seconds)

    def put_encoded(self, line: bytes, seconds: float) -> bool:
        """As `put`, with what `encoded` has made."""
        try:
            self._waiting.put(line, block=seconds > 0, timeout=seconds)
        except queue.Full:
            return False
        return True

    def beat(self) -> None:
        """Sends a sign of life, for which another message that waits will do."""
        if self._waiting.empty():
            self.put({"beat": True}, 0)

    def flush(self, deadline: float) -> None:
        """Waits until all is sent, up to this time of the monotonic clock."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(
                lambda: not self._waiting.unfinished_tasks, max(deadline - time.monotonic(), 0.0)
            )

    def _send(self) -> None:
        while True:
            message = self._waiting.get()
            # The reader of the channel sees the end too, and says so.
            with contextlib.suppress(OSError):
                self._channel.send_encoded(message)
            self._waiting.task_done()
