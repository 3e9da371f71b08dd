"""A ROUTER for ZeroMQ's DEALERs on the loop's own connections, where every microsecond of a request counts.

ZeroMQ carries each message through a thread of its own, twice; here the loop reads and writes. What peers see is the same
(roq/wire/zmtp.py). A peer that vanished without a word is noticed by TCP itself within DEAD_SECONDS; one that does not read
what it asked for is dropped when so much waits for it. With a limit on unfinished messages peers take turns above it, and one
that does not use its turn is dropped (intake.py). Not covered: identities, security.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import cast

from roq.errors import FrameError, PortTaken
from roq.runtime.intake import READ_BYTES_MAX, Intake
from roq.runtime.observe import logger
from roq.wire import zmtp
from roq.wire.limits import CONTROL_BYTES_MAX, LISTEN_BACKLOG

DEAD_SECONDS = 10
HANDSHAKE_SECONDS = 5.0  # a peer that connects and says nothing is dropped
WAITING_BYTES_MAX = 8 * CONTROL_BYTES_MAX  # for one peer
TURN_LOOK_SECONDS = 0.5  # between two looks whether a peer uses its turn
_HELLO = zmtp.hello(b"ROUTER")

log = logger(__name__)


def tune(connection: socket.socket) -> None:
    """No delay, and an end to connections whose other end is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_SECONDS // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_SECONDS // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_SECONDS * 1000)


class Router:
    """Bound at address:port (0: any free one). on_message([peer, part, …]); on_drained() once after those that came together.
    unfinished_max: bytes of messages that are coming, of all peers; 0: no limit.

    Needs the running loop. Raises PortTaken.
    """

    def __init__(
        self,
        address: str,
        port: int,
        on_message: Callable[[list[bytes]], None],
        on_drained: Callable[[], None] | None = None,
        unfinished_max: int = 0,
    ) -> None:
        self.intake = Intake(unfinished_max) if unfinished_max else None
        self._buffer = memoryview(bytearray(READ_BYTES_MAX if unfinished_max else 0))
        self._looking: asyncio.TimerHandle | None = None
        self.on_message, self._on_drained = on_message, on_drained
        self.peers: dict[bytes, _Peer] = {}
        self.closed = self._draining = False
        self._numbers = 0
        self._loop = asyncio.get_running_loop()
        self._listener = _listen(address, port)
        self.port: int = self._listener.getsockname()[1]
        self._server = self._loop.create_task(self._loop.create_server(self._peer, sock=self._listener, backlog=LISTEN_BACKLOG))

    def _peer(self) -> _Peer:
        self._numbers += 1
        name = self._numbers.to_bytes(8, "big")
        return _Reader(self, name) if self.intake is None else _TurnReader(self, name, self.intake, self._buffer)

    def watch_turns(self) -> None:
        """Somebody waits for its turn: it comes, whatever the others do."""
        if self._looking is None:
            self._looking = self._loop.call_later(TURN_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looking = None
        if self.intake is None or self.closed or self.intake.first is None:
            return
        late = self.intake.late()
        if isinstance(late, _TurnReader):
            log.info("a connection is too slow while others wait")
            late.transport.abort()
        self.watch_turns()

    def send(self, parts: Sequence[bytes]) -> bool:
        """(peer, part): False if the peer is gone, or dropped because it does not read."""
        peer = self.peers.get(parts[0])
        return peer is not None and peer.send(parts[1])

    def drained(self) -> None:
        """A peer's messages were handed over; others may have sent some in the same turn of the loop."""
        if self._on_drained is None or self._draining:
            return
        if len(self.peers) == 1:
            self._on_drained()
        else:
            self._draining = True
            self._loop.call_soon(self._drained)

    def _drained(self) -> None:
        self._draining = False
        if not self.closed and self._on_drained is not None:
            self._on_drained()

    def close(self) -> None:
        """Take nothing more; what is being sent still leaves."""
        if self.closed:
            return
        self.closed = True
        if self._looking is not None:
            self._looking.cancel()
        if self._server.done() and not self._server.cancelled() and self._server.exception() is None:
            self._server.result().close()
        self._server.cancel()
        self._listener.close()
        for peer in list(self.peers.values()):
            peer.transport.close()


class _Peer(asyncio.BaseProtocol):
    """One connection."""

    transport: asyncio.Transport
    _overdue: asyncio.TimerHandle

    def __init__(self, router: Router, name: bytes) -> None:
        self._router, self._name = router, name
        self._parser = zmtp.Parser()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        if self._router.closed:
            self.transport.close()
            return
        tune(transport.get_extra_info("socket"))
        self._router.peers[self._name] = self
        self.transport.write(_HELLO)
        self._overdue = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self._greeted)

    def _greeted(self) -> None:
        if not self._parser.ready:
            self.transport.abort()

    def feed(self, data: bytes) -> int:
        """How many messages became whole."""
        router, parser = self._router, self._parser
        try:
            messages = parser.feed(data)
        except FrameError as error:
            log.info("a connection was refused", extra={"fields": {"reason": str(error)}})
            self.transport.abort()
            return 0
        if parser.pongs:
            self.transport.writelines(parser.pongs)
            parser.pongs.clear()
            if self.transport.get_write_buffer_size() > WAITING_BYTES_MAX:
                self.transport.abort()
                return 0
        for parts in messages:
            if router.closed:
                return 0
            router.on_message([self._name, *parts])
        if messages:
            router.drained()
        return len(messages)

    def send(self, message: bytes) -> bool:
        if self.transport.is_closing():
            return False
        if self.transport.get_write_buffer_size() > WAITING_BYTES_MAX:
            self.transport.abort()
            return False
        self.transport.write(zmtp.frame(message))
        return True

    def connection_lost(self, error: Exception | None) -> None:
        if self._router.peers.pop(self._name, None) is not None:
            self._overdue.cancel()


class _Reader(_Peer, asyncio.Protocol):
    """Reads whatever comes."""

    def data_received(self, data: bytes) -> None:
        self.feed(data)


class _TurnReader(_Peer, asyncio.BufferedProtocol):
    """Reads as there is room for what it has begun. buffer: of all connections: what was read is taken out at once."""

    def __init__(self, router: Router, name: bytes, intake: Intake, buffer: memoryview) -> None:
        super().__init__(router, name)
        self._intake, self._buffer = intake, buffer

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[: self._intake.room(self)]

    def buffer_updated(self, nbytes: int) -> None:
        messages = self.feed(bytes(self._buffer[:nbytes]))
        if not self.transport.is_closing():
            self._intake.read(self, self._parser.unfinished, finished=messages > 0)

    def pause(self) -> None:
        self.transport.pause_reading()
        self._router.watch_turns()

    def resume(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._intake.gone(self)
        super().connection_lost(error)


def _listen(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind((address, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise PortTaken(f"can't bind {address}:{port}: {error}") from error
    return listener
