"""A ROUTER for ZeroMQ's DEALERs on the loop's own connections, where every microsecond of a request counts.

ZeroMQ carries each message through a thread of its own, twice; here the loop reads and writes. What peers see is the same
(roq/wire/zmtp.py). A peer that vanished without a word is noticed by TCP itself within DEAD_SECONDS; one that does not read
what it asked for is dropped when so much waits for it. Messages that are coming are bounded: above the limit peers take turns,
and who is too slow meanwhile is dropped (intake.py). Not covered: identities, security.
"""

from __future__ import annotations

import asyncio
import mmap
import socket
from collections.abc import Callable, Sequence
from typing import cast

from roq.errors import FrameError, PortTaken
from roq.runtime.intake import READ_BYTES_MAX, Intake
from roq.runtime.observe import logger
from roq.wire import zmtp
from roq.wire.limits import CONTROL_BYTES_MAX, LISTEN_BACKLOG, UNFINISHED_BYTES_MAX

DEAD_SECONDS = 10
HANDSHAKE_SECONDS = 5.0  # a peer that connects and says nothing is dropped
WAITING_BYTES_MAX = 8 * CONTROL_BYTES_MAX  # for one peer
REST_SECONDS = 0.4  # for what peers have not taken yet when the process ends
TURN_LOOK_SECONDS = 0.5  # between two looks whether a peer uses its turn
_HELLO = zmtp.hello(b"ROUTER")
_REST = "send rest"  # name of the tasks that wait for it

log = logger(__name__)


def tune(connection: socket.socket) -> None:
    """No delay, and an end to connections whose other end is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_SECONDS // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_SECONDS // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_SECONDS * 1000)


async def send_rest() -> None:
    """What closed Routers of this loop still have to send leaves, within REST_SECONDS. Before the loop ends: it would take the
    process's last notices and answers with it."""
    if rest := [task for task in asyncio.all_tasks() if task.get_name() == _REST]:
        await asyncio.wait(rest, timeout=REST_SECONDS)


class Router:
    """Bound at address:port (0: any free one). on_message([peer, part, …]); on_drained() once after those that came together.
    unfinished_max: bytes of messages that are coming, of all peers.

    Needs the running loop. Raises PortTaken.
    """

    def __init__(
        self,
        address: str,
        port: int,
        on_message: Callable[[list[bytes]], None],
        on_drained: Callable[[], None] | None = None,
        unfinished_max: int = UNFINISHED_BYTES_MAX,
    ) -> None:
        self.intake = Intake(unfinished_max)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # memory is taken as it is used: small requests use a page or two
        self.buffer = memoryview(mmap.mmap(-1, READ_BYTES_MAX, private))  # of all peers: what was read is taken out at once
        self._looking: asyncio.TimerHandle | None = None
        self.on_message, self._on_drained = on_message, on_drained
        self.peers: dict[bytes, _Peer] = {}
        self.closed = self._draining = False
        self._gone = asyncio.Event()  # it is closed, and so are all connections
        self._numbers = 0
        self._loop = asyncio.get_running_loop()
        self._listener = listen(address, port)
        self.port: int = self._listener.getsockname()[1]
        self._server = self._loop.create_task(self._loop.create_server(self._peer, sock=self._listener, backlog=LISTEN_BACKLOG))

    def _peer(self) -> _Peer:
        self._numbers += 1
        return _Peer(self, self._numbers.to_bytes(8, "big"))

    def watch_turns(self) -> None:
        """Somebody waits for its turn: it comes, whatever the others do."""
        if self._looking is None:
            self._looking = self._loop.call_later(TURN_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looking = None
        if self.closed:
            return
        for late in self.intake.late():
            if isinstance(late, _Peer):
                log.info("slow connection closed: others wait")
                late.transport.abort()
        if self.intake.first is not None:
            self.watch_turns()

    def send(self, parts: Sequence[bytes]) -> bool:
        """(peer, part): False if the peer is gone, or dropped because it does not read."""
        peer = self.peers.get(parts[0])
        return peer is not None and peer.send(parts[1])

    def unsent(self) -> int:
        """Bytes of answers that the network has not taken."""
        return sum(peer.transport.get_write_buffer_size() for peer in self.peers.values())

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
        """Take nothing more; what is being sent still leaves, if the loop goes on for so long (`send_rest`)."""
        if self.closed:
            return
        self.closed = True
        if self._looking is not None:
            self._looking.cancel()
        if self._server.done() and not self._server.cancelled() and self._server.exception() is None:
            self._server.result().close()
        self._server.cancel()
        self._listener.close()
        unsent = self.unsent()
        for peer in list(self.peers.values()):
            peer.transport.close()
        if unsent:
            self._rest = self._loop.create_task(self._gone.wait(), name=_REST)

    def lost(self, name: bytes) -> bool:
        """A connection is over; False if it never began."""
        known = self.peers.pop(name, None) is not None
        if self.closed and not self.peers:
            self._gone.set()
        return known


class _Peer(asyncio.BufferedProtocol):
    """One connection. It reads as there is room for what it has begun."""

    transport: asyncio.Transport
    _overdue: asyncio.TimerHandle

    def __init__(self, router: Router, name: bytes) -> None:
        self._router, self._name = router, name
        self._intake, self._begun = router.intake, False
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
            log.info("connection refused", extra={"fields": {"reason": str(error)}})
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
        self._intake.gone(self)
        if self._router.lost(self._name):
            self._overdue.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        room, buffer = self._intake.room(self), self._router.buffer
        return buffer if room == READ_BYTES_MAX else buffer[:room]

    def buffer_updated(self, nbytes: int) -> None:
        messages = self.feed(bytes(self._router.buffer[:nbytes]))
        unfinished = self._parser.unfinished
        if (unfinished or self._begun) and not self.transport.is_closing():
            self._begun = unfinished > 0
            self._intake.read(self, unfinished, finished=messages > 0)

    def pause(self) -> None:
        self.transport.pause_reading()
        self._router.watch_turns()

    def resume(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()


def listen(address: str, port: int) -> socket.socket:
    """A listening socket; port 0: any free one. Raises PortTaken."""
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
