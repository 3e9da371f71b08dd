"""Router, Dealer and BlockingConnection against libzmq's sockets and against peers that misbehave, over TCP on this machine.

Not covered: the bytes (tests/unit/test_zmtp.py), a peer whose machine vanished (TCP's keepalive, tests/failure).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop
import zmq

from roq.errors import Closed, PortTaken, Unavailable
from roq.runtime import connections
from roq.runtime.blocking_connection import IDLE_SECONDS, BlockingConnection, ConnectionPool, StopEvent
from roq.runtime.router import Dealer, Router
from roq.wire import zmtp
from tests.harness.ports import free_port
from tests.integration.zmtp_rig import (
    LOCAL,
    WAIT_SECONDS,
    libzmq_dealer,
    libzmq_router,
    listening,
    reset,
    until,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*event_loop_policy.*:DeprecationWarning")
LARGE = bytes(range(256)) * 20_000  # 5 MB
READY = zmtp.hello(b"DEALER")
PING_TIMEOUT_MS = 1500
ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
BUSY_SECONDS = 2.0  # what a busy machine may add to a bound


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Python's loop and the one that RoQ's processes use."""
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


class Echo:
    """A Router that answers every message with its own last part; `large` asks for much."""

    def __init__(self, port: int = 0) -> None:
        self.drains = self.refused = self.waiting_most = 0
        self.router = Router(LOCAL, port, self._message, self._drained)
        self.endpoint = f"tcp://{LOCAL}:{self.router.port}"

    def _message(self, parts: list[bytes]) -> None:
        answer = LARGE if parts[-1] == b"large" else parts[-1]
        if not self.router.send(parts[0], answer):
            self.refused += 1
        else:
            waiting = self.router.peers[parts[0]].transport.get_write_buffer_size()
            self.waiting_most = max(self.waiting_most, waiting)

    def _drained(self) -> None:
        self.drains += 1


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    made = Echo()
    yield made
    made.router.close()


@pytest.mark.quick
async def test_libzmqs_dealers_at_a_router(echo: Echo) -> None:
    def ask() -> None:
        with libzmq_dealer(echo.endpoint) as first, libzmq_dealer(echo.endpoint) as second:
            for message in (b"one", b"", b"x" * 255, b"x" * 256, LARGE):
                for peer in (first, second):
                    peer.send(message)
                assert first.recv_multipart() == second.recv_multipart() == [message]
            first.send_multipart([b"", b"two", b"parts"])
            assert first.recv() == b"parts"
            for number in range(1000):
                first.send(b"%d" % number)
            assert [first.recv() for _ in range(1000)] == [b"%d" % number for number in range(1000)]

    await asyncio.to_thread(ask)
    assert echo.drains
    await until(lambda: not echo.router.peers)


async def test_a_router_answers_pings(echo: Echo) -> None:
    def ask() -> None:
        with libzmq_dealer(echo.endpoint) as peer, peer.get_monitor_socket(ENDS) as ends:
            peer.disconnect(echo.endpoint)
            peer.set(zmq.HEARTBEAT_IVL, 100)
            peer.set(zmq.HEARTBEAT_TIMEOUT, PING_TIMEOUT_MS)
            peer.connect(echo.endpoint)
            peer.send(b"a")
            assert peer.recv() == b"a"
            while ends.poll(0):
                ends.recv_multipart()  # of the connection before
            assert not ends.poll(2 * PING_TIMEOUT_MS), "the connection ended without a PONG"
            peer.send(b"b")
            assert peer.recv() == b"b"
            peer.disable_monitor()

    await asyncio.to_thread(ask)


