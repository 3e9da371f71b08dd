"""Messages of a queue on their way to one reader over HTTP: what waits for it is bounded.

    live     publishers wait for subscribers, or messages are dropped: so the subscriber is always read, and a reader that is
             WAITING_BYTES_MAX behind is cut with the reason
    stored   what was recorded is read from the stores alone: nobody waits for it, so the subscriber waits for the reader

Not covered: how they travel (message_routes.py).
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import NamedTuple

import msgspec

from roq.cli.headers import headers_row
from roq.console.context import Visit, until_ended
from roq.errors import MessagesLost, RoqError
from roq.pubsub.start import LIVE, Start
from roq.pubsub.subscriber import OPEN_SECONDS, Subscriber
from roq.pubsub.subscription import Message
from roq.runtime.observe import logger

WAITING_BYTES_MAX = 8 * 1024 * 1024
POSITION_SECONDS = 1.0  # between two positions that are told
FAILED = "the console failed: its log says how"
READY, MESSAGE, LOST, CUT, PLACE = "ready", "message", "lost", "cut", "place"
log = logger(__name__)
Piece = tuple[str, bytes]  # name of the event, JSON; of a PLACE the text of a position


class StreamedMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """text, or base64 where the payload is no UTF-8. time: when its batch was opened, Unix seconds. publisher: 16 hexadecimal
    digits; sequence: of its messages."""

    topic: str
    publisher: str
    sequence: int
    time: float
    text: str | None = None
    base64: str | None = None
    headers: dict[str, str] = {}


class LostMessages(msgspec.Struct, frozen=True):
    """Messages that can't be had any more; publisher 0: entries of a tape that had expired, from first to last."""

    publisher: str
    topic: str
    first: int
    last: int
    count: int
    detail: str


class StreamRequest(NamedTuple):
    """What a reader wants."""

    queue: str
    topics: tuple[str, ...]
    where: str
    start: Start

    @property
    def live(self) -> bool:
        """Nothing of the past."""
        return self.start == LIVE


def streamed(message: Message) -> bytes:
    """As JSON."""
    text, encoded = None, None
    try:
        text = message.payload.decode()
    except UnicodeDecodeError:
        encoded = base64.b64encode(message.payload).decode()
    return msgspec.json.encode(
        StreamedMessage(
            message.topic,
            f"{message.publisher:016x}",
            message.sequence,
            message.timestamp / 1e9,
            text,
            encoded,
            headers_row(message.headers),
        )
    )


class ReaderBuffer:
    """Of one reader."""

    def __init__(self) -> None:
        self._waiting: deque[Piece] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self.ended = False

    def offer(self, piece: Piece) -> None:
        """Or cut the reader."""
        if self.ended:
            return
        self._waiting.append(piece)
        self._bytes += len(piece[1])
        self._changed.set()
        if self._bytes > WAITING_BYTES_MAX:
            self.end(f"{len(self._waiting)} messages were not read in time")

    def lost(self, loss: MessagesLost) -> None:
        """A gap that can't be closed."""
        told = LostMessages(f"{loss.publisher:016x}", loss.topic, loss.first, loss.last, loss.count, str(loss))
        self.offer((LOST, msgspec.json.encode(told)))

    def end(self, reason: str) -> None:
        """What waits is dropped; the last piece says why."""
        if self.ended:
            return
        self._waiting.clear()
        self._bytes, self.ended = 0, True
        self._waiting.append((CUT, msgspec.json.encode({"reason": reason})))
        self._changed.set()

    async def room(self) -> None:
        """Until half of what may wait does."""
        while self._bytes > WAITING_BYTES_MAX // 2 and not self.ended:
            self._changed.clear()
            await self._changed.wait()

    async def next(self) -> Piece:
        """In order; the last one is a CUT."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        name, data = self._waiting.popleft()
        self._bytes -= len(data)
        self._changed.set()
        return name, data


async def pieces(visit: Visit, asked: StreamRequest) -> AsyncGenerator[Piece, None]:
    """READY, then what comes, until a CUT. Raises before READY what opening a subscriber raises."""
    outlet = ReaderBuffer()
    follow: bool | str = True if asked.live else "stored"
    subscriber = visit.source.cluster.subscriber(
        asked.queue, *asked.topics, on_lost=outlet.lost, start=asked.start, follow=follow, where=asked.where
    )
    async with subscriber:
        if asked.live:
            await subscriber.ready(OPEN_SECONDS)
        yield READY, b"{}"
        tasks = [asyncio.create_task(_pump(subscriber, outlet, asked.live)), asyncio.create_task(_end(visit, outlet))]
        try:
            while True:
                piece = await outlet.next()
                yield piece
                if piece[0] == CUT:
                    return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(subscriber: Subscriber, outlet: ReaderBuffer, live: bool) -> None:
    told = time.monotonic()
    try:
        async for batch in subscriber.batches():
            now = time.monotonic()
            if not live and now - told >= POSITION_SECONDS and subscriber.position is not None:
                outlet.offer((PLACE, str(subscriber.position).encode()))  # behind the batch before this one
                told = now
            for message in batch:
                if not live:
                    await outlet.room()
                outlet.offer((MESSAGE, streamed(message)))
        outlet.end("the subscriber was closed")
    except RoqError as error:
        outlet.end(f"{type(error).__name__}: {error}")
    except Exception:
        log.exception("a stream of messages failed", extra={"fields": {"queue": subscriber.queue}})
        outlet.end(FAILED)


async def _end(visit: Visit, outlet: ReaderBuffer) -> None:
    try:
        outlet.end(await until_ended(visit))
    except Exception:
        log.exception("whether a stream may go on is not known", extra={"fields": {"person": visit.person.name}})
        outlet.end(FAILED)
