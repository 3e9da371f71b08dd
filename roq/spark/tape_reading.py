"""The tapes of one recorded queue as a Spark process reads them: straight from the stores, by range of entries.

On the driver: which tapes there are, where a query begins, where they end now. In a task: the rows of one range, always the
same ones. Frames are taken as the Exchange wrote them, so order is a tape's; what a subscriber does beyond (paths, moves,
gaps) is not done here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from datetime import datetime
from types import TracebackType
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, LongType, MapType, StringType, StructField, StructType, TimestampType

from roq.client.rows import MessageRows
from roq.coordination.locate import GcmClient
from roq.errors import DataLost, FrameError, InvalidPosition, LogTrimmed, LogUnavailable
from roq.log.replicated.reader import Entry
from roq.log.replicated.stores import StaticDirectory, Stores
from roq.pubsub.start import time_ms
from roq.pubsub.subscription import TopicFilter
from roq.pubsub.tape import TAPE_ENTRIES_MAX, Tape
from roq.pubsub.tape_looks import describe_tapes
from roq.runtime.backoff import delays
from roq.runtime.loop_thread import LoopThread
from roq.spark.tape_offsets import SeenNumbers, TapeRange
from roq.spark.tape_options import EARLIEST, LATEST, Place, TapeOptions
from roq.wire import frame as frames
from roq.wire import store
from roq.wire.frame import FrameKind
from roq.wire.recording import TapePosition, decode_entry, encode_entry
from roq.wire.where import Where

SCHEMA = StructType([
    StructField("topic", StringType(), nullable=False),
    StructField("payload", BinaryType(), nullable=False),
    StructField("publisher", LongType(), nullable=False),
    StructField("sequence", LongType(), nullable=False),
    StructField("timestamp", TimestampType(), nullable=False),
    StructField("headers", MapType(StringType(), BinaryType(), valueContainsNull=True), nullable=False),
])  # fmt: skip
ARROW = to_arrow_schema(SCHEMA, timezone="UTC")
BATCH_ROWS = 16_384
BATCH_BYTES = 16 * 1024 * 1024
REQUEST_SECONDS = 15.0
LOOK_SECONDS = 1.0  # between two looks at which tapes there are
END_SECONDS = 3.0  # for a store to say how far it knows
NOTHING = encode_entry(0, ())  # an entry
PATIENCE_SECONDS = 60.0  # for stores to give what they said is confirmed; then Spark tries the task again
T = TypeVar("T")
log = logging.getLogger(__name__)


class QueueTapes:
    """On one loop; `await look()` first."""

    def __init__(self, client: GcmClient, queue: str, topics: TopicFilter) -> None:
        """topics: `entries` may leave out what has none of them."""
        self._client, self._queue, self._topics = client, queue, topics
        self.name = ""  # the queue's part of their names
        self.tapes: dict[str, Tape] = {}  # by Exchange
        self.live: set[str] = set()  # Exchanges that the queue has
        self._directory = StaticDirectory({})
        self._stores = Stores(self._directory)
        self._looked = 0.0

    def close(self) -> None:
        """Let go."""
        self._stores.close()
        self._client.close()

    async def look(self, older_than: float = 0.0) -> None:
        """Which tapes there are, unless that was seen so many seconds ago. Raises QueueNotFound, NotRecorded, InvalidPosition
        (another queue has this name now), Unavailable."""
        if self._looked and time.monotonic() - self._looked < older_than:
            return
        found = await describe_tapes(self._client, self._queue, REQUEST_SECONDS)
        if self.name not in ("", found.tapes):
            raise InvalidPosition(f"queue {self._queue!r} was removed and created anew: begin with a new checkpoint")
        self.name, self._looked = found.tapes, time.monotonic()
        self._directory.endpoints.update(found.stores)
        self._directory.alive.update(found.stores)
        self.live = {view.exchange for view in found.views if view.live}
        for view in found.views:
            if view.exchange in self.tapes:
                self.tapes[view.exchange].update(view)
            else:
                tape = self.tapes[view.exchange] = Tape(view, self._stores, (self._queue, found.made_by))
                if not self._topics.takes_all:
                    tape.select(self._topics.wants)
        for exchange in self.tapes.keys() - {view.exchange for view in found.views}:
            del self.tapes[exchange]

    async def at(self, place: Place) -> dict[str, int]:
        """Entries before that place, by Exchange. Raises InvalidPosition, LogUnavailable."""
        if place == LATEST:
            return await self.ends()
        if isinstance(place, TapePosition):
            place.check_queue(self.name)
            for exchange, tape in self.tapes.items():
                tape.begin_behind(place.done.get(exchange, 0))
            return {exchange: tape.done for exchange, tape in self.tapes.items()}
        for tape in self.tapes.values():
            tape.done = tape.metadata.trimmed
        if isinstance(place, datetime):
            await asyncio.gather(*(tape.seek(time_ms(place)) for tape in self.tapes.values()))
        else:
            assert place == EARLIEST
        return {exchange: tape.done for exchange, tape in self.tapes.items()}

    async def ends(self) -> dict[str, int]:
        """The last confirmed entry of every tape, as far as its stores know. Raises LogUnavailable: of one, none answers."""
        tapes = list(self.tapes.values())
        return dict(zip((tape.exchange.id for tape in tapes), await asyncio.gather(*map(self._end, tapes)), strict=True))

    async def _end(self, tape: Tape) -> int:
        if not tape.is_open:
            return tape.metadata.next_first - 1
        segment = tape.metadata.segments[-1]
        last = segment.fragments[-1]  # what lies before it is confirmed
        request = store.Read(segment.id, TAPE_ENTRIES_MAX + segment.first, 0, 0.0, *tape.of_queue)
        asked = (self._stores.request(node, request, store.Entries, END_SECONDS) for node in last.nodes)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        known = [answer.confirmed for answer in answers if isinstance(answer, store.Entries)]
        if not known:
            raise LogUnavailable(
                f"the end of the tape of Exchange {tape.exchange.id}: none of {', '.join(last.nodes)} answers now"
            )
        return max(last.first - 1, *known)

    async def news(self, ends: dict[str, int], seconds: float) -> None:
        """Return when a store knows more than that, or after so long."""
        waits: list[asyncio.Future[Any]] = []
        for exchange, end in ends.items():
            tape = self.tapes.get(exchange)
            if tape is not None and tape.is_open:
                waits.append(asyncio.ensure_future(tape.read_from(tape.metadata, end, seconds)))
        waits.append(asyncio.ensure_future(asyncio.sleep(seconds)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def entries(self, exchange: str, after: int, last: int) -> list[Entry]:
        """Some entries, at least one, of those behind `after` up to `last`, all of which were confirmed; what lies between them
        has none of the topics. Raises LogTrimmed (the next one has expired), DataLost, LogUnavailable."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        reason = ""
        for pause in delays(0.05, 1.0):
            tape = self.tapes.get(exchange)
            if tape is None:
                raise LogTrimmed(f"the tape of Exchange {exchange} has expired")
            try:
                run = await tape.read_on(tape.metadata, after, last=last)
                if run:
                    return [entry for entry in run if entry[0] <= last] or [(last, NOTHING)]
                reason = "its stores don't know yet that it is confirmed"
            except DataLost as error:
                await self.look()
                if exchange in self.tapes and after >= self.tapes[exchange].metadata.trimmed:
                    raise
                reason = str(error)
            except LogUnavailable as error:
                reason = str(error)
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(pause)  # a store hears a little later, is started again, or the segment was copied elsewhere
            await self.look()
        raise LogUnavailable(f"entry {after + 1} of the tape of Exchange {exchange} can't be read now: {reason}")