async def test_a_peer_of_garbage_is_cut_while_others_go_on(echo: Echo) -> None:
    loop = asyncio.get_running_loop()
    answers = asyncio.Queue[bytes]()
    talker = Dealer(echo.endpoint, lambda parts: answers.put_nowait(parts[0]), lambda: answers.put_nowait(b"ended"))
    talker.send(b"before")
    assert await asyncio.wait_for(answers.get(), WAIT_SECONDS) == b"before"
    garbage = (
        bytes(64),
        READY + b"\x02\xff" + bytes(9) + b"\xff",
        READY + (zmtp.frame(b"", zmtp.MORE) * 17),
        READY[:64] + b"\x09\0",
    )
    for junk in garbage:
        with socket.socket() as peer:
            peer.setblocking(False)
            await loop.sock_connect(peer, (LOCAL, echo.router.port))
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(peer, junk)
                async with asyncio.timeout(WAIT_SECONDS):
                    while await loop.sock_recv(peer, 4096):
                        pass
    await until(lambda: len(echo.router.peers) == 1)
    talker.send(b"after")
    assert await asyncio.wait_for(answers.get(), WAIT_SECONDS) == b"after"
    talker.close()


async def test_a_peer_that_says_nothing_is_dropped(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.2)
    loop = asyncio.get_running_loop()
    with socket.create_connection((LOCAL, echo.router.port)) as peer, libzmq_dealer(echo.endpoint) as talker:
        peer.setblocking(False)
        await until(lambda: len(echo.router.peers) == 2)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(WAIT_SECONDS):
                while await loop.sock_recv(peer, 4096):
                    pass
        talker.send(b"here")
        assert await asyncio.to_thread(talker.recv) == b"here"
        assert len(echo.router.peers) == 1


@pytest.mark.parametrize("asked", ["answers", "pongs"])
async def test_a_peer_that_does_not_read_is_dropped_at_the_bound(
    echo: Echo, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = connections.WAITING_BYTES_MAX if asked == "answers" else 2**17
    monkeypatch.setattr(connections, "WAITING_BYTES_MAX", bound)
    request = zmtp.frame(b"large") if asked == "answers" else zmtp.frame(b"\x04PING\0\0" + b"c" * 16, zmtp.COMMAND) * 200
    loop = asyncio.get_running_loop()
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.setblocking(False)
        await loop.sock_connect(peer, (LOCAL, echo.router.port))
        await loop.sock_sendall(peer, READY)
        await until(lambda: echo.router.peers)
        (held,) = echo.router.peers.values()
        with contextlib.suppress(ConnectionError):
            for _ in range(20_000):  # little at a time, as it is looked at in between
                await loop.sock_sendall(peer, request)
                await asyncio.sleep(0)
                echo.waiting_most = max(echo.waiting_most, held.transport.get_write_buffer_size())
                if not echo.router.peers:
                    break
        await until(lambda: not echo.router.peers)
    assert bound / 2 < echo.waiting_most <= bound + len(LARGE) + 9
    assert bool(echo.refused) is (asked == "answers")


async def test_a_taken_port_and_a_peer_that_left(echo: Echo) -> None:
    with pytest.raises(PortTaken):
        Router(LOCAL, echo.router.port, print)
    assert not echo.router.send(b"nobody", b"x")
    echo.router.close()
    echo.router.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOCAL, echo.router.port))


class Asking:
    """A Dealer with what it was told."""

    def __init__(self, port: int) -> None:
        self.answers = list[list[bytes]]()
        self.ends = 0
        self.dealer = Dealer(f"tcp://{LOCAL}:{port}", self.answers.append, self._ended)

    def _ended(self) -> None:
        self.ends += 1


@pytest.mark.quick
async def test_a_dealer_at_libzmqs_router_that_comes_back() -> None:
    with libzmq_router() as port:
        asking = Asking(port)
        sent = [b"at once", b"", LARGE, *(b"%d" % number for number in range(1000))]
        for message in sent:
            assert asking.dealer.send(message)
        await until(lambda: len(asking.answers) == len(sent))
        assert asking.answers == [[message] for message in sent]
        assert asking.ends == 0
    await until(lambda: asking.ends)
    assert asking.dealer.send(b"meanwhile")
    with libzmq_router(port):
        await until(lambda: asking.answers[-1] == [b"meanwhile"])
        asking.dealer.close()
        assert not asking.dealer.send(b"closed")
        ends = asking.ends
        await asyncio.sleep(0.05)
        assert asking.ends == ends, "told of its own end"


