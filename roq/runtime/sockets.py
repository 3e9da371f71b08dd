"""The only place where ZeroMQ sockets are made, with every limit set, and their link to the asyncio loop.

One context per process, made on first use and never carried across a fork. A Link reads its socket when the socket's
descriptor fires, so it costs nothing while idle. Sockets are closed with a bounded linger: what must not be lost is
confirmed by protocol before a close.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from roq.errors import PortTaken
from roq.wire.assignment import Overflow
from roq.wire.limits import (
    BACK_BYTES_QUEUED,
    BACK_FRAMES_QUEUED,
    CONTROL_BYTES_MAX,
    CONTROL_MESSAGES_QUEUED,
    DATA_FRAMES_QUEUED,
    FRONT_FRAMES_QUEUED,
    LISTEN_BACKLOG,
    SUBSCRIBER_FRAMES_QUEUED,
    SUBSCRIPTION_BYTES_MAX,
)

HEARTBEAT_INTERVAL_MS = 1_000  # ZMTP ping: a black-holed peer is noticed
HEARTBEAT_TIMEOUT_MS = 10_000  # longer than any pause of a healthy program; then the connection is dropped
BLOCKING_INTERVAL_MS, BLOCKING_TIMEOUT_MS = 4_000, 6_000  # see exchange_back
QUIET_SECONDS, PROBE_SECONDS, PROBES = (
    10,
    5,
    4,
)  # TCP's own keep-alive where ZMTP has none: a black-holed peer is noticed in 30 s
HANDSHAKE_MS = 5_000  # a peer that connects and says nothing is dropped
RECONNECT_MS = 20  # first wait between connection attempts
RECONNECT_MAX_MS = 1_000
LINGER_MS = 200  # control messages still on their way at close
MAX_SOCKETS = 20_000  # per context; a load generator opens many
KEPT_FREE_BYTES = 16 * 1024 * 1024  # freed memory a process keeps for its next frames
POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)  # plain integers: an enum's "&" is slow, and this is asked all the time
DRAIN_AT_ONCE = 200  # messages read from one socket before other work gets a turn

_context: zmq.Context[zmq.Socket[bytes]] | None = None
_context_pid = 0


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """This process's ZeroMQ context. After a fork the child gets its own."""
    global _context, _context_pid
    if _context is None or _context_pid != os.getpid():
        _context = zmq.Context()
        _context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        _context.set(zmq.BLOCKY, 0)  # sockets left open never hold up the interpreter's exit
        _context_pid = os.getpid()
        # Freeing one block this large teaches glibc to keep freed memory up to twice its size. Without it every frame of
        # 64 KiB goes back to the system and is faulted in again, page by page: a third of all CPU time at 10 KB payloads.
        bytes(KEPT_FREE_BYTES // 2)
    return _context


def _common(socket: zmq.Socket[bytes]) -> None:
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.set(zmq.TCP_KEEPALIVE, 1)


def control_socket(kind: int) -> zmq.Socket[bytes]:
    """A socket of kind PUB or SUB for control messages: what many listen to. Requests: connections.py."""
    socket = context().socket(kind)
    _common(socket)
    socket.set(zmq.MAXMSGSIZE, SUBSCRIPTION_BYTES_MAX if kind == zmq.PUB else CONTROL_BYTES_MAX)
    socket.set(zmq.SNDHWM, CONTROL_MESSAGES_QUEUED)
    socket.set(zmq.RCVHWM, CONTROL_MESSAGES_QUEUED)
    return socket


def _data(kind: int, max_frame_bytes: int, queued: int) -> zmq.Socket[bytes]:
    socket = context().socket(kind)
    _common(socket)
    socket.set(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.set(zmq.SNDHWM, queued)
    socket.set(zmq.RCVHWM, queued)
    return socket


def exchange_front(max_frame_bytes: int, overflow: Overflow) -> zmq.Socket[bytes]:
    """XSUB that takes publishers' frames. No ZMTP heartbeat: while a queue blocks, its silence is not death.

    DROP: few frames are queued inside. One thread of ZeroMQ reads them in and writes those at the back out, so what it can't
    bring in leaves it time to write, and a burst of small frames does not overrun the back.
    """
    queued = DATA_FRAMES_QUEUED if overflow is Overflow.BLOCK else FRONT_FRAMES_QUEUED
    socket = _data(zmq.XSUB, max_frame_bytes, queued)
    socket.set(zmq.HEARTBEAT_IVL, 0)
    return socket


def exchange_back(max_frame_bytes: int, overflow: Overflow) -> zmq.Socket[bytes]:
    """XPUB that feeds subscribers; BLOCK: waits for a full one, DROP: drops for it. max_frame_bytes: the queue's. DROP: the
    larger its frames may be, the fewer are queued: the mark counts frames, and can't be changed while subscribers are here.

    Only with BLOCK it sends ZMTP heartbeats: they end the connection of one that shows no sign of life for 10 s, so that the
    others can go on. With DROP nobody waits, and a PING is a risk for whoever is full, see subscriber_socket.
    """
    queued = DATA_FRAMES_QUEUED
    if overflow is Overflow.DROP:
        queued = max(queued, min(BACK_FRAMES_QUEUED, BACK_BYTES_QUEUED // max_frame_bytes))
    socket = _data(zmq.XPUB, SUBSCRIPTION_BYTES_MAX, queued)
    socket.set(zmq.XPUB_NODROP, 1 if overflow is Overflow.BLOCK else 0)
    socket.set(zmq.HEARTBEAT_IVL, BLOCKING_INTERVAL_MS if overflow is Overflow.BLOCK else 0)
    socket.set(zmq.HEARTBEAT_TIMEOUT, BLOCKING_TIMEOUT_MS)
    _keep_alive(socket)
    return socket


def _keep_alive(socket: zmq.Socket[bytes]) -> None:
    socket.set(zmq.TCP_KEEPALIVE_IDLE, QUIET_SECONDS)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, PROBE_SECONDS)
    socket.set(zmq.TCP_KEEPALIVE_CNT, PROBES)


def publisher_socket() -> zmq.Socket[bytes]:
    """XPUB that connects to one Exchange's front: a refused send is seen (NODROP), the peer's subscription is its welcome,
    its unsubscription the end. It never reconnects by itself: what follows a lost link is decided, not left to chance."""
    socket = probe_socket()
    socket.set(zmq.RECONNECT_IVL, -1)
    return socket


def probe_socket() -> zmq.Socket[bytes]:
    """Like a publisher's, for the Monitor's probes: it reconnects for ever."""
    socket = _data(zmq.XPUB, CONTROL_BYTES_MAX, DATA_FRAMES_QUEUED)
    socket.set(zmq.XPUB_NODROP, 1)
    socket.set(zmq.HEARTBEAT_IVL, 0)
    return socket


def subscriber_socket(max_frame_bytes: int) -> zmq.Socket[bytes]:
    """SUB that connects to one Exchange's back. Few frames are queued inside: the SDK's own buffer counts bytes."""
    socket = _data(zmq.SUB, max_frame_bytes, SUBSCRIBER_FRAMES_QUEUED)
    # libzmq 4.3.5 aborts the process ("!_io_error", stream_engine_base.cpp:310) when it writes a PING or PONG on a connection
    # that ended while its input was stopped, as a full SUB's is. So a SUB sends no PING; `Attachment.show_life` stands in.
    socket.set(zmq.HEARTBEAT_IVL, 0)
    _keep_alive(socket)
    return socket


def inproc_pair(endpoint: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Two connected PAIR sockets inside this process: the control line of a proxy. Nothing lingers at close."""
    near, far = context().socket(zmq.PAIR), context().socket(zmq.PAIR)
    for end in (near, far):
        end.set(zmq.LINGER, 0)
    far.bind(endpoint)
    near.connect(endpoint)
    return near, far


def zeromq_versions() -> dict[str, str]:
    """Versions of the C library and of its binding."""
    return {"libzmq": zmq.zmq_version(), "pyzmq": zmq.__version__}


def bind(socket: zmq.Socket[bytes], address: str, port: int) -> int:
    """Bind to tcp address:port (0: any free port); the port bound. Raises PortTaken."""
    socket.set(zmq.BACKLOG, LISTEN_BACKLOG)
    try:
        if port == 0:
            return socket.bind_to_random_port(f"tcp://{address}")
        socket.bind(f"tcp://{address}:{port}")
        return port
    except zmq.ZMQError as error:
        raise PortTaken(f"can't bind {address}:{port}: {error}") from error


class Link:
    """One socket on the running asyncio loop. `on_message` gets the parts of each message, in order; `on_drained` is called
    after the last one that is there just now, in the same turn of the loop.

    `send` never blocks: what the socket can't take now waits in a backlog (at most CONTROL_MESSAGES_QUEUED messages,
    beyond which the message is refused) and leaves when the socket can take it.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[bytes]], None] | None = None,
        on_drained: Callable[[], None] | None = None,
    ) -> None:
        self.socket = socket
        self._on_message, self._on_drained = on_message, on_drained
        self._loop = asyncio.get_running_loop()
        self._backlog: deque[Sequence[bytes]] = deque()
        self._fd = int(socket.get(zmq.FD))
        self._closed = self._looking = self._reading = False
        self._loop.add_reader(self._fd, self._ready)
        self._loop.call_soon(self._ready)  # the descriptor only tells news; look once at what is there already

    def send(self, parts: Sequence[bytes]) -> bool:
        """Send or queue one message; False if the backlog is full (the message is dropped)."""
        if self._closed:
            return False
        if self._backlog or not self._try_send(parts):
            if len(self._backlog) >= CONTROL_MESSAGES_QUEUED:
                return False
            self._backlog.append(parts)
        if not (self._looking or self._reading):
            self._look_again()
        return True

    def _look_again(self) -> None:
        """Sending and asking may have swallowed the descriptor's word of news."""
        news = int(self.socket.get(zmq.EVENTS)) & POLLIN
        if self._flush() or news:
            self._looking = True
            self._loop.call_soon(self._look)

    def _flush(self) -> bool:
        """Send what waits, as far as it can be; True if something could."""
        waiting, backlog = len(self._backlog), self._backlog
        while backlog and self._try_send(backlog[0]):
            backlog.popleft()
        return len(backlog) < waiting

    def _look(self) -> None:
        self._looking = False
        self._ready()

    def _try_send(self, parts: Sequence[bytes]) -> bool:
        """False: not now."""
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _ready(self) -> None:
        if self._closed:
            return
        self._reading = True
        try:
            self._flush()
            if self._read() and self._on_drained is not None:
                self._on_drained()
        finally:
            self._reading = False
        if not (self._closed or self._looking):
            self._look_again()

    def _read(self) -> int:
        """Hand over what is there; how many messages."""
        on_message = self._on_message
        for count in range(DRAIN_AT_ONCE):
            if self._closed or not int(self.socket.get(zmq.EVENTS)) & POLLIN:
                return count
            parts = self.socket.recv_multipart(zmq.NOBLOCK)
            if on_message is not None:
                on_message(parts)
        return DRAIN_AT_ONCE

    def close(self) -> None:
        """Stop reading and close the socket. What is queued inside ZeroMQ leaves within LINGER_MS."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self.socket.close()