class TapeLink:
    """QueueTapes for plain code: a loop in a thread of its own. A context manager. Raises as `look`."""

    def __init__(self, options: TapeOptions) -> None:
        self._loop = LoopThread("roq-tapes", ended="the tapes are closed")
        try:
            self.tapes = self.call(self._opened(options))
        except BaseException:
            self._loop.stop()
            raise

    async def _opened(self, options: TapeOptions) -> QueueTapes:
        tapes = QueueTapes(GcmClient(options.zookeeper), options.queue, TopicFilter(options.topics))
        try:
            await tapes.look()
        except BaseException:
            tapes.close()
            raise
        return tapes

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result."""
        return self._loop.call(work)

    def close(self) -> None:
        """Let go."""

        async def work() -> None:
            self.tapes.close()

        self.call(work())
        self._loop.stop()

    def __enter__(self) -> TapeLink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class FrameRows:
    """Frames become rows: of the wanted topics, and of what a publisher sent again on this tape only the first. where: what is
    in a row has to meet it; "" for no condition."""

    def __init__(self, topics: tuple[str, ...], where: str = "") -> None:
        self.rows = MessageRows()
        self._filter, self._seen = TopicFilter(topics), SeenNumbers()
        self._where = Where(where) if where else None

    def take(self, frame: bytes) -> None:
        """Whatever is no message leaves no row; what can't be read is logged, as subscribers do."""
        try:
            topic, header, body = frames.parse(frame)
            if header.kind == FrameKind.DATA:
                self._take_data(topic, header, body)
            elif header.kind == FrameKind.BUNDLE:
                for part in frames.bundle_body(body):
                    self.take(part)
        except FrameError as error:
            log.warning("a frame on the tape can't be read and is left out: %s", error)

    def _take_data(self, topic: bytes, header: frames.Header, body: memoryview) -> None:
        if not 0 < header.count <= len(body):
            raise FrameError(f"{header.count} payloads in {len(body)} bytes")
        items = frames.payloads(header, body) if self._filter.wants(topic) else None
        numbers = self._seen.new(header.publisher, header.sequence, header.count)
        if items is None or not numbers:
            return
        if len(numbers) < header.count:
            items = [items[number - header.sequence] for number in numbers]
        name = topic.decode()
        if self._where is not None:
            chosen = [pair for pair in zip(numbers, items, strict=True) if self._meets(name, header, pair[1])]
            numbers, items = [number for number, _ in chosen], [item for _, item in chosen]
        self.rows.add(name, header.publisher, header.timestamp, numbers, items)

    def _meets(self, topic: str, header: frames.Header, item: frames.Item) -> bool:
        assert self._where is not None
        payload, headers = (item, None) if isinstance(item, bytes) else item
        return self._where.matches(payload, headers, topic=topic, publisher=header.publisher, timestamp=header.timestamp)

    def batch(self) -> pa.RecordBatch:
        """As Spark wants it, and begin the next one. Numbers above 2**63 are negative there."""
        found, self.rows = self.rows.batch(), MessageRows()
        columns = [
            found["topic"],
            found["payload"],
            found["publisher"].view(pa.int64()),
            found["sequence"].view(pa.int64()),
            found["timestamp"].cast(pa.timestamp("us", "UTC"), safe=False),
            found["headers"].cast(ARROW.field("headers").type),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=ARROW)


