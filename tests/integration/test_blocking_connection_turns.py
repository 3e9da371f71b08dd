"""A BlockingConnection whose message waits for its turn: as long as the other end lives and the caller wants to, and unbroken.

Who comes when is in tests/unit/test_read_budget.py; machines that vanish are in test_vanished_peer.py.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from roq.errors import Closed, Unavailable
from roq.runtime import blocking_connection, sockets
from roq.runtime.blocking_connection import BlockingConnection, StopEvent
from roq.runtime.loop_thread import LoopThread
from roq.runtime.router import Router
from roq.wire import zmtp
from roq.wire.limits import CONTROL_BYTES_MAX
from tests.integration.zmtp_rig import LOCAL, WAIT_SECONDS, listening

MESSAGE = bytes(range(256)) * (CONTROL_BYTES_MAX // 256)
LIMIT = 2 * 1024 * 1024
STRANGERS = 2  # each has its turn, and loses it
QUICK_SECONDS = 0.3  # in place of SEND_SECONDS
DEAD_SECONDS = 2
SERVED_SECONDS = 20.0


@contextmanager
def echoing(limit: int) -> Iterator[tuple[Router, list[bytes]]]:
    """A Router in a thread, and what it was sent."""
    thread, got = LoopThread("router"), list[bytes]()

    async def make() -> Router:
        def message(parts: list[bytes]) -> None:
            got.append(parts[1])
            router.send(parts[0], parts[1])

        router = Router(LOCAL, 0, message, unfinished_max=limit)
        return router

    router = thread.call(make())
    try:
        yield router, got
    finally:

        async def close() -> None:
            router.close()

        thread.call(close())
        thread.stop()


def stand_still(port: int) -> socket.socket:
    """A stranger that begins a large message, as far as it is read at once, and goes on no more."""
    stranger = socket.create_connection((LOCAL, port), WAIT_SECONDS)
    stranger.sendall(zmtp.hello(b"DEALER") + b"\x02" + CONTROL_BYTES_MAX.to_bytes(8, "big"))
    stranger.settimeout(0.2)
    sent = 0
    while sent < LIMIT:
        try:
            sent += stranger.send(MESSAGE[: LIMIT - sent])
        except TimeoutError:
            break
    return stranger


@pytest.mark.quick
def test_who_waits_behind_strangers_that_stand_still_is_served_on_its_connection() -> None:
    with echoing(LIMIT) as (router, got), ExitStack() as stack:
        for _ in range(STRANGERS):
            stack.enter_context(stand_still(router.port))
        until = time.monotonic() + WAIT_SECONDS
        while router.budget.total < LIMIT // 2:
            assert time.monotonic() < until
            time.sleep(0.005)
        connection = BlockingConnection(f"tcp://{LOCAL}:{router.port}", StopEvent())
        connection.send(MESSAGE, lambda: True)
        assert connection.receive(time.monotonic() + SERVED_SECONDS) == [MESSAGE]
        assert got == [MESSAGE]
        assert router._names == STRANGERS + 1, "one connection"
        connection.close()


class Turned:
    """A server that greets, reads nothing until its gate opens, then echoes."""

    def __init__(self, listener: socket.socket) -> None:
        self.gate = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(listener,), daemon=True)
        self._thread.start()

    def _serve(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.settimeout(SERVED_SECONDS)
            connection.sendall(zmtp.hello(b"ROUTER"))
            self.gate.wait(SERVED_SECONDS)
            parser, messages = zmtp.Parser(), list[list[bytes]]()
            while not messages and (data := connection.recv(1 << 20)):
                messages = parser.feed(data)
            if messages:
                connection.sendall(zmtp.frame(messages[0][0]))

    def ended(self) -> None:
        self.gate.set()
        self._thread.join(SERVED_SECONDS)
        assert not self._thread.is_alive()


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Turned, BlockingConnection, StopEvent]]:
    """A server, a connection to it, and its stop event. The kernel gives up after DEAD_SECONDS, or as it is told."""
    monkeypatch.setattr(sockets, "DEAD_SECONDS", DEAD_SECONDS)
    monkeypatch.setattr(blocking_connection, "DEAD_SECONDS", DEAD_SECONDS)
    monkeypatch.setattr(blocking_connection, "SEND_SECONDS", QUICK_SECONDS)
    with listening() as listener:
        server, stop = Turned(listener), StopEvent()
        connection = BlockingConnection(f"tcp://{LOCAL}:{listener.getsockname()[1]}", stop)
        yield server, connection, stop
        connection.close()
        server.ended()


def test_it_may_wait_longer_than_the_kernel_would(turned: tuple[Turned, BlockingConnection, StopEvent]) -> None:
    server, connection, _ = turned
    threading.Timer(2.0 * DEAD_SECONDS, server.gate.set).start()
    connection.send(MESSAGE, lambda: True)
    assert connection.receive(time.monotonic() + WAIT_SECONDS) == [MESSAGE]
    made = connection._socket
    assert made is not None
    assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * DEAD_SECONDS, "as before"


@pytest.mark.parametrize("waits", [0, 2])
def test_it_waits_as_long_as_the_caller_wants_to(turned: tuple[Turned, BlockingConnection, StopEvent], waits: int) -> None:
    _, connection, _ = turned
    left = iter([True] * waits)
    began = time.monotonic()
    with pytest.raises(Unavailable):
        connection.send(MESSAGE, lambda: next(left, False))
    assert waits * QUICK_SECONDS < time.monotonic() - began < (waits + 3) * QUICK_SECONDS + DEAD_SECONDS
    assert next(left, None) is None


def test_the_stop_event_ends_it_meanwhile(turned: tuple[Turned, BlockingConnection, StopEvent]) -> None:
    _, connection, stop = turned
    threading.Timer(2 * QUICK_SECONDS, stop.set).start()
    with pytest.raises(Closed):
        connection.send(MESSAGE, lambda: True)
    assert connection._socket is None, "half a message has left"
