"""A DEALER on the loop's own connection to one endpoint: the other side of router.py, for many small messages.

It connects again for ever. What is sent while there is no connection waits, at most CONTROL_MESSAGES_QUEUED messages and
about WAITING_BYTES_MAX bytes; what was on its way when a connection ended is lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from roq.errors import FrameError
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.runtime.router import WAITING_BYTES_MAX, tune
from roq.wire import zmtp
from roq.wire.limits import CONTROL_MESSAGES_QUEUED

CONNECT_SECONDS = 5.0
RECONNECT_SECONDS, RECONNECT_MAX_SECONDS = 0.02, 1.0
_HELLO = zmtp.hello(b"DEALER")

log = logger(__name__)


class Dealer(asyncio.Protocol):
    """endpoint: tcp://host:port. on_message([part, …]); on_ended(): the connection ended or was refused."""

    def __init__(self, endpoint: str, on_message: Callable[[list[bytes]], None], on_ended: Callable[[], None]) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._on_message, self._on_ended = on_message, on_ended
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._parser = zmtp.Parser()
        self._lost = asyncio.Event()
        self._closed = False
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
        self._parser = zmtp.Parser()
        made = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        if self._closed:
            made.abort()
            return
        tune(made.get_extra_info("socket"))
        self._transport = made
        made.write(_HELLO)
        self._loop.call_later(CONNECT_SECONDS, self._overdue, self._parser, made)

    def _overdue(self, parser: zmtp.Parser, transport: asyncio.Transport) -> None:
        if not parser.ready:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """For the loop."""
        transport = self._transport
        if transport is None:
            return
        try:
            messages = self._parser.feed(data)
        except FrameError as error:
            log.info("connection failed", extra={"fields": {"reason": str(error)}})
            transport.abort()
            return
        if self._backlog and self._parser.ready:
            transport.writelines([*map(zmtp.frame, self._backlog)])
            self._backlog.clear()
            self._backlog_bytes = 0
        if self._parser.pongs:
            transport.writelines(self._parser.pongs)
            self._parser.pongs.clear()
        for parts in messages:
            if self._closed:
                return
            self._on_message(parts)

    def connection_lost(self, error: Exception | None) -> None:
        """For the loop."""
        self._transport = None
        self._lost.set()
        if not self._closed:
            self._on_ended()

    def send(self, parts: Sequence[bytes]) -> bool:
        """One message of one part, now or when there is a connection; False if too much waits."""
        transport = self._transport
        if self._closed:
            return False
        if transport is None or not self._parser.ready:
            if len(self._backlog) >= CONTROL_MESSAGES_QUEUED or self._backlog_bytes > WAITING_BYTES_MAX:
                return False
            self._backlog.append(parts[0])
            self._backlog_bytes += len(parts[0])
            return True
        if transport.get_write_buffer_size() > WAITING_BYTES_MAX:
            return False
        transport.write(zmtp.frame(parts[0]))
        return True

    def close(self) -> None:
        """Give the connection up once what was sent has left."""
        if self._closed:
            return
        self._closed = True
        self._connecting.cancel()
        if self._transport is not None:
            self._transport.close()
