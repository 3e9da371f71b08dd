"""`roq.read`: what a recorded queue keeps, as Arrow record batches, for programs that work on data.

    with roq.read("roq://zk1:2181/orders", "eu.>", since=timedelta(hours=2)) as batches:
        table = batches.read_all()

Tapes are read as a subscriber with follow=False reads them, on a loop in a thread of its own, a few MiB ahead of who
takes the batches. Not covered: rows (rows.py), Spark, which reads tapes in parallel (roq/spark).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from roq.coordination.link import parse_address
from roq.coordination.locate import ZOOKEEPER_SECONDS, GcmClient
from roq.errors import Closed, FrameError, InvalidAddress, InvalidConfiguration, InvalidPosition, MessagesLost, RoqError
from roq.ids import check_name
from roq.pubsub.links import Attachment
from roq.pubsub.order import FOREVER, Deliver, FrameEvent, Origin, Output
from roq.pubsub.start import LIVE, Start, check_start, time_ms
from roq.pubsub.subscriber import OPEN_SECONDS, Subscriber
from roq.pubsub.subscription import Message, log_lost
from roq.pubsub.tape import SKEW_MS, STEP_MS, Tape
from roq.runtime.installation import brought_by
from roq.runtime.loop_thread import LoopThread
from roq.runtime.security import use_card
from roq.wire import frame as frames
from roq.wire.frame import FrameKind
from roq.wire.recording import TapePosition
from roq.workqueue.address import parse

with contextlib.suppress(ModuleNotFoundError):  # told by who calls `read`: `from roq import *` needs no extra
    import pyarrow as pa

    from roq.client.rows import SCHEMA, MessageRows

BATCH_ROWS = 65_536
BATCH_ROWS_MAX = 10_000_000
BATCH_BYTES = 16 * 1024 * 1024  # payloads and topics: a batch is closed then, whatever its rows
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
UNTIL_SECONDS = SKEW_MS / 1000 + 1.0  # after a time everything is stored, and known to be, that any host's clock puts before it
Until = datetime | timedelta | TapePosition | str | None


def queue_at(address: str, cluster: str | None = None) -> tuple[str, str]:
    """(ZooKeepers, queue) of roq://zk1:2181,zk2:2181/name, or of a name alone in this cluster. Raises InvalidAddress,
    InvalidName, InvalidConfiguration."""
    if isinstance(address, str) and cluster is not None and "://" not in address:
        parse_address(cluster)
        return cluster, check_name(address)
    if not isinstance(address, str) or not address.startswith("roq://"):
        raise InvalidAddress(f"{address!r} names no cluster: roq://zk1:2181,zk2:2181/name does, or a name with cluster=")
    if cluster is not None:
        raise InvalidConfiguration(f"{address!r} names its cluster: leave cluster={cluster!r} out, or give the name alone")
    place = parse(address)
    if place.options.given():
        raise InvalidConfiguration(f"{address!r}: what is behind '?' is for work queues; '?' in a name is %3F")
    return place.zookeeper, place.path


def _end_of(until: Until) -> int | TapePosition | None:
    """A time in milliseconds since 1970, or a position. Raises InvalidConfiguration, InvalidPosition."""
    if until is None or until == "":
        return None
    if isinstance(until, str) and not until.startswith("p1."):
        raise InvalidConfiguration(f"until is a datetime, a timedelta (so long ago) or a position, not {until!r}")
    end = check_start(until)
    if not isinstance(end, datetime | timedelta):
        return end  # type: ignore[return-value]
    end_ms = time_ms(end)
    if end_ms > time.time_ns() // 1_000_000:
        raise InvalidConfiguration(f"until is a time that has passed, not {end}: without it, everything up to now is read")
    return end_ms


class TapeWindow(Subscriber):
    """A subscriber of the past whose iteration ends before the first entry written at a time or later, or behind a position.
    end: of `_end_of`.

    A publisher may have gone over from an Exchange whose clock is ahead to another: what it sent before is written at a later
    time then than what it sent after that, and the end may lie between. So a tape that somebody waits for is read on, for
    the clocks' difference at most, which tells what became of its path. What is there is the next window's, and not handed out.
    Where the window begins at a time it is the same: so much of what is before is read, to know whose paths go on.
    """

    def __init__(
        self,
        client: GcmClient,
        queue: str,
        topics: tuple[str, ...],
        on_lost: Callable[[MessagesLost], None],
        start: Start,
        end: int | TapePosition | None,
        where: str = "",
    ) -> None:
        self._since = max(1, time_ms(start)) if isinstance(start, datetime | timedelta) else 0
        begin = EPOCH + timedelta(milliseconds=self._since) if self._since else start
        super().__init__(client, queue, topics, on_lost, begin, follow=False, where=where)
        self._end, self._ended = end, False
        self._earlier = False  # what is read is the window's before
        if self._past is not None and self._since:
            self._past.tapes.early_ms = SKEW_MS + STEP_MS
        self._later: set[str] = set()  # Exchanges of whose tapes more was read than is handed out
        if isinstance(end, int) and self._past is not None:
            self._past.end_at(end)
            self._order.until_ms = end

    async def open(self, timeout_seconds: float = OPEN_SECONDS) -> Subscriber:
        """See Subscriber. It waits UNTIL_SECONDS behind an end by time. Raises InvalidPosition, too, for one on
        other tapes."""
        if isinstance(self._end, int):
            left = self._end / 1000 + UNTIL_SECONDS - time.time()
            await asyncio.sleep(min(UNTIL_SECONDS, max(0.0, left)))
        await super().open(timeout_seconds)
        if isinstance(self._end, TapePosition):
            try:
                self._end.check_queue(self._tapes, "the position of until")
            except InvalidPosition:
                await self.close(0)
                raise
        self._look_at_end(dict(self._done))
        return self

    def take_recorded(self, tape: Tape, frame: bytes) -> None:
        """See PastReader."""
        if isinstance(self._end, TapePosition) and tape.done >= self._end.done.get(tape.exchange.id, 0):
            return
        if not self._ended:
            super().take_recorded(tape, frame)

    def _take_frame(self, source: Attachment | Tape, frame: bytes) -> None:
        if not self._is_outside(source.origin):
            super()._take_frame(source, frame)
            return
        self._earlier = source.origin[1] < self._since
        if not self._earlier:
            self._later.add(source.exchange.id)
        self._take_outside(source, frame)
        self._earlier = False

    def _is_outside(self, origin: Origin | None) -> bool:
        """Whether it is of another window."""
        end = self._end if isinstance(self._end, int) else FOREVER
        return origin is not None and not self._since <= origin[1] < end

    def _take_outside(self, source: Attachment | Tape, frame: bytes) -> None:
        """Only the order is told of it."""
        try:
            topic, header, body = frames.parse(frame)
            match header.kind:
                case FrameKind.BUNDLE:
                    for part in frames.bundle_body(body):
                        self._take_outside(source, part)
                case FrameKind.DATA if self._filter.wants(topic):
                    self._handle(FrameEvent(topic, header, None, None, len(frame), source.origin))
                case FrameKind.OPEN | FrameKind.FIN:
                    self._control(source, header, body)
        except (FrameError, ValueError) as error:
            self._refusals.note("undecodable", error)

    def _give(self, outputs: list[Output]) -> None:
        super()._give([one for one in outputs if not self._is_others(one)])

    def _is_others(self, output: Output) -> bool:
        return self._is_outside(output.event.origin) if isinstance(output, Deliver) else self._earlier

    def settle(self) -> None:
        """See PastReader."""
        if self._since and self._order.waiting:
            self._earlier = True
            self._give(self._order.go_on_amid(time.monotonic(), self._since))
            self._earlier = False
        super().settle()

    def awaits(self, exchange: str) -> bool:
        """See PastReader. Who goes on with what is the next window's does not count."""
        return self._order.waits_for_older(exchange, self._end if isinstance(self._end, int) else FOREVER)

    def is_done(self) -> None:
        """See PastReader."""
        if isinstance(self._end, int):
            self._order.forget_held(self._end)
        super().is_done()

    def reached(self, exchange: str, entry: int) -> None:
        """See PastReader."""
        if self._ended or exchange in self._later:
            return
        last = self._end.done.get(exchange, 0) if isinstance(self._end, TapePosition) else entry
        super().reached(exchange, min(entry, max(last, self._done.get(exchange, 0))))
        self._look_at_end({**self._done, **self._marks, exchange: entry})

    def _look_at_end(self, done: dict[str, int]) -> None:
        """Of a position: whether all its tapes were read so far. One that has expired altogether is not among `done`."""
        if isinstance(self._end, TapePosition) and all(done.get(one, at) >= at for one, at in self._end.done.items()):
            self._finish()

    def _finish(self) -> None:
        if not self._ended:
            self._ended, past = True, self._past
            self.is_done()
            if past is not None:
                past.close()


