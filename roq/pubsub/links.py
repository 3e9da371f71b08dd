"""A client's connection to one Exchange: a publisher's link to its front, a subscriber's attachment to its back.

An ExchangeLink is an XPUB socket whose peer's subscription is the welcome, and a bounded backlog. An Attachment is a SUB
socket, its subscriptions, and whether they proved to be active.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from roq.runtime.sockets import publisher_socket, subscriber_socket
from roq.wire.frame import CONTROL_PREFIX, welcome
from roq.wire.monitor import ExchangeAddress

BACKLOG_BYTES = 512 * 1024  # frames that ZeroMQ did not take at once; above this `publish` waits or drops
CONNECT_SECONDS = 0.25  # without a welcome by then, connect anew
TRIES = 20  # connections without a welcome until the link counts as lost
LIFE_PREFIX = b"\xfd"  # starts no topic, and sorts before the control prefix
LIFE_SECONDS = 3.0  # three signs of life within the 10 s after which an Exchange gives a subscriber up


class ExchangeLink:
    """Frames leave in the order in which they were given. `on_welcome(link)` once this life of the Exchange takes our
    frames; `on_lost(link)` when it takes no more, or another life of it answers; `on_room()` when the backlog has emptied."""

    def __init__(
        self,
        exchange: ExchangeAddress,
        path: int,
        on_welcome: Callable[[ExchangeLink], None],
        on_lost: Callable[[ExchangeLink], None],
        on_room: Callable[[], None],
    ) -> None:
        self.exchange, self.path = exchange, path
        self.welcomed = False
        self.backlog_bytes = 0
        self._welcome = welcome(exchange.token)
        self._backlog: deque[bytes] = deque()
        self._on_welcome, self._on_lost, self._on_room = on_welcome, on_lost, on_room
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._looking = False
        self._tries = 0
        self._connect()

    def _connect(self) -> None:
        self._tries += 1
        self._socket = publisher_socket()
        self._socket.connect(self.exchange.front_endpoint())
        self._send = self._socket.send
        self._fd = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._ready)
        self._loop.call_soon(self._ready)
        self._timer = self._loop.call_later(CONNECT_SECONDS, self._try_again)

    def _try_again(self) -> None:
        if self._closed or self.welcomed:
            return
        if self._tries >= TRIES:
            self._on_lost(self)
            return
        self._loop.remove_reader(self._fd)
        self._socket.close(0)
        self._connect()

    def send(self, frame: bytes) -> None:
        """Send now, or keep for as soon as the socket takes it."""
        if not self._backlog:
            try:
                self._send(frame, zmq.NOBLOCK)
                self._look_soon()  # sending may swallow the descriptor's news, the end of the connection among them
                return
            except zmq.Again:
                self._look_soon()  # news of room may have come between ZeroMQ's last look and now
        self._backlog.append(frame)
        self.backlog_bytes += len(frame)

    def drop_oldest(self, keep_bytes: int) -> list[bytes]:
        """Take data frames off the backlog until at most `keep_bytes` remain; the frames taken. Control frames stay."""
        dropped: list[bytes] = []
        kept: deque[bytes] = deque()
        while self._backlog and self.backlog_bytes > keep_bytes:
            frame = self._backlog.popleft()
            if frame[:1] == CONTROL_PREFIX:
                kept.append(frame)
            else:
                dropped.append(frame)
                self.backlog_bytes -= len(frame)
        kept.extend(self._backlog)
        self._backlog = kept
        return dropped

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._ready)

    def _ready(self) -> None:
        self._looking = False
        if self._closed:
            return
        self._socket.get(zmq.EVENTS)  # lets ZeroMQ take in what its descriptor announced
        try:
            while not self._closed:
                self._heard(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            pass
        if self._closed or not self._backlog:
            return
        try:
            while self._backlog:
                self._send(self._backlog[0], zmq.NOBLOCK)
                self.backlog_bytes -= len(self._backlog.popleft())
        except zmq.Again:
            return
        self._on_room()

    def _heard(self, message: bytes) -> None:
        """The Exchange's subscriptions: its welcome, another life's, or the end of the connection."""
        if message == self._welcome:
            if not self.welcomed:
                self.welcomed = True
                self._on_welcome(self)
        elif message[:2] == b"\x01\xfe" or (message == b"\x00" and self.welcomed):
            self._on_lost(self)

    def close(self) -> None:
        """Close the socket; frames in the backlog are given up (and were confirmed, replayed or reported by then)."""
        if not self._closed:
            self._closed = True
            self._timer.cancel()
            self._loop.remove_reader(self._fd)
            self._socket.close()


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
