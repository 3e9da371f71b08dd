"""Sockets with ZeroMQ's face on the simulated network: the kinds and options that RoQ uses (roq/runtime/sockets.py).

Kept as in libzmq 4.3.5: queues per connection with marks on both sides (beyond them frames are dropped or refused, as the kind
and XPUB_NODROP say), subscriptions repeated on every connection, of which an XPUB hands on the first and the last of each,
reconnection, ZMTP heartbeats that end a silent connection. Not covered: security, identities, requests (they go through
roq/runtime/connections.py).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from roq.runtime import sockets
from roq.tools.simulation.loop import PROCESS, Fate
from roq.tools.simulation.network import End, Listener, Network

POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
PUBLISHING, SUBSCRIBING = (zmq.PUB, zmq.XPUB), (zmq.SUB, zmq.XSUB)
_AGAIN = zmq.Again()  # one for all: to make one takes longer than to find out that there is nothing


class _Pipe:
    """One connection of a socket."""

    def __init__(self, socket: SimulatedZmqSocket, end: End) -> None:
        self._socket, self.end = socket, end
        self.inbox: deque[list[bytes]] = deque()
        self.unread = 0  # of what we sent, by the other side
        self._read = 0  # of what came, and not said so yet
        self._half: int = socket.get(zmq.RCVHWM) // 2
        self._most: int = socket.get(zmq.SNDHWM) + socket.get(zmq.RCVHWM)
        self.topics: dict[bytes, int] = {}  # the other side's subscriptions
        self.again: Callable[[], None] = lambda: None  # connects anew when it is over
        end.on_item, end.on_closed = self._item, self._closed
        if socket.get(zmq.HEARTBEAT_IVL):
            end.patience_seconds = socket.get(zmq.HEARTBEAT_TIMEOUT) / 1000
        elif socket.kind in (zmq.SUB, zmq.XPUB) and socket.get(zmq.TCP_KEEPALIVE_IDLE) > 0:
            end.patience_seconds = sockets.QUIET_SECONDS + sockets.PROBE_SECONDS * sockets.PROBES

    def full(self) -> bool:
        """Whether one more message is beyond both sides' marks."""
        return self.unread >= self._most

    def send(self, parts: Sequence[bytes]) -> None:
        self.unread += 1
        self.end.send(("message", list(parts)))

    def read(self) -> list[bytes]:
        """The next message. The other side hears of the room as with libzmq: of half a queue at once, or when all is read."""
        parts = self.inbox.popleft()
        self._read += 1
        if not self.inbox or self._read > self._half:
            self.end.send(("room", self._read))
            self._read = 0
        return parts

    def wants(self, topic: bytes) -> bool:
        return any(topic.startswith(prefix) for prefix in self.topics)

    def _item(self, item: tuple[str, Any]) -> None:
        what, value = item
        if what == "room":
            self.unread -= value
            self._socket.news()
        elif what == "message":
            if sum(map(len, value)) > self._socket.bytes_max:
                self.end.close()  # as ZMQ_MAXMSGSIZE: it ends the sender's connection
                self._socket.lost(self)
                return
            self.inbox.append(value)
            self._socket.news()
        elif what == "subscribe":
            self.topics[value] = self.topics.get(value, 0) + 1
            self._socket.subscribed(value)
        elif self.topics.get(value):
            self.topics[value] -= 1
            if not self.topics[value]:
                del self.topics[value]
                self._socket.unsubscribed(value)

    def _closed(self) -> None:
        self._socket.lost(self)