async def test_a_dealer_answers_pings() -> None:
    with libzmq_router(HEARTBEAT_IVL=100, HEARTBEAT_TIMEOUT=PING_TIMEOUT_MS) as port:
        asking = Asking(port)
        asking.dealer.send(b"a")
        await asyncio.sleep(2 * PING_TIMEOUT_MS / 1000)
        assert (asking.answers, asking.ends) == ([[b"a"]], 0)
        asking.dealer.close()


async def test_a_refused_dealer_is_told_at_once_and_goes_on() -> None:
    asking, begun = Asking(free_port(LOCAL)), time.monotonic()
    await until(lambda: asking.ends >= 3)
    assert time.monotonic() - begun < 1.0
    asking.dealer.close()


async def test_a_dealer_gives_up_peers_of_garbage_ever_slower() -> None:
    asked = 0

    async def junk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.write(b"HTTP/1.1 400 Bad Request\r\n".ljust(64))
        await reader.read(1 << 16)
        writer.close()

    server = await asyncio.start_server(junk, LOCAL, 0)
    asking = Asking(server.sockets[0].getsockname()[1])
    await until(lambda: asking.ends >= 2)
    await asyncio.sleep(1.0)
    asking.dealer.close()
    assert 2 <= asked < 10
    server.close()


async def test_a_dealer_comes_back_ever_slower_to_a_server_that_greets_and_closes() -> None:
    asked = 0

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.write(zmtp.hello(b"ROUTER"))
        await reader.read(1 << 16)
        writer.close()

    server = await asyncio.start_server(greet, LOCAL, 0)
    asking = Asking(server.sockets[0].getsockname()[1])
    await until(lambda: asking.ends >= 2)
    await asyncio.sleep(1.0)
    asking.dealer.close()
    assert 2 <= asked < 12
    server.close()


async def test_a_dealer_leaves_a_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.2)
    with listening() as silent:
        asking = Asking(silent.getsockname()[1])
        await until(lambda: asking.ends)
        asking.dealer.close()


def answer(blocking: BlockingConnection, message: bytes) -> list[bytes] | None:
    blocking.send(message)
    return blocking.receive(time.monotonic() + WAIT_SECONDS)


@pytest.mark.quick
def test_a_blocking_connection_at_libzmqs_router_that_comes_back() -> None:
    with libzmq_router(HEARTBEAT_IVL=100, HEARTBEAT_TIMEOUT=PING_TIMEOUT_MS) as port:
        blocking = BlockingConnection(f"tcp://{LOCAL}:{port}", StopEvent())
        for message in (b"one", b"", b"x" * 256, LARGE):
            assert answer(blocking, message) == [message]
        assert blocking.receive(time.monotonic() + 2 * PING_TIMEOUT_MS / 1000) is None  # PINGs were answered
        blocking.send(b"two")
        assert blocking.receive(time.monotonic() + WAIT_SECONDS) == [b"two"]
    with pytest.raises(Unavailable):
        answer(blocking, b"nobody")
    begun = time.monotonic()
    with pytest.raises(Unavailable):
        blocking.send(b"refused")
    assert time.monotonic() - begun < 1.0
    with libzmq_router(port):
        assert answer(blocking, b"back") == [b"back"]
    blocking.close()


