"""The tape of an Exchange: what it forwards is also written to a replicated log, undecoded, entry by entry.

Frames that come in one turn of the loop become one entry, as long as few entries are under way; under load entries grow up to
ENTRY_BYTES. Entries are numbered here from 1; `base` is the position in the log before the first. This process alone writes the
log, so after the writer had to stop (too few stores answered) the next one finds the same entries up to its end, and the rest
is written again, under the same positions. While more than HELD_BYTES wait for stores, publishers wait.

Some positions are for an index of the topics before them (wire/tape_index.py).

Whoever takes the log away from us (LogFenced) has replaced this Exchange: the process ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from roq.coordination import paths
from roq.coordination.link import Check
from roq.coordination.session import Session
from roq.errors import (
    Closed,
    DataLost,
    FrameError,
    LogFenced,
    LogTrimmed,
    LogUnavailable,
    ProcessFailed,
    RoqError,
    StorageFull,
    TemporaryError,
)
from roq.log.replicated.owner import now_ms
from roq.log.replicated.reader import LogReader
from roq.log.replicated.repairer import LogRepairer
from roq.log.replicated.settings import LogSettings, RepairSettings
from roq.log.replicated.stores import StoreDirectory
from roq.log.replicated.writer import LogWriter
from roq.pubsub.exchange.runs import FrameRun
from roq.pubsub.exchange.topic_index import TopicIndexBuilder
from roq.runtime.backoff import delays
from roq.runtime.observe import Counters, logger
from roq.runtime.run import Tasks
from roq.wire import zmtp
from roq.wire.assignment import QueueRecord, from_json
from roq.wire.recording import (
    ENTRY_BYTES,
    Recording,
    encode_entry,
    entry_time,
    messages_before,
    messages_in,
    tape_log,
    with_before,
)
from roq.wire.tape_index import is_index

HELD_BYTES = 32 * 1024 * 1024  # waiting for stores: from here on publishers wait, until half of it is left
SKEW_MS = 5_000  # between clocks: a clock that is further back than the tape's last entry is worth a word
ENTRIES_AT_ONCE = 2  # under way while a new entry is made of what has come; a full one goes in any case
LOST_RETRY_SECONDS = 5.0
FULL_RETRY_SECONDS = 5.0  # at most: to take over on full disks costs some of the room that stores keep for fences and deletes
STORES_SECONDS = 5.0  # for stores of hosts that are there to start
SEGMENT_ENTRIES = 2_000_000  # a tape's segments end by their bytes, or their time
SEAL_SECONDS = 2.0  # at the end, for what is under way
TERM = 1  # of every owner of a tape: the last one that takes it has it

log = logger(__name__)
Told = Callable[[int], None]  # position of an entry


class TapeEntryUnderWay:
    """number: counted here. told: those who wait until it is stored."""

    __slots__ = ("data", "number", "told")

    def __init__(self, number: int, data: bytes, told: list[Told]) -> None:
        self.number, self.data, self.told = number, data, told


class Recorder:
    """on_full(bool): whether publishers are to wait. on_stored(position): everything up to that entry is stored."""

    def __init__(
        self,
        queue: str,
        exchange: str,
        recording: Recording,
        on_full: Callable[[bool], None],
        on_stored: Told,
        counters: Counters,
    ) -> None:
        self.queue, self.recording, self.log_id = queue, recording, tape_log(recording.tapes, exchange)
        self.counters = counters
        self.writer: LogWriter | None = None
        self._on_full, self._on_stored = on_full, on_stored
        self._loop = asyncio.get_running_loop()
        self._pieces: list[bytes | memoryview] = []  # of the next entry
        self._told: list[Told] = []  # once that is stored
        self._bytes = 0
        self._under_way: deque[TapeEntryUnderWay] = deque()  # not known to be stored, oldest first
        self._given = 0  # number of the last entry that the writer was given
        self._made = 0  # … that there is
        self._waiting = 0  # bytes of all that is not known to be stored
        self._base: int | None = None
        self._index = TopicIndexBuilder()
        self._messages = 0  # on the tape up to the last entry made; before `_base` is known, of those made here
        self._time = 0  # of that entry (milliseconds since 1970)
        self._clock_is_back = False  # that was told
        self._asked: list[tuple[Told, int]] = []  # before that is known
        self._full = self._scheduled = False
        self._emptied = asyncio.Event()

    # --- what comes in ------------------------------------------------------------------------------------------------

    def take(self, runs: Sequence[FrameRun[Any]]) -> None:
        """Frames that were forwarded just now."""
        for run in runs:
            self._pieces += run.pieces
            self._bytes += run.size
            self._waiting += run.size
            if self._bytes >= ENTRY_BYTES:
                self._cut()
        if self._pieces and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turned)
        if self._waiting > HELD_BYTES and not self._full:
            self._full = True
            self.counters["tape_full"] += 1
            self._on_full(True)

    def when_stored(self, told: Told) -> None:
        """Call it with an entry's position once everything taken so far is stored."""
        if self._pieces:
            self._told.append(told)
        elif self._under_way:
            self._under_way[-1].told.append(told)
        else:
            self.where(told)

    def where(self, told: Told) -> None:
        """Call it with the position of the entry that holds the end of everything taken so far, stored or not."""
        if self._pieces:
            self._cut()
        if self._base is None:
            self._asked.append((told, self._made))
        else:
            told(self._base + self._made)

    @property
    def waiting_bytes(self) -> int:
        """Taken, and not known to be stored."""
        return self._waiting

    @property
    def copies(self) -> int:
        """Stores that must have an entry before it counts."""
        return 0 if self.writer is None else self.writer.meta.ack_quorum

    def _turned(self) -> None:
        self._scheduled = False
        if self._pieces and len(self._under_way) < ENTRIES_AT_ONCE:
            self._cut()

    def _cut(self) -> None:
        """What there is becomes an entry."""
        pieces, told = self._pieces, self._told
        self._waiting -= self._bytes
        self._pieces, self._told, self._bytes = [], [], 0
        if self._base is not None and is_index(self._base + self._made + 1):
            index = self._index.finish(time.time_ns())
            if index is not None:
                self._make([zmtp.frame(index)], [])
        self._make(pieces, told)
        self._give()

    def _make(self, pieces: Sequence[bytes | memoryview], told: list[Told]) -> None:
        """The next entry."""
        self._made += 1
        entry, topics = TapeEntryUnderWay(self._made, encode_entry(self._now(), pieces, self._messages), told), set[bytes]()
        self._messages += messages_in(entry.data, topics)
        self._waiting += len(entry.data)
        self._under_way.append(entry)
        if self._base is not None:
            self._index.add(self._base + self._made, topics)

    def _now(self) -> int:
        """Times on a tape never go back, though the host's clock does: who begins at a time looks for it there."""
        now = now_ms()
        self._time = max(self._time, now)
        if self._time - now > SKEW_MS and not self._clock_is_back:
            fields = {"log": self.log_id, "behind_seconds": (self._time - now) // 1000}
            log.warning("the clock was set back: until it is where it was, entries have that time", extra={"fields": fields})
        self._clock_is_back = self._time - now > SKEW_MS
        return self._time

    def _give(self) -> None:
        """To the writer, as much as it takes."""
        writer = self.writer
        while writer is not None and writer.error is None and self._given < self._made:
            entry = self._under_way[self._given - self._made]
            try:
                writer.write(entry.data, partial(self._done, writer))
            except TemporaryError as error:
                self.counters["tape_waits"] += 1
                log.debug("tape: entry %d waits: %s", entry.number, error)
                return
            self._given = entry.number

    def _done(self, writer: LogWriter, result: int | RoqError) -> None:
        """The oldest entry that the writer was given is stored, or the writer has stopped: then the next one finds out."""
        if writer is self.writer and isinstance(result, int):
            self._stored(result)

    def _stored(self, position: int) -> None:
        """Everything up to there."""
        assert self._base is not None
        while self._under_way and self._base + self._under_way[0].number <= position:
            entry = self._under_way.popleft()
            self._waiting -= len(entry.data)
            self.counters["tape_entries"] += 1
            self.counters["tape_bytes"] += len(entry.data)
            for told in entry.told:
                told(self._base + entry.number)
        self._on_stored(position)
        self._give()
        if self._pieces and len(self._under_way) < ENTRIES_AT_ONCE:
            self._cut()
        if self._full and self._waiting < HELD_BYTES // 2:
            self._full = False
            self._on_full(False)
        if not self._under_way:
            self._emptied.set()

    # --- the log ------------------------------------------------------------------------------------------------------

    async def run(self, session: Session, directory: StoreDirectory) -> None:
        """Write until cancelled. Raises ProcessFailed: somebody else has taken this tape."""
        pauses, full, stored = delays(0.05, 1.0), delays(0.05, FULL_RETRY_SECONDS), 0
        while True:
            try:
                writer = await self._take_over(session, directory)
                pauses = delays(0.05, 1.0)
                await self._write(writer)
            except LogFenced as error:
                raise ProcessFailed(f"tape {self.log_id} belongs to another Exchange by now: {error}") from error
            except Closed:
                return  # sealed
            except DataLost as error:
                log.critical("the tape can't be written, publishers will wait: %s", error)
                await asyncio.sleep(LOST_RETRY_SECONDS)
            except TemporaryError as error:
                fields = {"log": self.log_id, "reason": f"{type(error).__name__}: {error}", "waiting_bytes": self._waiting}
                log.warning("the tape's log is taken over again", extra={"fields": fields})
                if self.counters["tape_entries"] > stored:  # else the disks are as full as they were
                    full, stored = delays(0.05, FULL_RETRY_SECONDS), self.counters["tape_entries"]
                await asyncio.sleep(next(full if isinstance(error, StorageFull) else pauses))

    async def _take_over(self, session: Session, directory: StoreDirectory) -> LogWriter:
        if self._base is None:
            await self._stores_come(directory)
        write, ack = self.recording.record.quorums(len(directory.hosts()))
        settings = LogSettings(write_quorum=write, ack_quorum=ack, segment_entries=SEGMENT_ENTRIES)
        writer = await LogWriter.take_over(session, self.log_id, directory, settings, TERM, partial(self._wanted, session))
        if self._base is None and writer.confirmed:
            try:
                await self._count_on(LogReader(session, self.log_id, directory), writer.confirmed)
            except BaseException:
                await writer.close()
                raise
        self.writer = writer
        if self._base is None:
            self._base = writer.confirmed
            asked, self._asked = self._asked, []
            for told, number in asked:
                told(self._base + number)
        self._given = max(0, writer.confirmed - self._base)
        self._stored(writer.confirmed)
        return writer

    async def _count_on(self, reader: LogReader, last: int) -> None:
        """From what the last entry says that is there. Of a tape whose last entry is gone it begins anew: who reads what lies
        before it does not know how much follows."""
        try:
            found = await reader.read_from(await reader.refresh(), last - 1)
            if not found:
                raise LogUnavailable(f"entry {last} of {self.log_id} is not there yet")
            entry = found[0][1]
            before, written = (messages_before(entry) or 0) + messages_in(entry), entry_time(entry)
        except (LogTrimmed, DataLost, FrameError) as error:
            log.info("messages of the tape are counted from 0, its last entry can't be read: %s", error)
            return
        finally:
            reader.close()
        for made in self._under_way:  # before that was known
            made.data = with_before(made.data, before + (messages_before(made.data) or 0), written)
        self._messages, self._time = self._messages + before, max(self._time, written)

    async def _stores_come(self, directory: StoreDirectory) -> None:
        """The first time they may be starting, too: wait for them a little, rather than to begin with fewer copies."""
        record, began = self.recording.record, time.monotonic()
        while record.quorums(len(directory.hosts())) != record.quorums(directory.registered()):
            if time.monotonic() - began > STORES_SECONDS:
                return
            await asyncio.sleep(STORES_SECONDS / 100)

    async def _wanted(self, session: Session) -> Check:
        """A tape is made only for a queue that is there: one of a removed queue would stay for ever."""
        path = paths.queue(self.queue)
        node = await session.get(path)
        recording = None if node is None else from_json(node.data, QueueRecord).recording
        if node is None or recording is None or recording.tapes != self.recording.tapes:
            raise LogFenced("the queue was removed")
        return Check(path, node.version)

    async def _write(self, writer: LogWriter) -> None:
        """Until the writer stops; raises why."""
        repairs = Tasks(lambda error: None)
        repairs.start(LogRepairer(writer, RepairSettings()).run(), "repairs of the tape")
        try:
            error = await writer.failed()
        finally:
            self.writer = None
            await repairs.stop()
            await writer.close()
        raise error

    def grow(self, stores: int) -> None:
        """There may be more stores than before: the next segment is on as many as it should be."""
        if self.writer is not None:
            self.writer.quorums = self.recording.record.quorums(stores)

    async def seal(self) -> None:
        """Write what there is and close the log, within SEAL_SECONDS: nothing comes any more. As far as that can be done; the
        rest is found by who looks after the tapes that nobody writes."""
        writer = self.writer
        if self._full:  # publishers wait for it no longer
            self._full = False
            self._on_full(False)
        if self._pieces:
            self._cut()
        if writer is None or writer.error is not None:
            return
        try:
            async with asyncio.timeout(SEAL_SECONDS):
                while self._under_way:
                    self._emptied.clear()
                    await self._emptied.wait()
                await writer.seal()
        except (TimeoutError, RoqError) as error:
            log.warning("the tape was left open at the end: %s", error, extra={"fields": {"log": self.log_id}})
