"""Links: connections that messages flow through in one direction. What ZeroMQ calls PUB, SUB, XPUB and XSUB, on the loop.

    Broadcaster      bound, to whom subscribed                       Subscriptions says who that is
    SubscriberLink   connects, subscribes, again on each connection
    PublisherLink    connects to somebody who takes frames; hears what comes back

Peers may be libzmq's sockets. Not covered: requests (connections.py), an Exchange (roq/pubsub/exchange).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from roq.errors import FrameError
from roq.runtime.connections import WAITING_BYTES_MAX, Client, Peer, Server
from roq.runtime.security import Security
from roq.runtime.sockets import unread
from roq.wire import zmtp
from roq.wire.card import Card
from roq.wire.limits import CONTROL_BYTES_MAX, SUBSCRIPTION_BYTES_MAX, SUBSCRIPTIONS_MAX, UNFINISHED_BYTES_MAX

P = TypeVar("P", bound=Hashable)
KEPT_FREE_BYTES = 16 * 1024 * 1024  # freed memory a process keeps for its next frames
ROUTES_KEPT = 10_000  # who gets what, by key
LINK_BYTES_QUEUED = 256 * 1024  # given to the loop's transport; what is more waits where it can still be taken back

# Freeing one block this large teaches glibc to keep freed memory up to twice its size. Without it every frame of 64 KiB goes
# back to the system and is faulted in again, page by page: a third of all CPU time at 10 KB payloads.
bytes(KEPT_FREE_BYTES // 2)


class Subscriptions(Generic[P]):
    """Which peers have subscribed to what begins like this. Pure. A key is what decides who gets a message: its first bytes."""

    def __init__(self) -> None:
        self._peers: dict[bytes, dict[P, None]] = {}  # by prefix
        self._prefixes: dict[P, set[bytes]] = {}
        self._lengths: tuple[int, ...] = ()  # of the prefixes
        self._routes: dict[bytes, tuple[P, ...]] = {}  # by key
        self._same: dict[frozenset[P], tuple[P, ...]] = {}  # one object for the same peers

    def add(self, peer: P, prefix: bytes) -> None:
        """Raises FrameError if it has too many."""
        own = self._prefixes.setdefault(peer, set())
        if len(own) >= SUBSCRIPTIONS_MAX and prefix not in own:
            raise FrameError(f"more than {SUBSCRIPTIONS_MAX} subscriptions")
        own.add(prefix)
        self._peers.setdefault(prefix, {})[peer] = None
        self._changed()

    def of(self, peer: P) -> frozenset[bytes]:
        """What it has subscribed to."""
        return frozenset(self._prefixes.get(peer, ()))

    def remove(self, peer: P, prefix: bytes) -> None:
        """Nothing if it has none of that."""
        own = self._prefixes.get(peer, set())
        if prefix in own:
            own.discard(prefix)
            self._take_out(peer, prefix)
            self._changed()

    def forget(self, peer: P) -> None:
        """All of them."""
        for prefix in self._prefixes.pop(peer, ()):
            self._take_out(peer, prefix)
        self._changed()

    def _take_out(self, peer: P, prefix: bytes) -> None:
        peers = self._peers[prefix]
        del peers[peer]
        if not peers:
            del self._peers[prefix]

    def _changed(self) -> None:
        self._routes.clear()
        self._same.clear()
        self._lengths = ()

    def route(self, key: bytes) -> tuple[P, ...]:
        """Who gets it. The same object for the same peers, until a subscription changes."""
        known = self._routes.get(key)
        return self._find(key) if known is None else known

    def _find(self, key: bytes) -> tuple[P, ...]:
        if not self._lengths:
            self._lengths = tuple(sorted({len(prefix) for prefix in self._peers}))
        found: dict[P, None] = {}
        for length in self._lengths:
            if length > len(key):
                break
            found.update(self._peers.get(key[:length], {}))
        route = tuple(found)
        if len(self._routes) >= ROUTES_KEPT:
            self._routes.clear()
        self._routes[key] = route = self._same.setdefault(frozenset(found), route)
        return route


class SubscribedPeer(Peer, asyncio.Protocol):
    """A connection of somebody who subscribes. One that does not read misses messages."""

    def __init__(self, server: Server, subscriptions: Subscriptions[SubscribedPeer]) -> None:
        super().__init__(server)
        self._subscriptions = subscriptions
        self.heard = 0  # how often anything came

    def data_received(self, data: bytes) -> None:
        """For the loop."""
        self.heard += 1
        try:
            for parts in self.take(self.opened(data)):
                first = parts[0]
                if first[:1] == b"\x01":
                    self._subscriptions.add(self, first[1:])
                    self.subscribed(first[1:])
                elif first[:1] == b"\x00":
                    self._subscriptions.remove(self, first[1:])
        except FrameError as error:
            self.refuse(error)
        self.have_read(self.unfinished, finished=True)

    def subscribed(self, prefix: bytes) -> None:
        """For those who derive: what begins like this comes from now on."""

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Whole frames."""
        if self.transport.get_write_buffer_size() <= WAITING_BYTES_MAX:
            self.transport.writelines(pieces)

    def connection_lost(self, error: Exception | None) -> None:
        """For the loop."""
        self._subscriptions.forget(self)
        super().connection_lost(error)