class RecordedBatches:
    """What `roq.read` gives: an iterator of pyarrow.RecordBatch with `schema`, which ends at the present; a context manager.
    Everything that takes an Arrow stream takes it (pyarrow, polars, DuckDB, pandas). For one thread at a time. It closes
    itself at its end, and when it is let go of.

    Iteration raises MessagesLost (if `on_lost` does), NotRecorded (the queue was removed meanwhile), DataLost, Closed; what
    came before comes first.
    """

    def __init__(self, client: Callable[[], GcmClient], window: Callable[[GcmClient], TapeWindow], batch_rows: int) -> None:
        self._batch_rows = batch_rows
        self._rest: list[Message] = []
        self._failure: RoqError | None = None
        self._over = False
        self._loop = LoopThread("roq.read", ended="these batches are closed")
        try:
            self._client, self._window = self._loop.call(_opened(client, window))
        except BaseException:
            self._loop.stop()
            raise
        self._let_go = weakref.finalize(self, _end_soon, self._loop, self._client, self._window)
        self._let_go.atexit = False  # the thread is a daemon

    @property
    def schema(self) -> pa.Schema:
        """Of all batches, see roq/client/rows.py."""
        return SCHEMA

    @property
    def position(self) -> TapePosition:
        """Behind what was taken, for `since` of another read: behind the last batch, exactly there; before, that one may get
        some rows again."""
        position = self._window.position
        assert position is not None
        return position

    @property
    def lost(self) -> int:
        """Messages reported as lost so far."""
        return self._window.lost

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        if self._over and self._failure is None:
            raise StopIteration
        try:
            taken = self._loop.call(self._gathered()) if self._failure is None else []
        except BaseException:  # interrupted: what was taken is gone, so there is no going on
            self.close()
            raise
        if not taken:
            failure, self._failure = self._failure, None
            self.close()
            raise failure if failure is not None else StopIteration
        rows = MessageRows()
        for messages in taken:
            first = messages[0]
            items = [(one.payload, one.headers) if one.headers else one.payload for one in messages]
            rows.add(first.topic, first.publisher, first.timestamp, [one.sequence for one in messages], items)
        return rows.batch()

    async def _gathered(self) -> list[list[Message]]:
        """Of one batch; [] at the end."""
        taken: list[list[Message]] = []
        room, size = self._batch_rows, 0
        while room and size < BATCH_BYTES and self._failure is None:
            messages, self._rest = self._rest, []
            if not messages:
                try:
                    messages = await self._window.next_batch() or []
                except RoqError as error:
                    self._failure = error
                if not messages:
                    break
            taken.append(messages[:room])
            self._rest = messages[room:]
            room -= len(taken[-1])
            size += sum(len(message.payload) + len(message.topic) for message in taken[-1])
        return taken

    def read_all(self) -> pa.Table:
        """What is left, in memory."""
        return pa.Table.from_batches(list(self), SCHEMA)

    def reader(self) -> pa.RecordBatchReader:
        """The same as pyarrow's own kind of reader, for what takes no other. Closing that does nothing: close this."""
        return pa.RecordBatchReader.from_batches(SCHEMA, self)

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        return self.reader().__arrow_c_stream__(requested_schema)

    def __enter__(self) -> RecordedBatches:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Read no more. Again: no harm."""
        self._over = True
        if self._let_go.detach() is not None:
            _end(self._loop, self._client, self._window)


async def _opened(make: Callable[[], GcmClient], window: Callable[[GcmClient], TapeWindow]) -> tuple[GcmClient, TapeWindow]:
    client = make()
    try:
        reading = window(client)
        await reading.open()
    except BaseException:
        client.close()
        raise
    return client, reading


def _end(loop: LoopThread, client: GcmClient, window: TapeWindow) -> None:
    async def work() -> None:
        await window.close(0)
        client.close()

    with contextlib.suppress(Closed):
        loop.call(work())
    loop.stop()


def _end_soon(loop: LoopThread, client: GcmClient, window: TapeWindow) -> None:
    """Of what was let go of: in whatever thread that was found out, perhaps the loop's."""
    threading.Thread(target=_end, args=(loop, client, window), name="roq.read ends", daemon=True).start()


