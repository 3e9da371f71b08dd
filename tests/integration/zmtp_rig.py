"""The other ends for tests of RoQ's own ZMTP sockets: libzmq's, and plain TCP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import zmq

from tests.harness.libzmq import bind
from tests.harness.libzmq import socket as make

LOCAL = "127.0.0.1"
WAIT_SECONDS = 5.0
UNBOUNDED = 0  # messages queued: a ROUTER drops what is more, however short the while a busy machine takes nothing


async def until(true: Callable[[], object]) -> None:
    """Raises TimeoutError after WAIT_SECONDS."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not true():
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def libzmq_dealer(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    peer = make(zmq.DEALER, UNBOUNDED)
    peer.set(zmq.LINGER, 0)
    peer.set(zmq.RCVTIMEO, int(WAIT_SECONDS * 1000))
    peer.set(zmq.RECONNECT_IVL, 20)
    try:
        peer.connect(endpoint)
        yield peer
    finally:
        peer.close()


@contextlib.contextmanager
def libzmq_router(port: int = 0, **options: int) -> Iterator[int]:
    """An echoing libzmq ROUTER in a thread; its port. Stopped and closed at the end."""
    peer = make(zmq.ROUTER, UNBOUNDED)
    peer.set(zmq.LINGER, 0)
    for name, value in options.items():
        peer.set(getattr(zmq, name), value)
    bound = bind(peer, LOCAL, port)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            if peer.poll(10):
                peer.send_multipart(peer.recv_multipart())
        peer.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield bound
    finally:
        stop.set()
        thread.join(WAIT_SECONDS)


@contextlib.contextmanager
def mute_router() -> Iterator[int]:
    """A libzmq ROUTER that takes everything and answers nothing; its port."""
    peer = make(zmq.ROUTER, UNBOUNDED)
    peer.set(zmq.LINGER, 0)
    try:
        yield bind(peer, LOCAL, 0)
    finally:
        peer.close()


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[socket.socket]:
    listener = socket.create_server((LOCAL, port))
    listener.settimeout(WAIT_SECONDS)
    with listener:
        yield listener


def reset(connection: socket.socket) -> None:
    """End it as a killed process with unread bytes does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
