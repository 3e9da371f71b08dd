"""Connections of the loop's own that speak ZeroMQ's protocol.

libzmq carries each message through a thread of its own, twice, and its connections can't be limited or cut one by one; here the
loop reads and writes. What peers see is the same (roq/wire/zmtp.py). Both ends notice a peer that vanished without a word by
TCP itself, and close a connection that does not greet in time or sends what is no ZMTP.

    Server   bound; its peers take turns with large messages   Router (router.py), Broadcaster (links.py), an Exchange's sides
    Client   connects, and again when the connection ends      Dealer (router.py), PublisherLink, SubscriberLink (links.py)

In a process with a card (or with the `Security` that is given) all of it is sealed by CURVE (roq/wire/curve.py), and a server
knows the card of each peer.

Not covered: identities; connections of blocking code (blocking_connection.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import Callable, Iterable
from typing import Any, cast

from roq.errors import AccessDenied, FrameError, RoqError
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.runtime.read_budget import READ_BYTES_MAX, ReadBudget
from roq.runtime.security import Security, process_security
from roq.runtime.sockets import listen, tune
from roq.wire import zmtp
from roq.wire.card import Card
from roq.wire.curve import Curve
from roq.wire.limits import CONTROL_BYTES_MAX, LISTEN_BACKLOG, PEERS_MAX

HANDSHAKE_SECONDS = 5.0  # a peer that connects and says nothing is dropped
CONNECT_SECONDS = 5.0
RECONNECT_SECONDS, RECONNECT_MAX_SECONDS = 0.02, 1.0
WAITING_BYTES_MAX = 8 * CONTROL_BYTES_MAX  # for one peer
REST_SECONDS = 0.4  # for what peers have not taken yet when the process ends
TURN_LOOK_SECONDS = 0.5  # between two looks whether a peer uses its turn
_REST = "send rest"  # name of the tasks that wait for it

log = logger(__name__)


def _await_rest(loop: asyncio.AbstractEventLoop, gone: asyncio.Event, give_up: Callable[[], None]) -> asyncio.Task[bool]:
    """Until what a closed connection still has to send has left; whoever ends the loop before gives it up."""
    rest = loop.create_task(gone.wait(), name=_REST)
    rest.add_done_callback(lambda task: give_up() if task.cancelled() else None)
    return rest


async def send_rest() -> None:
    """Wait until what closed connections of this loop still have to send has left, for at most REST_SECONDS. Called before the
    loop ends, which would take the process's last notices and answers with it."""
    if rest := [task for task in asyncio.all_tasks() if task.get_name() == _REST]:
        await asyncio.wait(rest, timeout=REST_SECONDS)