@pytest.mark.parametrize("end", [socket.socket.close, reset])
async def test_an_idle_blocking_connection_whose_connection_ended_takes_the_next(end: Callable[[socket.socket], None]) -> None:
    def serve(listener: socket.socket) -> None:
        for finish in (end, socket.socket.close):
            connection, _ = listener.accept()
            connection.settimeout(WAIT_SECONDS)
            connection.sendall(zmtp.hello(b"ROUTER"))
            parser, messages = zmtp.Parser(), list[list[bytes]]()
            while not messages:
                messages = parser.feed(connection.recv(4096))
            connection.sendall(zmtp.frame(messages[0][0]))
            time.sleep(0.05)
            finish(connection)

    with listening() as listener:
        serving = asyncio.create_task(asyncio.to_thread(serve, listener))
        blocking = BlockingConnection(f"tcp://{LOCAL}:{listener.getsockname()[1]}", StopEvent())
        assert await asyncio.to_thread(answer, blocking, b"one") == [b"one"]
        await asyncio.sleep(IDLE_SECONDS + 0.1)
        assert await asyncio.to_thread(answer, blocking, b"two") == [b"two"]
        await serving
        blocking.close()


@pytest.mark.parametrize("said", [zmtp.hello(b"ROUTER"), zmtp.hello(b"ROUTER") + b"\x08\0", bytes(64)])
async def test_a_blocking_connection_that_ends_under_a_request_fails_it_at_once(said: bytes) -> None:
    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(WAIT_SECONDS)
        connection.recv(4096)
        connection.sendall(said)
        time.sleep(0.2)
        reset(connection)

    with listening() as listener:
        serving = asyncio.create_task(asyncio.to_thread(serve, listener))
        blocking, begun = BlockingConnection(f"tcp://{LOCAL}:{listener.getsockname()[1]}", StopEvent()), time.monotonic()
        with pytest.raises(Unavailable):
            await asyncio.to_thread(answer, blocking, b"lost")
        assert time.monotonic() - begun < 1.0
        await serving


DRIPPED = {"pings": zmtp.frame(b"\x04PING\0\0", zmtp.COMMAND), "a message": b"x"}


@pytest.mark.parametrize("what", DRIPPED)
def test_a_blocking_connection_keeps_its_deadline_and_hears_the_stop_event_while_bytes_drip(what: str) -> None:
    done = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(zmtp.hello(b"ROUTER"))
            connection.sendall(b"\2" + (1 << 20).to_bytes(8, "big") if what == "a message" else b"")
            while not done.wait(0.005):
                connection.sendall(DRIPPED[what])

    with listening() as listener:
        dripping = threading.Thread(target=drip, args=(listener,))
        dripping.start()
        stop = StopEvent()
        blocking = BlockingConnection(f"tcp://{LOCAL}:{listener.getsockname()[1]}", stop)
        try:
            blocking.send(b"anybody there?")
            begun = time.monotonic()
            assert blocking.receive(begun + 0.3) is None
            assert 0.3 <= time.monotonic() - begun < 0.3 + BUSY_SECONDS
            threading.Timer(0.2, stop.set).start()
            with pytest.raises(Closed):
                blocking.receive(time.monotonic() + WAIT_SECONDS)
            assert time.monotonic() - begun < 0.5 + 2 * BUSY_SECONDS
        finally:
            done.set()
            dripping.join(WAIT_SECONDS)
            blocking.close()


async def test_a_stop_event_ends_a_wait_and_connections_are_shared(echo: Echo) -> None:
    stop = StopEvent()
    pool = ConnectionPool(stop)
    blocking = pool.take(echo.endpoint)
    assert await asyncio.to_thread(answer, blocking, b"one") == [b"one"]
    pool.give(blocking)
    assert pool.take(echo.endpoint) is blocking
    waiting = asyncio.create_task(asyncio.to_thread(blocking.receive, time.monotonic() + WAIT_SECONDS))
    await asyncio.sleep(0.2)
    begun = time.monotonic()
    stop.set()
    with pytest.raises(Closed):
        await waiting
    assert time.monotonic() - begun < 1.0
    pool.close()
    pool.give(blocking)
    with pytest.raises(Unavailable):
        blocking.receive(0)
    with pytest.raises(Closed):
        pool.take(echo.endpoint)
