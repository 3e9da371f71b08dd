"""The store's sockets and threads around Storage and Blobs. Nothing is decided here.

While the journal is written and synced, what comes next is collected, so a busy store syncs once for many entries of many
logs. While the disk is quick the loop itself does that, for handing it over and back takes longer then; a thread does it while
the disk is slow. A failed sync ends the store for good: what is on the disk is unknown then.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from roq.errors import CallError, LogFenced, LogUnavailable, RoqError, StorageFailed, StorageFull
from roq.ids import new_token
from roq.log.store.blobs import BlobFolder
from roq.log.store.journal import FILE_BYTES, JournalWrite
from roq.log.store.storage import COPY_EPOCH, SegmentStorage
from roq.log.store.upkeep import Compaction, scrub
from roq.runtime.files import DISK, FULL, Disk
from roq.runtime.observe import Counters, Histogram, logger
from roq.runtime.rpc import RpcPool, RpcServer
from roq.wire import store as wire
from roq.wire.rights import allow_at_store
from roq.wire.store import Add, Found, Refusal

log = logger(__name__)
QUICK_SECONDS = 0.002  # a sync that takes no longer on the average is not worth a thread
QUICK_WEIGHT = 0.125  # of the newest sync in that average
SYNC_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # s
MARKER_SECONDS = 0.02  # idle for so long: prove that the last batch was durable
PREPARE_RETRY_SECONDS = 1.0  # on a full disk
COMPACT_EVERY_SECONDS = 1.0
COMPACT_STEP_SECONDS = 0.005
SOURCE_SECONDS = 10.0  # for the answer of a store that is copied from
SEGMENT_COPIES_AT_ONCE = 2  # fetched from other stores …
BLOB_COPIES_AT_ONCE = 4  # … and neither kind waits for the other: big payloads must not hold up a log's repair
EXPIRE_EVERY_SECONDS = 30.0  # abandoned uploads
WAIT_SECONDS_MAX = 30.0  # of a Read that follows


class WaitingReaders:
    """On the running loop. Nobody is left behind whose time is over or who is gone."""

    def __init__(self) -> None:
        self.readers: dict[str, list[asyncio.Future[None]]] = {}

    def wake(self, segment: str) -> None:
        """There is news of it."""
        for future in self.readers.pop(segment, ()):
            if not future.done():
                future.set_result(None)

    def wake_all(self) -> None:
        """There may be news of every segment."""
        for segment in list(self.readers):
            self.wake(segment)

    async def wait(self, segment: str, enough: Callable[[], bool], seconds: float) -> None:
        """Until it is enough, or the time is over."""
        try:
            async with asyncio.timeout(seconds):
                while not enough():
                    await self._news(segment)
        except TimeoutError:
            return

    async def _news(self, segment: str) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.readers.setdefault(segment, []).append(future)
        try:
            await future
        finally:
            others = self.readers.get(segment, [])
            if future in others:  # nobody woke it
                others.remove(future)
                if not others:
                    del self.readers[segment]


class StoreServer:
    """One store on the running loop. `failed` is called once if the disk fails.

    Raises PortTaken, StorageFailed, UnknownFormat.
    """

    def __init__(
        self,
        directory: Path,
        host: str,
        address: str,
        port: int,
        failed: Callable[[RoqError], None],
        *,
        disk: Disk | None = None,
        file_bytes: int = FILE_BYTES,
        disk_name: str = "",
    ) -> None:
        self._host, self._disk_name, self._failed = host, disk_name, failed
        self._directory, self._life = directory, new_token()
        self.counters, self._syncs = Counters(), Histogram(SYNC_BOUNDS)
        try:
            (directory / "journal").mkdir(parents=True, exist_ok=True)
            self.storage = SegmentStorage(disk or Disk(), directory / "journal", file_bytes)
            self.blobs = BlobFolder(directory / "blobs", free_bytes_min=2 * file_bytes)
            DISK.sync_folder(directory)
        except OSError as error:
            raise StorageFailed(f"can't open the store in {directory}: {error}") from error
        self._loop = asyncio.get_running_loop()
        self._writing = self._scheduled = self._preparing = self._closed = False
        self.syncing = False  # the loop is held up by the disk
        self._sync_seconds = QUICK_SECONDS  # how long one takes, on the average
        self._written_at = 0.0  # monotonic seconds
        self._marker: asyncio.TimerHandle | None = None
        self._marked = True
        self._waiting = WaitingReaders()
        self._segment_copies = asyncio.Semaphore(SEGMENT_COPIES_AT_ONCE)
        self._blob_copies = asyncio.Semaphore(BLOB_COPIES_AT_ONCE)
        self._sources = RpcPool(wire.Reply, SOURCE_SECONDS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writes: SimpleQueue[JournalWrite | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()
        served = partial(RpcServer, address, port, wire.Request, self._handle, counters=self.counters, drained=self._next)
        self._server = served(notices=wire.NoticeToStore, notice=self._notice, allow=allow_at_store())
        self.port = self._server.port
        self.kick()
        self._start(self._compact())
        self._start(self._expire())
        self._start(scrub(self.storage, self.blobs, self.counters, self.kick))

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work, name=work.__qualname__)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Work that broke off would be missing for ever, and nobody would know."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._closed:
            fields = {"host": self._host, "work": task.get_name()}
            log.error("background work failed: the store stops", exc_info=error, extra={"fields": fields})
            self._broken(error if isinstance(error, StorageFailed) else StorageFailed(f"{type(error).__name__}: {error}"))

    # --- entries ------------------------------------------------------------------------------------------------------

    def _notice(self, peer: bytes, add: Add) -> None:
        count = len(add.entries)
        if len(add.crcs) != count or add.first < 1 or not 0 <= add.epoch < COPY_EPOCH:
            self.counters["refused_malformed"] += 1
            return

        def answer(refusal: Refusal | None) -> None:
            if refusal is not None:
                self.counters[f"refused_{refusal.name.lower()}"] += max(count, 1)
                if refusal in (Refusal.DIVERGED, Refusal.DAMAGED):
                    log.error("entry refused", extra={"fields": {"segment": add.segment, "why": refusal.name}})
                self._server.notify(peer, wire.EntriesRefused(add.segment, add.first, count, refusal))
            elif count:
                self.counters["entries_stored"] += count
                self._server.notify(peer, wire.EntriesAdded(add.segment, add.first, count))

        self.counters["entries"] += count
        self.storage.add(add, answer)
        if not count:
            self._waiting.wake(add.segment)

    def kick(self) -> None:
        """Write what is pending once this turn of the loop has taken in what there is."""
        if not self._writing and not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        self._scheduled = False
        if self._writing or self._closed:
            return
        write = self.storage.stage()
        if self.storage.wants_file and not self._preparing:
            self._preparing = True
            self._start(self._prepare())
        if write is not None:
            self._submit(write)
            self._marked = False
        elif not self._marked and self._marker is None:
            self._marker = self._loop.call_later(MARKER_SECONDS, self._mark)

    def _mark(self) -> None:
        self._marker = None
        if self._writing or self._closed or self._marked:
            return
        left = self._written_at + MARKER_SECONDS - time.monotonic()
        if left > 0:
            self._marker = self._loop.call_later(left, self._mark)
        elif (write := self.storage.marker()) is not None:
            self._marked = True
            self._submit(write)

    def _submit(self, write: JournalWrite) -> None:
        self._writing = True
        if self._sync_seconds > QUICK_SECONDS:
            self._writes.put(write)
            return
        self.syncing = True
        try:
            self._perform(write)
        except StorageFailed as error:
            self._broken(error)
        else:
            self._written(write)
        finally:
            self.syncing = False

    def _perform(self, write: JournalWrite) -> None:
        began = time.monotonic()
        self.storage.journal.perform(write)
        seconds = time.monotonic() - began
        self._sync_seconds += QUICK_WEIGHT * (seconds - self._sync_seconds)
        self._syncs.observe(seconds)

    def _write(self) -> None:
        """The journal's thread, for a slow disk."""
        while (write := self._writes.get()) is not None:
            try:
                self._perform(write)
            except Exception as error:  # whatever it is, nothing more is written: everybody would wait for this thread
                log.exception(
                    "journal could not be written", extra={"fields": {"host": self._host, "path": str(self._directory)}}
                )
                self._call(self._broken, error if isinstance(error, RoqError) else StorageFailed(str(error)))
                return
            self._call(self._written, write)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _broken(self, error: RoqError) -> None:
        log.critical("disk failed: the store stops", extra={"fields": {"host": self._host, "reason": str(error)}})
        self._closed = True
        self._failed(error)

    def _written(self, write: JournalWrite) -> None:
        self._writing = False
        self._written_at = time.monotonic()
        self.counters["syncs"] += 1
        self.counters["written_bytes"] += len(write.data)
        self.storage.committed(write)
        self._waiting.wake_all()
        if self.storage.has_pending:
            self.kick()
        elif not self._closed:
            self._next()

    async def _compact(self) -> None:
        """Look after the journal's size."""
        compaction = Compaction(self.storage)
        while True:
            await asyncio.sleep(COMPACT_EVERY_SECONDS)
            while compaction.step():
                self.counters["compaction_steps"] += 1
                self.kick()
                await asyncio.sleep(COMPACT_STEP_SECONDS)

    async def _expire(self) -> None:
        """Uploads that nobody goes on with hold space and a file open."""
        while True:
            await asyncio.sleep(EXPIRE_EVERY_SECONDS)
            self.counters["uploads_expired"] += await asyncio.to_thread(self.blobs.expire)

    async def _prepare(self) -> None:
        """Make the next journal file; on a full disk again and again, or make room."""
        while not self._closed:
            try:
                number = await asyncio.to_thread(self.storage.journal.create)
            except OSError as error:
                if error.errno not in FULL:
                    self._broken(StorageFailed(f"can't make a journal file: {error}"))
                    return
                self.storage.full = True
                self.counters["disk_full"] += 1
                self.kick()
                await asyncio.sleep(PREPARE_RETRY_SECONDS)
                continue
            self.storage.full = False
            self.storage.journal.adopt(number)
            break
        self._preparing = False
        self.kick()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _durable(self, begin: Callable[[Callable[[Refusal | None], None]], None], what: str) -> None:
        """Run one of Storage's verbs and wait for its answer."""
        future: asyncio.Future[None] = self._loop.create_future()

        def answer(refusal: Refusal | None) -> None:
            if future.done():
                return
            if refusal is None:
                future.set_result(None)
            elif refusal is Refusal.FENCED:
                future.set_exception(LogFenced(f"{what}: a newer epoch has it"))
            elif refusal is Refusal.FULL:
                future.set_exception(StorageFull())
            else:
                future.set_exception(CallError(f"{what}: {refusal.name}"))

        begin(answer)
        self.kick()
        await future

    async def _handle(self, peer: bytes, request: wire.Request) -> msgspec.Struct:
        match request:
            case wire.OpenSegment(segment, epoch):
                await self._durable(lambda done: self.storage.open_segment(segment, epoch, done), segment)
            case wire.FenceLog(segment, epoch):
                await self._durable(lambda done: self.storage.fence(segment, epoch, done), segment)
                return wire.Fenced(self.storage.confirmed(segment))
            case wire.Recover(segment, epoch, first, count):
                await self._durable(lambda done: self.storage.fence(segment, epoch, done), segment)
                return self._recovered(segment, first, min(count, wire.RECOVER_COUNT_MAX))
            case wire.Read():
                return await self._read(request)
            case wire.Holes(segment, first, last):
                return wire.Ranges(await self._holes(segment, first, last))
            case wire.Compare():
                return self._compare(request)
            case wire.CopySegment(segment, epoch):
                await self._durable(lambda done: self.storage.fence(segment, epoch, done), segment)
                async with self._segment_copies:
                    await self._copy_segment(request)
            case wire.DeleteSegment(segment, epoch):
                await self._durable(lambda done: self.storage.delete(segment, epoch, done), segment)
            case wire.ListSegments(prefix, after, count):
                return wire.SegmentList(self.storage.views(prefix, after, min(count, wire.LIST_COUNT_MAX)))
            case wire.DescribeStore():
                return self._describe()
            case _:
                return await self._handle_blob(request)
        return wire.StoreDone()

    async def _handle_blob(self, request: Any) -> msgspec.Struct:
        match request:
            case wire.PutBlob(blob, offset, total, crc, data):
                await asyncio.to_thread(self.blobs.put, blob, offset, total, crc, data)
            case wire.GetBlob(blob, offset, count):
                return wire.BlobPart(*await asyncio.to_thread(self.blobs.get, blob, offset, count))
            case wire.CopyBlob(blob, source):
                async with self._blob_copies:
                    await self._copy_blob(blob, source)
            case wire.DeleteBlob(blob):
                await asyncio.to_thread(self.blobs.delete, blob)
            case wire.ListBlobs(prefix, after, count):
                return wire.BlobList(*await asyncio.to_thread(self.blobs.views, prefix, after, min(count, wire.LIST_COUNT_MAX)))
        return wire.StoreDone()

    def _recovered(self, segment: str, first: int, count: int) -> wire.Recovered:
        answers, size = [], 0
        for position in range(first, first + count):
            answer = self.storage.look(segment, position)
            if answer[0] == Found.UNKNOWN and not self.storage.proved:
                break  # it will be known soon: whoever counts who knows nothing must not count us
            answers.append(answer)
            size += len(answers[-1][2])
            if size > wire.FRAME_BYTES:
                break
        if not answers:
            raise LogUnavailable(f"segment {segment}: it is not known yet whether this disk is as new as it was")
        return wire.Recovered(first, answers)

    async def _read(self, request: wire.Read) -> wire.Entries:
        segment, first = request.segment, request.first
        if request.wait_seconds > 0 and self.storage.confirmed(segment) < first:
            seconds = min(request.wait_seconds, WAIT_SECONDS_MAX)
            await self._waiting.wait(segment, lambda: self.storage.confirmed(segment) >= first, seconds)
        confirmed = self.storage.confirmed(segment)
        last = request.last if request.last > 0 else confirmed
        crcs, entries, missing = self.storage.read(segment, first, last)
        return wire.Entries(first, crcs, entries, confirmed, missing)

    async def _holes(self, segment: str, first: int, last: int) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        while first <= last:
            _, entries, missing = self.storage.read(segment, first, last)
            first += len(entries)
            if missing:
                if ranges and ranges[-1][1] == first - 1:
                    ranges[-1] = (ranges[-1][0], first)
                else:
                    ranges.append((first, first))
                self.storage.put_aside(segment, first)
                first += 1
            await asyncio.sleep(0)
        self.kick()
        return ranges

    def _compare(self, request: wire.Compare) -> wire.Compared:
        if len(request.segments) + len(request.opened) + len(request.blobs) > wire.LIST_COUNT_MAX:
            raise CallError(f"a comparison has at most {wire.LIST_COUNT_MAX} items")
        index = self.storage.index
        opened = index.lacking(request.opened, opened=True)
        return wire.Compared(self._disk_name, index.lacking(request.segments), opened, self.blobs.lacking(request.blobs))

    # --- fetching what another store holds: what comes is checked before it is kept --------------------------------------

    async def _copy_segment(self, order: wire.CopySegment) -> None:
        """Fetch the entries of `order` that are missing here. Raises StorageFailed if the source lacks some of them too."""
        lacking: list[int] = []
        for first, last in self.storage.missing(order.segment, order.first, order.last):
            position = first
            while position <= last:
                part = await self._sources.request(order.source, wire.Read(order.segment, position, last), wire.Entries)
                if part.entries:
                    add = Add(order.segment, COPY_EPOCH, position, 0, part.crcs, part.entries)
                    await self._durable(partial(self.storage.add, add), order.segment)
                    position += len(part.entries)
                if part.missing:
                    lacking.append(position)
                    position += 1
        if lacking:
            raise StorageFailed(f"{order.source} lacks {len(lacking)} entries of {order.segment}, {lacking[0]} first")

    async def _copy_blob(self, blob: str, source: str) -> None:
        """Fetch a blob. Raises TaskNotFound, StorageFailed of the source."""
        offset, total = 0, 1
        while offset < total:
            part = await self._sources.request(source, wire.GetBlob(blob, offset, wire.BLOB_PART_BYTES), wire.BlobPart)
            total = part.total
            if total and not part.data:
                raise StorageFailed(f"blob {blob} ends early at its source")
            await asyncio.to_thread(self.blobs.put, blob, offset, total, part.crc, part.data)
            offset += len(part.data)
            if not total:
                return

    def _describe(self) -> wire.StoreView:
        journal, syncs = self.storage.journal, self._syncs
        return wire.StoreView(
            self._host,
            self._disk_name,
            DISK.free(self._directory),
            len(journal.numbers) * journal.file_bytes,
            self.storage.index.live_bytes(),
            len(self.storage.index.segments),
            {**self.counters, "damages": self.storage.damaged},
            self._life,
            self.blobs.count,
            self.blobs.bytes,
            wire.SyncTimes(syncs.bounds, tuple(syncs.counts), syncs.sum),
            self.storage.index.logs(),
        )

    async def close(self) -> None:
        """Stop serving; what is pending and not answered is not promised."""
        self._closed = True
        if self._marker is not None:
            self._marker.cancel()
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sources.close()
        self._writes.put(None)
        await asyncio.to_thread(self._thread.join)
        self.storage.journal.close()