class SealedTransport:
    """A transport that takes whole frames and sends them sealed."""

    def __init__(self, transport: asyncio.Transport, seal: Callable[[bytes], bytes]) -> None:
        self._transport, self._seal = transport, seal

    def write(self, frames: bytes) -> None:
        """Whole frames."""
        self._transport.write(self._seal(frames))

    def writelines(self, pieces: Iterable[bytes]) -> None:
        """Whole frames, together."""
        self._transport.write(self._seal(b"".join(pieces)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class ZmtpConnection(asyncio.BaseProtocol):
    """One connection: it greets, answers PINGs, and ends if its peer does not greet in time or sends what is no ZMTP."""

    transport: asyncio.Transport
    parser: zmtp.Parser
    patient = False  # see tune
    _curve: Curve | None
    _overdue: asyncio.TimerHandle

    def begin(self, transport: asyncio.BaseTransport, socket_type: bytes, bytes_max: int, curve: Curve | None) -> None:
        """A connection was made. bytes_max: of one message from the other end. curve: of a sealed one."""
        self.transport, self.parser = cast(asyncio.Transport, transport), zmtp.Parser(bytes_max)  # uvloop's are no subclasses
        self._curve = curve
        tune(transport.get_extra_info("socket"), patient=self.patient)
        self.transport.write(zmtp.hello(socket_type) if curve is None else _taken(curve.to_send))
        self._overdue = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self._check_greeting)

    @property
    def peer_address(self) -> str:
        """host:port of the other end, for the log."""
        host, port = (self.transport.get_extra_info("peername") or ("", 0))[:2]
        return f"{host}:{port}"

    def opened(self, data: bytes) -> bytes:
        """What came, as without security; nothing if the connection is ended for it. First of all that data_received does."""
        curve = self._curve
        if curve is None:
            return data
        sealed = curve.ready
        try:
            opened = curve.feed(data)
        except (FrameError, AccessDenied) as error:
            self.transport.write(_taken(curve.to_send))
            self.refuse(error)
            return b""
        if not sealed:
            self.transport.write(_taken(curve.to_send))
            if curve.ready:
                self.transport = cast(asyncio.Transport, SealedTransport(self.transport, curve.seal))
        return opened

    @property
    def unfinished(self) -> int:
        """Bytes of a message that is not complete yet."""
        return self.parser.unfinished + (0 if self._curve is None else self._curve.unfinished)

    def _check_greeting(self) -> None:
        if not self.parser.ready:
            self.transport.abort()

    def take(self, data: bytes) -> list[list[bytes]]:
        """The messages that are complete now, of what was `opened`; none of a connection that is ended."""
        transport, parser = self.transport, self.parser
        if not data:
            return []
        try:
            messages = parser.feed(data)
        except (FrameError, AccessDenied) as error:
            self.refuse(error)
            return []
        if parser.pongs:
            self.answer(parser.pongs)
            parser.pongs.clear()
            if transport.is_closing():
                return []
        return messages

    def answer(self, frames: list[bytes]) -> None:
        """What the peer asked for. One that asks and does not read is dropped."""
        self.transport.writelines(frames)
        if self.transport.get_write_buffer_size() > self.waiting_bytes_max():
            self.transport.abort()

    def waiting_bytes_max(self) -> int:
        """For the peer to read."""
        return WAITING_BYTES_MAX

    def refuse(self, error: RoqError) -> None:
        """The peer breaks the protocol, or is not let in: then it hears why."""
        if isinstance(error, AccessDenied):
            log.info("closing a connection: access denied", extra={"fields": {"reason": str(error)}})
            self.transport.close()
            return
        log.info("closing a connection: its peer does not speak ZMTP 3 as it should", extra={"fields": {"reason": str(error)}})
        self.transport.abort()

    def is_over(self) -> None:
        """For connection_lost of one that began."""
        self._overdue.cancel()


def _taken(parts: list[bytes]) -> bytes:
    data = b"".join(parts)
    parts.clear()
    return data


class Peer(ZmtpConnection):
    """One connection of a Server. `hold` and `release` say by name why it is not read. card: once it is let in by one."""

    card: Card | None = None

    def __init__(self, server: Server) -> None:
        self._server, self.name = server, server.new_name()
        self._budget, self._begun = server.budget, False
        self._holds: set[str] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """For the loop."""
        server = self._server
        if server.closed or len(server.peers) >= PEERS_MAX:
            cast(asyncio.Transport, transport).abort()
            server.turned_away()
            return
        server.peers[self.name] = self
        security, curve = server.security, None
        if security is not None:
            curve = security.server(server.socket_type, server.bytes_max, self._let_in)
        self.begin(transport, server.socket_type, server.bytes_max, curve)

    def _let_in(self, card: Card) -> None:
        self._server.let_in(card)
        self._server.count(card)
        self.card = card

    def connection_lost(self, error: Exception | None) -> None:
        """For the loop."""
        self._budget.gone(self)
        if self._server.lost(self):
            self.is_over()

    def have_read(self, unfinished: int, *, finished: bool) -> None:
        """unfinished: bytes of a message that is not complete yet. finished: another one became complete."""
        if (unfinished or self._begun) and not self.transport.is_closing():
            self._begun = unfinished > 0
            self._budget.read(self, unfinished, finished=finished)

    def pause(self) -> None:
        """For the ReadBudget."""
        self.hold("turn")
        self._server.watch_turns()

    def resume(self) -> None:
        """For the ReadBudget."""
        self.release("turn")

    def hold(self, reason: str) -> None:
        """Read nothing more until this reason, and every other one, is gone."""
        if not self._holds and not self.transport.is_closing():
            self.transport.pause_reading()
        self._holds.add(reason)

    def release(self, reason: str) -> None:
        """This reason is gone."""
        if reason in self._holds:
            self._holds.discard(reason)
            if not self._holds and not self.transport.is_closing():
                self.transport.resume_reading()


class BudgetedPeer(Peer, asyncio.BufferedProtocol):
    """One that is read as there is room for what it has begun. Who derives has data_received(data)."""

    def get_buffer(self, sizehint: int) -> memoryview:
        """For the loop."""
        room, buffer = self._budget.room(self), self._server.buffer
        return buffer if room == READ_BYTES_MAX else buffer[:room]

    def buffer_updated(self, nbytes: int) -> None:
        """For the loop."""
        self.data_received(bytes(self._server.buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """This came."""
        raise NotImplementedError


class Server:
    """Bound at address:port (0: any free one). Its connections are made by `make`. Needs the running loop. Raises PortTaken.

    bytes_max: of one message. unfinished_max: bytes of messages that are coming, of all peers. security: nobody is let in
    without a card, nor whose card let_in(card) refuses by AccessDenied.
    """

    def __init__(
        self,
        address: str,
        port: int,
        socket_type: bytes,
        bytes_max: int,
        make: Callable[[], Any],
        unfinished_max: int,
        security: Security | None = None,
        let_in: Callable[[Card], None] = lambda card: None,
    ) -> None:
        self.socket_type, self.bytes_max = socket_type, bytes_max
        self.security, self.let_in = security or process_security(), let_in
        self.budget = ReadBudget(unfinished_max)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # memory is taken as it is used: small messages use a page or two
        self.buffer = memoryview(mmap.mmap(-1, READ_BYTES_MAX, private))  # of all peers: what was read is taken out at once
        self.peers: dict[bytes, Any] = {}  # by name: a number
        self.closed = self._full = False
        self._names = 0
        self._by_card: dict[str, int] = {}  # connections of names that have a quota of them
        self._looking: asyncio.TimerHandle | None = None
        self._gone = asyncio.Event()  # it is closed, and so are all connections
        self._loop = asyncio.get_running_loop()
        if self.security is not None:
            self.security.watch(self)
        self._listener = listen(address, port)
        self.port: int = self._listener.getsockname()[1]
        self._accepting = self._loop.create_task(self._loop.create_server(make, sock=self._listener, backlog=LISTEN_BACKLOG))

    def new_name(self) -> bytes:
        """For the next peer."""
        self._names += 1
        return self._names.to_bytes(8, "big")

    def card_of(self, name: bytes) -> Card | None:
        """Of the peer of this name; None without security, or if it is gone."""
        peer = self.peers.get(name)
        return None if peer is None else peer.card

    def count(self, card: Card) -> None:
        """Another connection of this name. Raises AccessDenied: it has all that its quota allows."""
        if limit := card.quota.connections:
            there = self._by_card.get(card.name, 0)
            if there >= limit:
                raise AccessDenied(f"{card.name} has {there} connections here, as many as the quota of its card allows")
            self._by_card[card.name] = there + 1

    def cut(self, revoked: frozenset[str]) -> None:
        """Whose card has one of these ids is out. From any thread: a server belongs to its own loop."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._cut, revoked)

    def _cut(self, revoked: frozenset[str]) -> None:
        for peer in list(self.peers.values()):
            if peer.card is not None and peer.card.id in revoked:
                log.warning("closing a connection: the card was revoked", extra={"fields": {"name": peer.card.name}})
                peer.transport.abort()

    def turned_away(self) -> None:
        """A connection was closed because there are too many."""
        if not self.closed and not self._full:
            self._full = True
            log.warning("port %d has %d connections and takes no more", self.port, PEERS_MAX)

    def watch_turns(self) -> None:
        """Somebody waits for its turn: it comes, whatever the others do."""
        if self._looking is None:
            self._looking = self._loop.call_later(TURN_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looking = None
        if self.closed:
            return
        for late in self.budget.late():
            if isinstance(late, Peer):
                fields = {"port": self.port, "peer": late.peer_address}
                log.info("closing a slow connection: other peers wait for its turn to end", extra={"fields": fields})
                late.transport.abort()
        if self.budget.first is not None:
            self.watch_turns()

    def unsent(self) -> int:
        """Bytes that the network has not taken."""
        return sum(peer.transport.get_write_buffer_size() for peer in self.peers.values())

    def close(self) -> None:
        """Take nothing more; what is being sent still leaves, if the loop goes on for so long (`send_rest`)."""
        if self.closed:
            return
        self.closed = True
        if self._looking is not None:
            self._looking.cancel()
        if self._accepting.done() and not self._accepting.cancelled() and self._accepting.exception() is None:
            self._accepting.result().close()
        self._accepting.cancel()
        self._listener.close()
        unsent = self.unsent()
        for peer in list(self.peers.values()):
            peer.transport.close()
        if unsent:
            self._rest = _await_rest(self._loop, self._gone, self._abort)

    def _abort(self) -> None:
        for peer in list(self.peers.values()):
            peer.transport.abort()

    def lost(self, peer: Peer) -> bool:
        """A connection is over; False if it never began."""
        known, self._full = self.peers.pop(peer.name, None) is not None, False
        if known and peer.card is not None and peer.card.quota.connections:
            left = self._by_card.pop(peer.card.name) - 1
            if left:
                self._by_card[peer.card.name] = left
        if self.closed and not self.peers:
            self._gone.set()
        return known


class Client(ZmtpConnection, asyncio.Protocol):
    """A connection to endpoint (tcp://host:port), made again for ever unless `once`. Needs the running loop.

    For those who derive: `greeted()` when the other end takes messages, `received(messages)`, `ended()` when the connection
    ended or could not be made. bytes_max: of one message. denied: why the other end did not let us in, if so.
    """

    once = False

    def __init__(
        self, endpoint: str, socket_type: bytes, bytes_max: int = CONTROL_BYTES_MAX, security: Security | None = None
    ) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._socket_type, self._bytes_max, self._security = socket_type, bytes_max, security or process_security()
        self._null = self._switching = False  # see Security.mixed
        self.denied = ""
        self.connected = self.closed = False
        self.received_bytes = 0  # ever
        self._lost = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._connecting = self._loop.create_task(self._connect(), name=f"connection to {endpoint}")

    @property
    def open(self) -> bool:
        """Whether the other end takes messages now."""
        return self.connected and self.parser.ready

    async def _connect(self) -> None:
        pauses = delays(RECONNECT_SECONDS, RECONNECT_MAX_SECONDS)
        while True:
            self._lost.clear()
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await self._loop.create_connection(lambda: self, self._host, self._port)
            except OSError:  # a TimeoutError is one
                self.ended()
            else:
                made = self._loop.time()
                await self._lost.wait()
                if self._loop.time() - made > RECONNECT_MAX_SECONDS:  # not one that greets everybody and closes
                    pauses = delays(RECONNECT_SECONDS, RECONNECT_MAX_SECONDS)
            if self._switching:
                self._switching = False
                if self._null:  # the second try; a third one is in no hurry
                    continue
            if self.once:
                return
            await asyncio.sleep(next(pauses))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """For the loop."""
        if self.closed:
            cast(asyncio.Transport, transport).abort()
            return
        self.connected = True
        self.denied = ""
        security = self._security
        curve = None if security is None or self._null else security.client(self._socket_type, self._bytes_max)
        self.begin(transport, self._socket_type, self._bytes_max, curve)

    def refuse(self, error: RoqError) -> None:
        """Known to those who ask by `denied`."""
        if isinstance(error, zmtp.OtherMechanism) and self._security is not None and self._security.mixed:
            self._null, self._switching = not self._null, True
        elif isinstance(error, AccessDenied):
            self.denied = str(error)
        super().refuse(error)

    def data_received(self, data: bytes) -> None:
        """For the loop."""
        self.received_bytes += len(data)
        known = self.parser.ready
        messages = self.take(self.opened(data))
        if not known and self.parser.ready:
            self.denied = ""
            self.greeted()
        if messages:
            self.received(messages)

    def connection_lost(self, error: Exception | None) -> None:
        """For the loop."""
        if self.connected:
            self.connected = False
            self.is_over()
        self._lost.set()
        if not self.closed and not self._switching:
            self.ended()

    def greeted(self) -> None:
        """The other end takes messages now."""

    def received(self, messages: list[list[bytes]]) -> None:
        """These came in one piece."""

    def ended(self) -> None:
        """The connection ended or could not be made."""

    def close(self) -> None:
        """Give the connection up once what was sent has left (`send_rest`)."""
        if self.closed:
            return
        self.closed = True
        self._connecting.cancel()
        if self.connected:
            unsent = self.transport.get_write_buffer_size()
            self.transport.close()
            if unsent:
                self._rest = _await_rest(self._loop, self._lost, self.transport.abort)
