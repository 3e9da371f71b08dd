"""What tests of RoQ's links share: peers of plain TCP, libzmq's sockets, and an Exchange's Forwarder in this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType

import zmq

from roq.pubsub.exchange.forwarder import Forwarder
from roq.runtime.connections import Server
from roq.runtime.links import PublisherLink, SubscriberLink
from roq.runtime.observe import Counters
from roq.wire import zmtp
from roq.wire.assignment import Overflow, QueueSettings
from roq.wire.frame import FrameKind, encode_control, encode_data
from tests.harness import libzmq
from tests.integration.zmtp_rig import LOCAL, WAIT_SECONDS, until

TOKEN = "A/1"
HERE = f"tcp://{LOCAL}:"


def data(topic: bytes, number: int, size: int = 0) -> bytes:
    return encode_data(topic, 7, 1, number, number - 1, number - 1, [b"x" * size], 0)


def control(kind: FrameKind, number: int, body: str | int | None = None) -> bytes:
    return encode_control(kind, 7, 1, number, body, 0)


class RawPeer:
    """A connection of plain TCP that has said `hello` of this type. It reads only when asked to."""

    def __init__(self, port: int, socket_type: bytes = b"", receive_bytes: int = 0) -> None:
        self._port, self._hello = port, zmtp.hello(socket_type) if socket_type else b""
        self.parser = zmtp.Parser()
        self.messages = list[list[bytes]]()
        self.cut = False
        self.socket = socket.socket()
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.setblocking(False)
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> RawPeer:
        await self._loop.sock_connect(self.socket, (LOCAL, self._port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await self.send(self._hello)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            await self._loop.sock_sendall(self.socket, data)

    async def say(self, *bodies: bytes) -> None:
        await self.send(b"".join(map(zmtp.frame, bodies)))

    async def say_command(self, body: bytes) -> None:
        await self.send(zmtp.frame(body, zmtp.COMMAND))

    async def read(self, most: int = 1 << 18) -> None:
        """What is there next; waits for it."""
        try:
            came = await asyncio.wait_for(self._loop.sock_recv(self.socket, most), WAIT_SECONDS)
        except ConnectionError:
            came = b""
        self.cut = not came
        self.messages += self.parser.feed(came)

    async def take(self, count: int) -> list[bytes]:
        """The first part of so many messages."""
        while len(self.messages) < count:
            await self.read()
            assert not self.cut, f"cut after {len(self.messages)} of {count} messages"
        taken, self.messages = self.messages[:count], self.messages[count:]
        return [parts[0] for parts in taken]

    async def is_cut(self) -> bool:
        """Reads to the end of the connection. Raises TimeoutError if there is none."""
        while not self.cut:
            await self.read()
        return True


@contextlib.contextmanager
def libzmq_socket(kind: int, endpoint: str = "", **options: int) -> Iterator[zmq.Socket[bytes]]:
    """Connected to the endpoint, if there is one."""
    made = libzmq.socket(kind, 0)
    made.set(zmq.RCVTIMEO, int(WAIT_SECONDS * 1000))
    for name, value in options.items():
        made.set(getattr(zmq, name), value)
    try:
        if endpoint:
            made.connect(endpoint)
        yield made
    finally:
        made.close(linger=0)


async def receive(peer: zmq.Socket[bytes], count: int) -> list[list[bytes]]:
    return await asyncio.to_thread(lambda: [peer.recv_multipart() for _ in range(count)])


class Listening:
    """A SubscriberLink with what came."""

    def __init__(self, port: int, *prefixes: bytes) -> None:
        self.messages = list[list[bytes]]()
        self.link = SubscriberLink(f"{HERE}{port}", prefixes, self.messages.extend)

    @property
    def frames(self) -> list[bytes]:
        return [parts[0] for parts in self.messages]


class Telling(PublisherLink):
    """A PublisherLink with what it was told."""

    def __init__(self, port: int) -> None:
        self.heard = list[bytes]()
        self.rooms = 0
        super().__init__(f"{HERE}{port}")

    def told(self, message: bytes) -> None:
        self.heard.append(message)

    def room(self) -> None:
        self.rooms += 1


async def end(*servers: Server) -> None:
    """Close them, and cut who does not take what waits for it."""
    for server in servers:
        server.close()
        for peer in list(server.peers.values()):
            peer.transport.abort()
    await until(lambda: not any(server.peers for server in servers))


def note_failures() -> list[dict[str, object]]:
    """What fails in a callback or a task of this loop from now on."""
    failed = list[dict[str, object]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    return failed


class ForwardingScene:
    """A Forwarder, and pairs of a publisher and a subscriber that show whether it works."""

    def __init__(self) -> None:
        self.made = list[Forwarder]()
        self.links = list[Telling | SubscriberLink]()
        self.failed = note_failures()
        self.pairs = 0

    def forwarder(self, overflow: Overflow = Overflow.DROP, frame_bytes: int = 1 << 20, token: str = TOKEN) -> Forwarder:
        made = Forwarder(LOCAL, 0, 0, token, QueueSettings(overflow=overflow, max_frame_bytes=frame_bytes), Counters())
        self.made.append(made)
        return made

    async def publisher(self, forwarder: Forwarder) -> Telling:
        link = Telling(forwarder.front_port)
        self.links.append(link)
        await until(lambda: link.open)
        return link

    async def subscriber(self, forwarder: Forwarder, *prefixes: bytes) -> Listening:
        before = {peer: set(prefixes) for peer, prefixes in forwarder.subscriptions._prefixes.items()}
        listening = Listening(forwarder.back_port, *prefixes)
        self.links.append(listening.link)
        await until(lambda: any(peer not in before for peer in forwarder.subscriptions._prefixes))
        (peer,) = (peer for peer in forwarder.subscriptions._prefixes if peer not in before)
        await until(lambda: forwarder.subscriptions._prefixes[peer] == set(prefixes))
        return listening

    async def pair(self, forwarder: Forwarder) -> Callable[[], Awaitable[None]]:
        """Of a topic of its own; what is called to see that it works."""
        self.pairs += 1
        topic = b"pair%d" % self.pairs
        listening, telling = await self.subscriber(forwarder, topic), await self.publisher(forwarder)

        async def works() -> None:
            begin = len(listening.frames)
            sent = [data(topic, number, size) for number, size in enumerate((10, 0, 100_000, 300), 1)]
            for frame in sent:
                telling.send(frame)
            await until(lambda: len(listening.frames) >= begin + len(sent))
            assert listening.frames[begin:] == sent
            assert telling.open

        await works()
        return works

    async def close(self) -> None:
        for link in self.links:
            link.close()
        for forwarder in self.made:
            forwarder.stop()
            await end(forwarder._front, forwarder._back)
        assert not self.failed