class SimulatedZmqSocket:
    """zmq.Socket, as far as it is used."""

    def __init__(self, context: Context, kind: int) -> None:
        self._network, self.kind = context.network, kind
        self._options: dict[int, Any] = {
            zmq.SNDHWM: 1000,
            zmq.RCVHWM: 1000,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 0,
            zmq.FD: context.new_descriptor(),
        }
        self._pipes: list[_Pipe] = []
        self._turn = 0
        self._subscriptions: Counter[bytes] = Counter()
        self._upstream: deque[bytes] = deque()  # of an XPUB: subscriptions to hand on
        self._seen: Counter[bytes] = Counter()  # over all pipes
        self._targets: list[tuple[str, int]] = []
        self._listener: Listener | None = None
        self._telling = self.closed = False
        self.bytes_max = float("inf")
        self.on_news: Callable[[], None] | None = None  # instead of the descriptor
        process = PROCESS.get()
        assert process is not None, "only simulated processes have sockets"
        self._process = process

    # --- options ------------------------------------------------------------------------------------------------------

    def set(self, option: int, value: Any) -> None:
        """Before connecting, as everywhere in RoQ."""
        self._options[option] = value
        if option == zmq.MAXMSGSIZE and value > 0:
            self.bytes_max = value

    def get(self, option: int) -> Any:
        """EVENTS: what can be done now."""
        if option != zmq.EVENTS:
            return self._options.get(option, 0)
        readable = self._upstream or any(pipe.inbox for pipe in self._pipes)
        writable = self.kind in PUBLISHING or any(not pipe.full() for pipe in self._pipes)
        return (POLLIN if readable else 0) | (POLLOUT if writable else 0)

    # --- connections --------------------------------------------------------------------------------------------------

    def bind(self, endpoint: str) -> None:
        """tcp://address:port. Raises PortTaken."""
        address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._listen(address, int(port))

    def bind_to_random_port(self, endpoint: str) -> int:
        """tcp://address; the port."""
        return self._listen(endpoint.removeprefix("tcp://"), 0)

    def _listen(self, address: str, port: int) -> int:
        self._listener = self._network.listen(address, port)
        self._network.serve_ends(self._listener, self._connected)
        return self._listener.port

    def connect(self, endpoint: str) -> None:
        """Now, and again whenever the connection ends unless RECONNECT_IVL is -1."""
        address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._targets.append((address, int(port)))
        self._try(address, int(port), 0)

    def _try(self, address: str, port: int, tries: int) -> None:
        if self.closed:
            return

        def connected(end: End) -> None:
            if self.closed:
                end.close()
            else:
                self._connected(end).again = lambda: again(0)

        def again(tries: int) -> None:
            first = self.get(zmq.RECONNECT_IVL)
            if first >= 0 and not self.closed:
                most = self.get(zmq.RECONNECT_IVL_MAX) or first
                milliseconds = min(most, first * 2**tries) * (1 + self._network.random.random())
                self._network.loop.call_later(milliseconds / 1000, self._try, address, port, tries + 1)

        self._network.connect(address, port, connected, lambda: again(tries))

    def _connected(self, end: End) -> _Pipe:
        pipe = _Pipe(self, end)
        self._pipes.append(pipe)
        for prefix in sorted(self._subscriptions):
            end.send(("subscribe", prefix))
        self.news()
        return pipe

    def lost(self, pipe: _Pipe) -> None:
        """A connection is over. What had come is still read."""
        if pipe not in self._pipes:
            return
        for prefix, count in pipe.topics.items():
            for _ in range(count):
                self.unsubscribed(prefix)
        pipe.topics.clear()
        if pipe.inbox:
            pipe.unread = 1 << 60  # it takes nothing more
        else:
            self._pipes.remove(pipe)
        if not self.closed:
            pipe.again()
        self.news()

    # --- subscriptions ------------------------------------------------------------------------------------------------

    def subscribe(self, prefix: bytes) -> None:
        """Told on every connection."""
        self._subscriptions[prefix] += 1
        if self._subscriptions[prefix] == 1:
            for pipe in self._pipes:
                pipe.end.send(("subscribe", prefix))

    def unsubscribe(self, prefix: bytes) -> None:
        """The last one of a prefix is told."""
        if self._subscriptions[prefix] <= 1:
            del self._subscriptions[prefix]
            for pipe in self._pipes:
                pipe.end.send(("unsubscribe", prefix))
        else:
            self._subscriptions[prefix] -= 1

    def subscribed(self, prefix: bytes) -> None:
        """By a peer."""
        self._seen[prefix] += 1
        if self.kind == zmq.XPUB and self._seen[prefix] == 1:
            self._upstream.append(b"\x01" + prefix)
            self.news()

    def unsubscribed(self, prefix: bytes) -> None:
        """By a peer."""
        self._seen[prefix] -= 1
        if self.kind == zmq.XPUB and not self._seen[prefix]:
            self._upstream.append(b"\x00" + prefix)
            self.news()

    # --- messages -----------------------------------------------------------------------------------------------------

    def send(self, data: bytes, flags: int = 0) -> None:
        """Raises zmq.Again."""
        self.send_multipart((data,), flags)

    def send_multipart(self, parts: Sequence[bytes], flags: int = 0) -> None:
        """Raises zmq.Again."""
        if self.kind == zmq.XSUB:
            (self.subscribe if parts[0][:1] == b"\x01" else self.unsubscribe)(bytes(parts[0][1:]))
            return
        if self.kind in PUBLISHING:
            self._publish(parts)
            return
        open_ = [pipe for pipe in self._pipes if not pipe.full()]
        if not open_:
            raise _AGAIN.with_traceback(None)
        self._turn += 1
        open_[self._turn % len(open_)].send(parts)

    def _publish(self, parts: Sequence[bytes]) -> None:
        topic = bytes(parts[0])
        matching = [pipe for pipe in self._pipes if pipe.wants(topic)]
        if self.get(zmq.XPUB_NODROP) and any(pipe.full() for pipe in matching):
            raise _AGAIN.with_traceback(None)
        for pipe in matching:
            if not pipe.full():
                pipe.send(parts)

    def recv(self, flags: int = 0) -> bytes:
        """The first part. Raises zmq.Again."""
        return self.recv_multipart(flags)[0]

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        """Fairly from all connections. Raises zmq.Again."""
        if self._upstream:
            return [self._upstream.popleft()]
        count = len(self._pipes)
        for step in range(count):
            pipe = self._pipes[(self._turn + step) % count]
            if pipe.inbox:
                self._turn += step + 1
                parts = pipe.read()
                if pipe.end.closed and not pipe.inbox:
                    self._pipes.remove(pipe)
                return parts
        raise _AGAIN.with_traceback(None)

    def news(self) -> None:
        """Something can be read or written that could not before."""
        if self.closed or self._process.fate is Fate.DEAD:
            return
        if self.on_news is not None:
            self.on_news()
        elif not self._telling:
            self._telling = True
            self._network.loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = False
        if not self.closed:
            self._network.loop.readable(self._options[zmq.FD])

    def close(self, linger: int | None = None) -> None:
        """What was sent still arrives."""
        if not self.closed:
            self.closed = True
            if self._listener is not None:
                self._listener.close()
            for pipe in list(self._pipes):
                pipe.end.close()
            self._pipes.clear()


class Context:
    """zmq.Context."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._descriptors = 1_000_000

    def new_descriptor(self) -> int:
        """Of a socket; no real one has such a number."""
        self._descriptors += 1
        return self._descriptors

    def socket(self, kind: int) -> SimulatedZmqSocket:
        """A new one."""
        return SimulatedZmqSocket(self, kind)
