"""What a JetStream stream delivers, from some position on, as it comes: on a loop, for threads that read.

An ephemeral push consumer sends entries in order, heartbeats when there are none, and flow control. When one is missing,
nothing is heard for a while, or the connection was made anew, another consumer begins behind what came last. When nobody reads
what came, the consumer ends, until somebody reads again.

A consumer begins with the entry that came last, so that a stream that is another one by now is noticed (joint.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from threading import Condition
from typing import Any

import nats.errors
from nats.js import api

from roq.errors import StorageFailed
from roq.log.contract import LogEntry
from roq.log.joint import Joint, mark_of

BUFFER_BYTES_MAX = 16 * 1024 * 1024  # nobody reads
HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 3.5  # without any: it is gone
CREATE_SECONDS = 5.0
REPLY_FIELDS = 9  # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<ns>.<pending>; a domain adds some

logger = logging.getLogger(__name__)


class StreamTail:
    """connection, context: nats-py's client and JetStream context. joint: told when the stream is another one. came: told of
    every entry, before it can be taken; began: of the server's time, ms, when a consumer begins. Coroutines run on the
    connection's loop; `take` and `wait` in any other thread."""

    def __init__(
        self,
        connection: Any,
        context: Any,
        stream: str,
        name: str,
        joint: Joint,
        came: Callable[[LogEntry], None],
        began: Callable[[int], None],
    ) -> None:
        self._connection, self._context, self._stream, self._name = connection, context, stream, name
        self._joint, self._came, self._began = joint, came, began
        self._changed = Condition()
        self._entries: deque[LogEntry] = deque()  # in a row as the stream has them
        self._bytes = 0
        self._last = 0  # position behind which the consumer goes on
        self._mark: bytes | None = None  # of the entry there, if it is known
        self._joining = False  # it has not come to this one yet
        self._subscription: Any = None
        self._consumed = 0  # messages of this consumer
        self._heard = 0.0  # monotonic
        self._starting = asyncio.Lock()
        self._closed = False

    # --- for threads that read ------------------------------------------------------------------------------------------

    def take(self, after: int, bytes_max: int) -> list[LogEntry]:
        """What has come behind `after`; they may not be what follows it directly. Each is taken once."""
        found: list[LogEntry] = []
        size = 0
        with self._changed:
            while self._entries and self._entries[0].position <= after:
                self._bytes -= len(self._entries.popleft().data)
            while self._entries and (not found or size + len(self._entries[0].data) <= bytes_max):
                found.append(self._entries.popleft())
                size += len(found[-1].data)
            self._bytes -= size
        return found

    def follows(self, after: int) -> bool:
        """Whether what comes next, or has come, is what is behind `after`."""
        with self._changed:
            if self._entries:
                return self._entries[0].position == after + 1
            return self._subscription is not None and self._last == after

    def wait(self, seconds: float) -> bool:
        """Sleep until something has come, for so long at most; whether there is."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._entries) or self._closed, seconds)
            return bool(self._entries)

    @property
    def is_on(self) -> bool:
        """Whether a consumer delivers."""
        return self._subscription is not None

    # --- on the loop ----------------------------------------------------------------------------------------------------

    async def start(self, after: int) -> None:
        """Have what is behind `after` come, whatever came before. Raises what the client does."""
        mark = self._joint.mark(after)
        async with self._starting:
            await self._stop()
            with self._changed:
                self._entries.clear()
                self._bytes, self._last, self._mark = 0, after, mark
            await self._subscribe()

    async def go_on(self) -> None:
        """The same behind what came last; what has come stays."""
        async with self._starting:
            await self._stop()
            await self._subscribe()

    async def _subscribe(self) -> None:
        inbox = self._connection.new_inbox()
        self._consumed, self._heard, self._joining = 0, time.monotonic(), self._mark is not None

        async def take_in(message: Any) -> None:
            if self._subscription is not None and self._subscription.subject == inbox:
                await self._take_in(message)

        self._subscription = await self._connection.subscribe(inbox, cb=take_in)
        config = api.ConsumerConfig(
            deliver_subject=inbox,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self._last if self._joining else self._last + 1,
            ack_policy=api.AckPolicy.NONE,
            max_deliver=1,
            flow_control=True,
            idle_heartbeat=HEARTBEAT_SECONDS,
            mem_storage=True,
            num_replicas=1,
        )
        info = await self._context.add_consumer(self._stream, config, timeout=CREATE_SECONDS)
        if info.created is not None:
            self._began(int(info.created.timestamp() * 1000))

    async def _take_in(self, message: Any) -> None:
        self._heard = time.monotonic()
        headers = message.headers or {}
        if headers.get(api.Header.STATUS):
            if message.reply:  # flow control: go on
                await self._connection.publish(message.reply)
            elif int(headers.get("Nats-Last-Consumer", self._consumed)) > self._consumed:
                await self._lost()
            return
        fields = message.reply.split(".")
        position, consumed, ns = map(int, fields[5:8] if len(fields) == REPLY_FIELDS else fields[7:10])
        if consumed != self._consumed + 1:
            await self._lost()
            return
        entry = LogEntry(position, ns // 1_000_000, message.data)
        self._consumed = consumed
        if self._joining and position <= self._last:  # before it: the server that delivers lagged as the consumer began
            if position == self._last:
                await self._join(entry)
            return
        self._joining = False
        self._came(entry)
        with self._changed:
            self._last, self._mark = position, mark_of(entry)
            self._entries.append(entry)
            self._bytes += len(entry.data)
            crowded = self._bytes > BUFFER_BYTES_MAX
            self._changed.notify_all()
        if crowded:
            await self._stop()

    async def _join(self, entry: LogEntry) -> None:
        """This is where the consumer goes on: at the same entry, or nothing that came counts. If nobody has read it yet, who
        reads next has another consumer begin."""
        self._joining = False
        if (mark := mark_of(entry)) == self._mark:
            return
        await self._stop()
        with self._changed:
            self._entries.clear()
            self._bytes = 0
        try:
            self._joint.compare(self._joint.mark(entry.position), mark)
        except StorageFailed as error:
            logger.error("%s", error)

    async def _lost(self) -> None:
        """Something did not come: read again behind what did, not within the callback, which ends with its subscription."""
        logger.debug("%s: a delivery was lost; asked for again", self._name)
        self._heard = 0.0

    async def watch(self) -> None:
        """Read again whenever nothing is heard. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS / 4)
            silent = self._subscription is not None and time.monotonic() - self._heard > SILENT_SECONDS
            if silent and self._connection.is_connected:
                try:
                    await self.go_on()
                except (TimeoutError, nats.errors.Error) as error:
                    logger.warning("%s: no notice of new entries, connecting again: %s", self._name, error)
                    self._heard = time.monotonic()

    async def _stop(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()  # the server removes the consumer then

    def close(self) -> None:
        """Wake who waits, for good."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
