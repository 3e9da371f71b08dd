"""A subscriber's connection to one Exchange: a SUB socket, its subscriptions, and whether they proved to be active."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

from roq.runtime.sockets import subscriber_socket
from roq.wire.monitor import ExchangeAddress

LIFE_PREFIX = b"\xfd"  # starts no topic, and sorts before the control prefix
LIFE_SECONDS = 3.0  # three signs of life within the 10 s after which an Exchange gives a subscriber up


class Attachment:
    """`on_readable(self)` whenever there may be frames; the owner reads `socket` without blocking.

    Subscriptions are set before connecting: ZeroMQ then sends them in byte order, on every (re)connection, and the last of
    them is the control prefix. A control frame that comes through proves them all.
    """

    def __init__(
        self,
        exchange: ExchangeAddress,
        prefixes: Sequence[bytes],
        max_frame_bytes: int,
        on_readable: Callable[[Attachment], None],
    ) -> None:
        self.exchange = exchange
        self.proved = False
        self.closed = False
        self.unread_at = 0.0  # when frames that had come were last left unread (time.monotonic)
        self.read_at = 0.0  # when nothing more had come at last
        self._shown, self._shown_at = False, 0.0
        self.looking = False  # `look_soon` was called and has not been served yet
        self.socket = subscriber_socket(max_frame_bytes)
        for prefix in prefixes:
            self.socket.subscribe(prefix)
        self.socket.connect(exchange.back_endpoint())
        self._on_readable = on_readable
        self._loop = asyncio.get_running_loop()
        self._fd = int(self.socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._ready)
        self.look_soon()

    def look_soon(self) -> None:
        """Read at the next turn of the loop, whether or not the descriptor tells news."""
        if not self.looking:
            self.looking = True
            self._loop.call_soon(self._ready)

    def _ready(self) -> None:
        self.looking = False
        if not self.closed:
            self.socket.get(zmq.EVENTS)  # lets ZeroMQ take in what its descriptor announced
            self._on_readable(self)

    def show_life(self, now: float) -> None:
        """Frames lie unread, so the Exchange's PINGs do too: a subscription that comes and goes tells it that we live."""
        if now - self._shown_at >= LIFE_SECONDS:
            self._shown, self._shown_at = not self._shown, now
            (self.socket.subscribe if self._shown else self.socket.unsubscribe)(LIFE_PREFIX)
            self.socket.get(zmq.EVENTS)  # lets ZeroMQ take in that the last one has left: few are queued

    def close(self) -> None:
        """Close the socket; frames not read are gone."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._fd)
            self.socket.close()
