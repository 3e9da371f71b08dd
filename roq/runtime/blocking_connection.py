"""Requests from plain blocking code: a DEALER that carries one request at a time, and a pool of them for many threads.

It speaks ZeroMQ's protocol (roq/wire/zmtp.py) on a plain socket: ZeroMQ's own would carry every message through one more
thread, which costs more than all the rest of a request.

A connection may still hold the late reply to an earlier request, so every reply is matched by its id: `ask` does so for control
messages; for any others, `send` and `receive` leave it to the caller. A StopEvent wakes all who wait on connections, for good.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from roq.errors import AccessDenied, Closed, DeadlineExceeded, FrameError, Unavailable
from roq.runtime.security import Security, process_security
from roq.runtime.sockets import DEAD_SECONDS, tune
from roq.wire import zmtp
from roq.wire.curve import Curve
from roq.wire.decoding import UNDECODABLE
from roq.wire.envelope import EnvelopeKind, error_of, open_envelope, seal
from roq.wire.limits import CONTROL_BYTES_MAX

QUICK_SECONDS = 0.05  # an answer is first waited for so long, deaf to the stop event
CONNECT_SECONDS = 2.0
SEND_SECONDS = 2.0  # without room for a single byte more: then the other end has to live, and the caller to want to wait on
IDLE_SECONDS = 0.5  # an unused connection may have ended meanwhile
RECEIVE_BYTES = 256 * 1024
T = TypeVar("T", bound=msgspec.Struct)
_HELLO = zmtp.hello(b"DEALER")
_TCP_INFO = struct.Struct("=3xB20xI")  # of tcp_info: probes that were not answered yet, segments that were not


class StopEvent:
    """Once set, whoever waits on a connection with this event gets Closed. A threading.Event that can be polled."""

    def __init__(self) -> None:
        self._set = False
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def fileno(self) -> int:
        """Readable once set."""
        return self._reader

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._set

    def set(self) -> None:
        """For ever."""
        self._set = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"!")

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until it is set; whether it is set."""
        if not self._set:
            poller = select.poll()  # select() takes no descriptor above 1023
            poller.register(self._reader, select.POLLIN)
            poller.poll(max(0.0, seconds) * 1000)
        return self._set

    def __del__(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


class BlockingConnection:
    """A DEALER's connection to one endpoint (tcp://host:port); one thread at a time. Connects when it is used, and again."""

    def __init__(self, endpoint: str, stop: StopEvent, security: Security | None = None) -> None:
        self.endpoint = endpoint
        self._stop, self._security = stop, security or process_security()
        self._curve: Curve | None = None
        self._null = False  # see Security.mixed
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._socket: socket.socket | None = None
        self._parser = zmtp.Parser()
        self._messages: deque[list[bytes]] = deque()
        self._used = 0.0  # monotonic
        self.received = 0  # bytes, ever: whether a large answer is still on its way
        self.ids = itertools.count(1)  # of requests
        self.owes_answer = False  # the last `ask` ended without its answer, which may still come

    def ask(
        self,
        request: msgspec.Struct,
        expect: type[T],
        decode: Callable[[msgspec.Raw], object],
        seconds: float,
        turn_seconds: float = 0.0,
    ) -> T:
        """The answer to a control message, within so many seconds; they begin when it is sent if turn_seconds, in which the
        other end has to take it, are given. Raises the refusal, Unavailable, DeadlineExceeded, Closed, FrameError."""
        id, began, self.owes_answer = next(self.ids), time.monotonic(), True
        turn = began + (turn_seconds or seconds)
        self.send(seal(EnvelopeKind.REQUEST, id, request), lambda: time.monotonic() < turn)
        deadline = (time.monotonic() if turn_seconds else began) + seconds
        while (parts := self.receive(deadline)) is not None:
            envelope = open_envelope(parts[-1])
            if envelope.id != id:
                continue
            self.owes_answer = False
            if envelope.kind == EnvelopeKind.ERROR:
                raise error_of(envelope.body)
            try:
                reply = decode(envelope.body)
            except UNDECODABLE as error:
                raise Unavailable(f"{self.endpoint} answered something that can't be read: {error}") from error
            if not isinstance(reply, expect):
                raise FrameError(f"{type(reply).__name__} in reply to {type(request).__name__}")
            return reply
        raise DeadlineExceeded(f"no answer to {type(request).__name__} from {self.endpoint} in {seconds:g} s")

    def send(self, message: bytes, wait_on: Callable[[], bool] = lambda: False) -> None:
        """Raises Unavailable if there is no connection, or it takes nothing; Closed once the stop event is set; AccessDenied.

        A server that is sent many large messages takes them one after the other: `wait_on` is asked every SEND_SECONDS whether
        to wait for our turn, as long as the other end's kernel answers.
        """
        try:
            if self._socket is not None and time.monotonic() - self._used > IDLE_SECONDS:
                self._glance(self._socket)
            connection = self._socket or self._connect()
            framed = zmtp.frame(message)
            self._send(connection, memoryview(framed if self._curve is None else self._curve.seal(framed)), wait_on)
        except OSError as error:
            raise self._ended(error) from error

    def _send(self, connection: socket.socket, data: memoryview, wait_on: Callable[[], bool]) -> None:
        waited = 0.0
        while data:
            began = time.monotonic()
            try:
                data = data[connection.send(data) :]
            except BlockingIOError:
                if self._stop.is_set():
                    self.close()  # half a message has left
                    raise Closed from None
                if not (_answers(connection) and wait_on()):
                    raise
                waited += time.monotonic() - began
                _patience(connection, waited + DEAD_SECONDS)  # the kernel's own would end with DEAD_SECONDS
        if waited:
            _patience(connection, DEAD_SECONDS)

    def _connect(self) -> socket.socket:
        try:
            return self._connected()
        except zmtp.OtherMechanism:
            if self._security is None or not self._security.mixed:
                raise
            self._null = not self._null
            return self._connected()

    def _connected(self) -> socket.socket:
        connection = socket.create_connection(self._address, CONNECT_SECONDS)
        connection.settimeout(None)
        tune(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(QUICK_SECONDS))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SEND_SECONDS))
        self._socket, self._parser = connection, zmtp.Parser()
        self._messages.clear()
        self._curve = None if self._security is None or self._null else self._security.client(b"DEALER", CONTROL_BYTES_MAX)
        if self._curve is None:
            connection.sendall(_HELLO)
        else:
            _say(connection, self._curve)
        deadline = time.monotonic() + CONNECT_SECONDS
        while not self._parser.ready:
            if self._stop.is_set():
                raise Closed
            if time.monotonic() > deadline:
                raise self._ended("no greeting")
            with contextlib.suppress(BlockingIOError):
                self._take(connection, connection.recv(RECEIVE_BYTES))
        return connection

    def _glance(self, connection: socket.socket) -> None:
        """What came while nobody looked; the connection may have ended."""
        try:
            self._take(connection, connection.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return
        except (OSError, Unavailable, AccessDenied):
            self.close()  # the next one will do

    def receive(self, deadline: float) -> list[bytes] | None:
        """The next message, None if there is none until `deadline` (monotonic seconds).

        Raises Closed once the stop event is set, Unavailable when the connection ends meanwhile.
        """
        connection, messages, flags = self._socket, self._messages, 0
        if connection is None:
            raise Unavailable(f"no connection to {self.endpoint}")
        while not messages:
            try:
                self._take(connection, connection.recv(RECEIVE_BYTES, flags))
                if messages:
                    break
            except BlockingIOError:
                flags = socket.MSG_DONTWAIT  # most answers come soon: waiting for them costs a single call
            except OSError as error:
                raise self._ended(error) from error
            if self._stop.is_set():
                raise Closed
            left = deadline - time.monotonic()  # bytes that make no message, however many, put off nothing
            if left <= 0:
                return None
            poller = select.poll()
            poller.register(connection, select.POLLIN)
            poller.register(self._stop, select.POLLIN)
            poller.poll(left * 1000 + 1)
        self._used = time.monotonic()
        return messages.popleft()

    def _take(self, connection: socket.socket, data: bytes) -> None:
        self.received += len(data)
        if not data:
            raise self._ended("by its other end")
        curve = self._curve
        try:
            if curve is not None:
                data = curve.feed(data)
                _say(connection, curve)
                if not data:
                    return
            self._messages.extend(self._parser.feed(data))
            if self._parser.pongs:
                pongs = b"".join(self._parser.pongs)
                connection.sendall(pongs if curve is None else curve.seal(pongs))
                self._parser.pongs.clear()
        except AccessDenied:
            self.close()
            raise
        except (FrameError, OSError) as error:
            raise self._ended(error) from error

    def _ended(self, reason: object) -> Unavailable:
        self.close()
        return Unavailable(f"the connection to {self.endpoint} ended: {reason}")

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _say(connection: socket.socket, curve: Curve) -> None:
    """What the handshake says next."""
    if curve.to_send:
        connection.sendall(b"".join(curve.to_send))
        curve.to_send.clear()


def _answers(connection: socket.socket) -> bool:
    """Whether the other end's kernel has answered all that was sent: it lives, and has no room for more."""
    probes, unacked = _TCP_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    return bool(unacked == 0 and probes <= 1)


def _patience(connection: socket.socket, seconds: float) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


class ConnectionPool:
    """Idle connections by endpoint. A thread takes one, uses it alone and gives it back."""

    def __init__(self, stop: StopEvent) -> None:
        self._stop = stop
        self._idle: dict[str, list[BlockingConnection]] = defaultdict(list)
        self._lock = threading.Lock()
        self._closed = False

    def take(self, endpoint: str) -> BlockingConnection:
        """An idle connection, or a new one. Raises Closed."""
        with self._lock:
            if self._closed:
                raise Closed
            idle = self._idle[endpoint]
            if idle:
                return idle.pop()
        return BlockingConnection(endpoint, self._stop)

    def give(self, connection: BlockingConnection) -> None:
        """Done with it."""
        with self._lock:
            if not self._closed:
                self._idle[connection.endpoint].append(connection)
                return
        connection.close()

    def drop(self, endpoint: str) -> None:
        """Close the idle connections to this endpoint."""
        with self._lock:
            connections = self._idle.pop(endpoint, [])
        for connection in connections:
            connection.close()

    def close(self) -> None:
        """Close the idle connections now, and each other one when it is given back."""
        with self._lock:
            self._closed = True
            connections = [connection for idle in self._idle.values() for connection in idle]
            self._idle.clear()
        for connection in connections:
            connection.close()
