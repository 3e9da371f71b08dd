"""One client's connection: bytes to frames, frames to the coordinator, replies back when what they tell is durable.

Everything is bounded: a frame like ZooKeeper's (jute.maxbuffer), replies that wait, by number and bytes: above that nothing
more is read from this client; and what it does not read, by bytes: then it is dropped. Not covered: what a request does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol, cast

from roq.errors import FrameError
from roq.runtime.observe import logger
from roq.runtime.sockets import tune
from roq.wire.jute import FRAME_BYTES_MAX

log = logger(__name__)

WAITING_REPLIES_MAX = 1_000  # that are not durable, of one client
WAITING_BYTES_MAX = 1024 * 1024  # of one client, in replies it has not read; more is not asked of the tree
UNREAD_BYTES_MAX = 32 * 1024 * 1024  # the same, with events, which come all the same: the next one costs it the connection
HANDSHAKE_SECONDS = 5.0  # a client that connects and says nothing is dropped
LENGTH_BYTES = 4


class CoordinatorService(Protocol):
    """What a connection needs of the coordinator."""

    def opened(self, connection: Connection) -> bool:
        """A client connected; whether there is room for it."""

    def word(self, connection: Connection, word: bytes) -> bool:
        """The first four bytes, if they are a four-letter word: it is answered."""

    def connect(self, connection: Connection, body: bytes) -> None:
        """The first frame. Raises FrameError."""

    def request(self, connection: Connection, body: bytes) -> None:
        """A later frame. Raises FrameError."""

    def durable(self) -> int:
        """zxid up to which everything is durable."""

    def has_room(self) -> bool:
        """Whether another request may be taken: not while too much waits for the disk."""

    def lost(self, connection: Connection) -> None:
        """The connection ended."""


class Connection(asyncio.Protocol):
    """One client. number: names it as a watcher; session: 0 until it has one."""

    transport: asyncio.Transport

    def __init__(self, service: CoordinatorService, number: int) -> None:
        self._service = service
        self.number = number
        self.session = 0
        self.timeout_seconds = 0.0
        self.peer = ""
        self._held = bytearray()
        self._greeted = self._ended = False
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._paused = False
        self._overdue: asyncio.TimerHandle | None = None

    # --- from the client ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        tune(transport.get_extra_info("socket"))
        host, port = (transport.get_extra_info("peername") or ("", 0))[:2]
        self.peer = f"{host}:{port}"
        self.transport.set_write_buffer_limits(high=WAITING_BYTES_MAX)
        if not self._service.opened(self):
            self.drop("there are too many connections")
            return
        self._overdue = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self._silent)

    def data_received(self, data: bytes) -> None:
        """Some of its bytes."""
        if self._ended:  # what it still gets may wait for the disk; nothing is taken any more
            return
        if not self._held and not self._paused:
            self._held += data[self._take(data) :]  # mostly nothing
        else:
            self._held += data
            self._take_held()

    def _take_held(self) -> None:
        if not self._paused and not self.transport.is_closing():
            del self._held[: self._take(self._held)]

    def _take(self, data: bytes | bytearray) -> int:
        """Hand over every frame that is complete, as long as there is room for the replies; how many bytes they have."""
        at = 0
        try:
            while not self._ended and not self._paused and len(data) - at >= LENGTH_BYTES:
                size = int.from_bytes(data[at : at + LENGTH_BYTES], "big")
                if size > FRAME_BYTES_MAX:
                    if self._greeted or not self._service.word(self, bytes(data[:LENGTH_BYTES])):
                        raise FrameError(f"a frame of {size} bytes; at most {FRAME_BYTES_MAX}")
                    self.end()
                    break
                begin = at + LENGTH_BYTES
                if len(data) - begin < size:
                    break
                if not self._service.has_room():
                    self._hold()
                    break
                at = begin + size
                self._frame(bytes(data[begin:at]))
        except FrameError as error:
            self.drop(str(error))
        return at

    def _frame(self, body: bytes) -> None:
        if self._greeted:
            self._service.request(self, body)
        else:
            self._greeted = True
            if self._overdue is not None:
                self._overdue.cancel()
            self._service.connect(self, body)

    # --- to the client ------------------------------------------------------------------------------------------------

    def send(self, frame: bytes, zxid: int) -> None:
        """A reply or an event, as soon as the transaction `zxid` is durable and all before it has left."""
        if self.transport.is_closing():
            return
        unread = self._unread
        if unread > UNREAD_BYTES_MAX:
            self.drop(f"{unread} bytes wait for it, it does not read")
            return
        if not self._waiting and zxid <= self._service.durable():
            self.transport.write(frame)
        else:
            self._waiting.append((zxid, frame))
            self._waiting_bytes += len(frame)
        self.look()

    @property
    def _unread(self) -> int:
        return self._waiting_bytes + self.transport.get_write_buffer_size()

    def flush(self) -> None:
        """More is durable."""
        durable = self._service.durable()
        while self._waiting and self._waiting[0][0] <= durable:
            frame = self._waiting.popleft()[1]
            self._waiting_bytes -= len(frame)
            self.transport.write(frame)
        if not self._waiting and self._ended:
            self.transport.close()
        self.look()

    @property
    def is_waiting(self) -> bool:
        """Whether something waits: replies to become durable, or requests for room."""
        return bool(self._waiting) or self._paused

    @property
    def is_held_back(self) -> bool:
        """Whether it can't be heard though it reads all it gets: the disk holds it up."""
        return self._paused and not self.transport.get_write_buffer_size()

    def _hold(self) -> None:
        if not self._paused and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def look(self) -> None:
        """Read or don't, as there is room for replies."""
        if self.transport.is_closing():
            return
        if self._unread > WAITING_BYTES_MAX or len(self._waiting) >= WAITING_REPLIES_MAX:
            self._hold()
        elif self._paused and len(self._waiting) < WAITING_REPLIES_MAX // 2 and self._service.has_room():
            self._paused = False
            self.transport.resume_reading()
            asyncio.get_running_loop().call_soon(self._take_held)

    def resume_writing(self) -> None:
        """The client has read much of what waited."""
        self.look()

    # --- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Close when all that waits has left; nothing more is taken."""
        self._ended = True
        self._held.clear()
        if not self._waiting:
            self.transport.close()

    def drop(self, reason: str) -> None:
        """Close at once, and tell why."""
        if not self._ended:
            fields = {"peer": self.peer, "session": f"{self.session:#x}", "reason": reason}
            log.warning("client connection closed", extra={"fields": fields})
        self._ended = True
        self._waiting.clear()
        self._waiting_bytes = 0
        self.transport.abort()

    def _silent(self) -> None:
        if not self._greeted and not self._paused:
            self.drop("it connected and said nothing")

    def connection_lost(self, error: Exception | None) -> None:
        """It is gone, or was closed."""
        self._ended = True
        self._waiting.clear()
        if self._overdue is not None:
            self._overdue.cancel()
        self._service.lost(self)