def range_rows(options: TapeOptions, name: str, part: TapeRange) -> Iterator[pa.RecordBatch]:
    """In a task: the rows of a range. name: the queue's part of its tapes' names. Raises DataLost (some have expired, or are
    damaged), InvalidPosition, Unavailable, LogUnavailable."""
    taking, after = FrameRows(options.topics, options.where), part.after
    with TapeLink(options) as link:
        check_same(link.tapes, name)
        while after < part.last:
            try:
                run = link.call(link.tapes.entries(part.exchange, after, part.last))
            except LogTrimmed:
                after = _passed_over(options, link.tapes, part, after)
                continue
            for position, entry in run:
                for frame in decode_entry(entry).frames:
                    taking.take(frame)
                    if len(taking.rows) >= BATCH_ROWS or taking.rows.bytes >= BATCH_BYTES:
                        yield taking.batch()
                after = position
    if len(taking.rows):
        yield taking.batch()


def check_same(tapes: QueueTapes, name: str) -> None:
    """Raises InvalidPosition: the queue was removed and created anew."""
    if tapes.name != name:
        raise InvalidPosition("the queue was removed and created anew since this was planned: begin with a new checkpoint")


def _passed_over(options: TapeOptions, tapes: QueueTapes, part: TapeRange, after: int) -> int:
    tape = tapes.tapes.get(part.exchange)
    reached = part.last if tape is None else min(tape.metadata.trimmed, part.last)
    expired(options, part.exchange, after, reached)
    return reached


def expired(options: TapeOptions, exchange: str, after: int, last: int) -> None:
    """Entries that were to be read are gone. Raises DataLost unless the options allow that."""
    what = f"entries {after + 1} to {last} of the tape of Exchange {exchange} have expired before they were read"
    if options.fail_on_loss:
        raise DataLost(f'{what}: record the queue for longer, or go on without them with .option("failOnDataLoss", false)')
    log.warning("%s", what)
