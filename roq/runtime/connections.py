"""ROUTER and DEALER sockets on the loop's own connections, where every microsecond of a request counts.

ZeroMQ carries each message through a thread of its own, twice; here the loop reads and writes. What peers see is the same
(roq/wire/zmtp.py). Both ends notice a peer that vanished without a word by TCP itself, within DEAD_SECONDS, and close a
connection that does not greet in time or sends what is no ZMTP. Not covered: identities, security; connections of blocking
code (blocking_connection.py).
"""

from __future__ import annotations

import asyncio
import mmap
import socket
from collections import deque
from collections.abc import Callable
from typing import cast

from roq.errors import FrameError, PortTaken
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.runtime.read_budget import READ_BYTES_MAX, ReadBudget
from roq.wire import zmtp
from roq.wire.limits import CONTROL_BYTES_MAX, CONTROL_MESSAGES_QUEUED, LISTEN_BACKLOG, UNFINISHED_BYTES_MAX

DEAD_SECONDS = 10
HANDSHAKE_SECONDS = 5.0  # a peer that connects and says nothing is dropped
CONNECT_SECONDS = 5.0
RECONNECT_SECONDS, RECONNECT_MAX_SECONDS = 0.02, 1.0
WAITING_BYTES_MAX = 8 * CONTROL_BYTES_MAX  # for one peer
REST_SECONDS = 0.4  # for what peers have not taken yet when the process ends
TURN_LOOK_SECONDS = 0.5  # between two looks whether a peer uses its turn
_DEALER_HELLO, _ROUTER_HELLO = zmtp.hello(b"DEALER"), zmtp.hello(b"ROUTER")
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


async def send_rest() -> None:
    """Wait until what closed connections of this loop still have to send has left, for at most REST_SECONDS. Called before the
    loop ends, which would take the process's last notices and answers with it."""
    if rest := [task for task in asyncio.all_tasks() if task.get_name() == _REST]:
        await asyncio.wait(rest, timeout=REST_SECONDS)


class _ZmtpConnection(asyncio.BaseProtocol):
    """One connection: it greets, answers PINGs, and ends if its peer does not greet in time or sends what is no ZMTP."""

    transport: asyncio.Transport
    parser: zmtp.Parser
    _overdue: asyncio.TimerHandle

    def begin(self, transport: asyncio.Transport, hello: bytes) -> None:
        """A connection was made."""
        self.transport, self.parser = transport, zmtp.Parser()
        tune(transport.get_extra_info("socket"))
        transport.write(hello)
        self._overdue = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self._check_greeting)

    def _check_greeting(self) -> None:
        if not self.parser.ready:
            self.transport.abort()

    def take(self, data: bytes) -> list[list[bytes]]:
        """The messages that are complete now; none of a connection that is ended."""
        transport, parser = self.transport, self.parser
        try:
            messages = parser.feed(data)
        except FrameError as error:
            log.info("closing a connection: its peer does not speak ZMTP 3", extra={"fields": {"reason": str(error)}})
            transport.abort()
            return []
        if parser.pongs:
            transport.writelines(parser.pongs)
            parser.pongs.clear()
            if transport.get_write_buffer_size() > WAITING_BYTES_MAX:
                transport.abort()
                return []
        return messages


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
        self.budget = ReadBudget(unfinished_max)
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
        for late in self.budget.late():
            if isinstance(late, _Peer):
                log.info("closing a slow connection: other peers wait for its turn to end")
                late.transport.abort()
        if self.budget.first is not None:
            self.watch_turns()

    def send(self, peer: bytes, message: bytes) -> bool:
        """False if the peer is gone, or dropped because it does not read."""
        connection = self.peers.get(peer)
        return connection is not None and connection.send(message)

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


