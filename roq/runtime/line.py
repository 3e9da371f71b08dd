"""Requests from plain blocking code: a DEALER that carries one request at a time, and a pool of them for many threads.

What the bytes mean is the caller's matter: a line may still hold the late reply to an earlier request, so every reply has to
be matched by its id. A Bell wakes all who wait on lines, for good.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import defaultdict

import zmq

from roq.errors import Closed, TemporaryError, Unavailable
from roq.runtime import sockets

QUICK_MS = 10  # an answer is first waited for so long, deaf to the bell


class Bell:
    """Once rung, whoever waits on a line with this bell gets Closed."""

    def __init__(self) -> None:
        self.rung = False
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def fileno(self) -> int:
        """Readable once rung."""
        return self._reader

    def ring(self) -> None:
        """For ever."""
        self.rung = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"!")

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until it rings; whether it has rung."""
        if not self.rung:
            select.select([self._reader], [], [], seconds)
        return self.rung

    def __del__(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


class Line:
    """One DEALER, connected to one endpoint; one thread at a time. ZeroMQ reconnects it for ever."""

    def __init__(self, endpoint: str, bell: Bell) -> None:
        self.endpoint = endpoint
        self._bell = bell
        self._socket = sockets.control_socket(zmq.DEALER)
        self._socket.set(zmq.RCVTIMEO, QUICK_MS)
        self._ends = sockets.connection_ends(self._socket)
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        for source in (self._socket, self._ends, bell.fileno()):
            self._poller.register(source, zmq.POLLIN)

    def send(self, *parts: bytes) -> None:
        """Raises TemporaryError if too much waits to be sent."""
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            raise TemporaryError(f"the backlog to {self.endpoint} is full") from None

    def receive(self, deadline: float) -> list[bytes] | None:
        """The next message, None if there is none until `deadline` (monotonic seconds).

        Raises Closed when the bell rings, Unavailable when the connection ends or is refused meanwhile.
        """
        flags = 0  # most answers come soon: waiting for them costs a single call
        while True:
            try:
                return self._socket.recv_multipart(flags)
            except zmq.Again:
                flags = zmq.NOBLOCK
            if self._bell.rung:
                raise Closed
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            ready = dict(self._poller.poll(int(left * 1000) + 1))
            if self._ends in ready and self._socket not in ready:
                while self._ends.poll(0):
                    self._ends.recv_multipart()
                raise Unavailable(f"the connection to {self.endpoint} ended")

    def close(self) -> None:
        """Close the socket; what waits to be sent is dropped."""
        self._socket.disable_monitor()
        self._ends.close(linger=0)
        self._socket.close(linger=0)


class Lines:
    """Idle lines by endpoint. A thread takes one, uses it alone and gives it back."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._idle: dict[str, list[Line]] = defaultdict(list)
        self._lock = threading.Lock()
        self._closed = False

    def take(self, endpoint: str) -> Line:
        """An idle line, or a new one. Raises Closed."""
        with self._lock:
            if self._closed:
                raise Closed
            idle = self._idle[endpoint]
            if idle:
                return idle.pop()
        return Line(endpoint, self._bell)

    def give(self, line: Line) -> None:
        """Done with it."""
        with self._lock:
            if not self._closed:
                self._idle[line.endpoint].append(line)
                return
        line.close()

    def drop(self, endpoint: str) -> None:
        """Close the idle lines to this endpoint."""
        with self._lock:
            lines = self._idle.pop(endpoint, [])
        for line in lines:
            line.close()

    def close(self) -> None:
        """Close the idle lines now, and each other one when it is given back."""
        with self._lock:
            self._closed = True
            lines = [line for idle in self._idle.values() for line in idle]
            self._idle.clear()
        for line in lines:
            line.close()
