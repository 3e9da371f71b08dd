"""Sockets as every connection here has them: bound, tuned, and read beside the loop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

from roq.errors import PortTaken
from roq.runtime.read_budget import READ_BYTES_MAX
from roq.wire.limits import LISTEN_BACKLOG

DEAD_SECONDS = 10  # without an answer of the other end's kernel
QUIET_SECONDS, PROBE_SECONDS, PROBES = 10, 5, 4  # the same where a peer may leave its messages unread: found after 30 s
# What kernels keep of one patient connection, on either side: they would give megabytes, which a hand-over waits behind.
UNREAD_BYTES, UNSENT_BYTES = 1024 * 1024, 256 * 1024
UNREAD_BYTES_MAX = 4 * UNREAD_BYTES  # read at once when the loop was busy
TCP_NOTSENT_LOWAT = 25  # Linux's number; the socket module has no name for it


def tune(connection: socket.socket, *, patient: bool = False) -> None:
    """No delay, and an end to connections whose other end is gone. patient: one that lives may leave what is sent unread."""
    idle, every, probes = (QUIET_SECONDS, PROBE_SECONDS, PROBES) if patient else (DEAD_SECONDS // 2, 1, DEAD_SECONDS // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    if patient:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, UNREAD_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    else:
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


def unread(transport: asyncio.Transport) -> Iterator[bytes]:
    """What has come and the loop has not read yet, up to UNREAD_BYTES_MAX."""
    descriptor, left = transport.get_extra_info("socket").fileno(), UNREAD_BYTES_MAX
    try:
        while left > 0 and descriptor >= 0 and (data := os.read(descriptor, READ_BYTES_MAX)):
            left -= len(data)
            yield data
    except OSError:  # nothing there, or the connection is broken
        return