class _Peer(_ZmtpConnection, asyncio.BufferedProtocol):
    """One connection of a Router. It reads as there is room for what it has begun."""

    def __init__(self, router: Router, name: bytes) -> None:
        self._router, self._name = router, name
        self._budget, self._begun = router.budget, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        if self._router.closed:
            made.close()
            return
        self._router.peers[self._name] = self
        self.begin(made, _ROUTER_HELLO)

    def send(self, message: bytes) -> bool:
        if self.transport.is_closing():
            return False
        if self.transport.get_write_buffer_size() > WAITING_BYTES_MAX:
            self.transport.abort()
            return False
        self.transport.write(zmtp.frame(message))
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._budget.gone(self)
        if self._router.lost(self._name):
            self._overdue.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        room, buffer = self._budget.room(self), self._router.buffer
        return buffer if room == READ_BYTES_MAX else buffer[:room]

    def buffer_updated(self, nbytes: int) -> None:
        router = self._router
        messages = self.take(bytes(router.buffer[:nbytes]))
        for parts in messages:
            if router.closed:
                return
            router.on_message([self._name, *parts])
        if messages:
            router.drained()
        unfinished = self.parser.unfinished
        if (unfinished or self._begun) and not self.transport.is_closing():
            self._begun = unfinished > 0
            self._budget.read(self, unfinished, finished=bool(messages))

    def pause(self) -> None:
        self.transport.pause_reading()
        self._router.watch_turns()

    def resume(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()


class Dealer(_ZmtpConnection, asyncio.Protocol):
    """A connection to endpoint (tcp://host:port). on_message([part, …]); on_ended(): it ended or was refused.

    It connects again for ever. What is sent while there is no connection waits, at most CONTROL_MESSAGES_QUEUED messages and
    about WAITING_BYTES_MAX bytes; what was on its way when a connection ended is lost. Needs the running loop.
    """

    def __init__(self, endpoint: str, on_message: Callable[[list[bytes]], None], on_ended: Callable[[], None]) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._on_message, self._on_ended = on_message, on_ended
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._connected = self._closed = False
        self._lost = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._connecting = self._loop.create_task(self._connect(), name=f"connection to {endpoint}")

    async def _connect(self) -> None:
        pauses = delays(RECONNECT_SECONDS, RECONNECT_MAX_SECONDS)
        while True:
            self._lost.clear()
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await self._loop.create_connection(lambda: self, self._host, self._port)
            except OSError:  # a TimeoutError is one
                self._on_ended()
            else:
                made = self._loop.time()
                await self._lost.wait()
                if self._loop.time() - made > RECONNECT_MAX_SECONDS:  # not one that greets everybody and closes
                    pauses = delays(RECONNECT_SECONDS, RECONNECT_MAX_SECONDS)
            await asyncio.sleep(next(pauses))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """For the loop."""
        made = cast(asyncio.Transport, transport)
        if self._closed:
            made.abort()
            return
        self._connected = True
        self.begin(made, _DEALER_HELLO)

    def data_received(self, data: bytes) -> None:
        """For the loop."""
        messages = self.take(data)
        if self._backlog and self.parser.ready:
            self.transport.writelines([*map(zmtp.frame, self._backlog)])
            self._backlog.clear()
            self._backlog_bytes = 0
        for parts in messages:
            if self._closed:
                return
            self._on_message(parts)

    def connection_lost(self, error: Exception | None) -> None:
        """For the loop."""
        if self._connected:
            self._connected = False
            self._overdue.cancel()
        self._lost.set()
        if not self._closed:
            self._on_ended()

    def send(self, message: bytes) -> bool:
        """Now, or when there is a connection; False if too much waits."""
        if self._closed:
            return False
        if not self._connected or not self.parser.ready:
            if len(self._backlog) >= CONTROL_MESSAGES_QUEUED or self._backlog_bytes > WAITING_BYTES_MAX:
                return False
            self._backlog.append(message)
            self._backlog_bytes += len(message)
            return True
        if self.transport.get_write_buffer_size() > WAITING_BYTES_MAX:
            return False
        self.transport.write(zmtp.frame(message))
        return True

    def close(self) -> None:
        """Give the connection up once what was sent has left (`send_rest`)."""
        if self._closed:
            return
        self._closed = True
        self._connecting.cancel()
        if self._connected:
            unsent = self.transport.get_write_buffer_size()
            self.transport.close()
            if unsent:
                self._rest = self._loop.create_task(self._lost.wait(), name=_REST)