def read(
    address: str,
    *topics: str,
    cluster: str | None = None,
    since: Start = "earliest",
    until: Until = None,
    where: str = "",
    batch_rows: int = BATCH_ROWS,
    on_lost: Callable[[MessagesLost], None] = log_lost,
    zookeeper_seconds: float = ZOOKEEPER_SECONDS,
    card: str | Path | None = None,
) -> RecordedBatches:
    """What a recorded queue keeps, as Arrow record batches: topic string, payload binary, publisher uint64, sequence uint64,
    timestamp timestamp[ns, UTC], headers map<string, binary>. Each message once, each publisher's in order.

    address: roq://zk1:2181,zk2:2181/name, or a queue's name: then cluster has the ZooKeeper addresses. topics: filters, none
    means everything. since: "earliest", "last" (the newest message of each topic), a datetime, a timedelta (so long ago), a
    TapePosition or its text. until: a time or a position; what was written to the tapes at that time or later, or lies behind
    that position, is left out; None: up to now. A time has passed; if that was less than 6 s ago, the rest of them is waited
    for. So one window's `until` is the next one's `since`, and no message is in both or in neither, if clocks keep to what
    docs/recorded-queues.md says of them. where: a condition that messages must meet (docs/filters.md). batch_rows: at most; a
    batch of 16 MiB is closed before. on_lost: called in the loop's thread for every gap, see roq.raise_lost. card: see
    roq.connect.

    Raises InvalidAddress, InvalidConfiguration, InvalidPosition, InvalidTopic, InvalidFilter, QueueNotFound, NotRecorded,
    AccessDenied, Unavailable, DeadlineExceeded.
    """
    with brought_by("arrow", "roq.read"):
        import_module("pyarrow")
    zookeeper, queue = queue_at(address, cluster)
    if not isinstance(batch_rows, int) or not 1 <= batch_rows <= BATCH_ROWS_MAX:
        raise InvalidConfiguration(f"batch_rows is 1 to {BATCH_ROWS_MAX}, got {batch_rows!r}")
    check_start(since)
    if since == LIVE:
        raise InvalidConfiguration("since 'live' there is nothing to read; a subscriber gets what comes")
    end = _end_of(until)
    use_card(Path(card) if card is not None else None)
    return RecordedBatches(
        lambda: GcmClient(zookeeper, zookeeper_seconds),
        lambda client: TapeWindow(client, queue, topics, on_lost, since, end, where),
        batch_rows,
    )