class Broadcaster(Server):
    """Messages to whoever subscribed to how they begin. Raises PortTaken."""

    def __init__(
        self,
        address: str,
        port: int,
        security: Security | None = None,
        let_in: Callable[[Card], None] = lambda card: None,
    ) -> None:
        self._subscriptions = Subscriptions[SubscribedPeer]()

        def make() -> SubscribedPeer:
            return SubscribedPeer(self, self._subscriptions)

        super().__init__(address, port, b"XPUB", SUBSCRIPTION_BYTES_MAX, make, UNFINISHED_BYTES_MAX, security, let_in)

    def is_heard(self, key: bytes) -> bool:
        """Whether anybody gets what begins like this."""
        return bool(self._subscriptions.route(key))

    def send(self, parts: Sequence[bytes]) -> None:
        """The first part is what is subscribed to."""
        frames = [zmtp.frame(part, zmtp.MORE) for part in parts[:-1]]
        message = b"".join((*frames, zmtp.frame(parts[-1])))
        for peer in self._subscriptions.route(parts[0]):
            peer.send((message,))


class SubscriberLink(Client):
    """on_messages([[part, …], …]) for what comes in one piece."""

    patient = True

    def __init__(
        self,
        endpoint: str,
        prefixes: Iterable[bytes],
        on_messages: Callable[[list[list[bytes]]], None],
        bytes_max: int = CONTROL_BYTES_MAX,
        security: Security | None = None,
    ) -> None:
        self._prefixes, self._on_messages = tuple(prefixes), on_messages
        self._paused = False
        super().__init__(endpoint, b"SUB", bytes_max, security)

    def greeted(self) -> None:
        """Subscribe, in this order."""
        self.transport.write(b"".join(zmtp.frame(b"\x01" + prefix) for prefix in self._prefixes))
        if self._paused:
            self.transport.pause_reading()

    def subscribe(self, prefix: bytes) -> None:
        """To this, too."""
        self._prefixes = (*self._prefixes, prefix)
        if self.open:
            self.transport.write(zmtp.frame(b"\x01" + prefix))

    def unsubscribe(self, prefix: bytes) -> None:
        """From this."""
        if self.open and not self.transport.is_closing():
            self.transport.write(zmtp.frame(b"\x00" + prefix))

    def received(self, messages: list[list[bytes]]) -> None:
        """Hand over."""
        if not self.closed:
            self._on_messages(messages)

    def pause(self, paused: bool) -> None:
        """Whether to leave unread what comes."""
        if paused != self._paused:
            self._paused = paused
            if self.open and not self.transport.is_closing():
                (self.transport.pause_reading if paused else self.transport.resume_reading)()

    def read_now(self) -> None:
        """Hand over what has come by now and was not read, paused or not."""
        if self.open and not self.transport.is_closing():
            for data in unread(self.transport):
                self.data_received(data)

    def show_life(self) -> None:
        """Something comes to the other end, whether or not we read."""
        if self.open:
            self.transport.write(zmtp.PING)


class PublisherLink(Client):
    """Frames leave in the order in which they were given; what the transport does not take at once waits here.

    For those who derive: `told(message)` for what the other end says, `room()` when nothing waits any more.
    """

    patient = True

    def __init__(self, endpoint: str, security: Security | None = None) -> None:
        self._waiting: deque[bytes] = deque()
        self.waiting_bytes = 0
        self._full = False
        super().__init__(endpoint, b"PUB", SUBSCRIPTION_BYTES_MAX, security)

    def greeted(self) -> None:
        """From here on frames may leave."""
        self.transport.set_write_buffer_limits(LINK_BYTES_QUEUED)

    def send(self, frame: bytes) -> None:
        """Now, or as soon as it can. While it is not `open`, frames are lost."""
        if not self.open:
            return
        if self._full:
            self._waiting.append(frame)
            self.waiting_bytes += len(frame)
        elif len(frame) <= zmtp.JOINED_BYTES_MAX:
            self.transport.write(zmtp.frame(frame))
        else:
            self.transport.writelines(zmtp.pieces(frame))

    def pause_writing(self) -> None:
        """For the transport."""
        self._full = True

    def resume_writing(self) -> None:
        """For the transport."""
        self._full = False
        waiting = self._waiting
        while waiting and not self._full and not self.transport.is_closing():
            frame = waiting.popleft()
            self.waiting_bytes -= len(frame)
            self.transport.writelines(zmtp.pieces(frame))
        if not self._full and not self.closed:
            self.room()

    def received(self, messages: list[list[bytes]]) -> None:
        """Hand over."""
        for parts in messages:
            if not self.closed:
                self.told(parts[0])

    def ended(self) -> None:
        """What waited is lost with the connection."""
        self._waiting.clear()
        self.waiting_bytes, self._full = 0, False

    def told(self, message: bytes) -> None:
        """By the other end."""

    def room(self) -> None:
        """Nothing waits any more."""
