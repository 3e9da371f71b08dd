"""Group commit: what is to be stored while the disk is busy goes to it together next time, with one fdatasync per file.

One thread writes. A block is checked before it is written; a block whose rows are partly here is split first. When the disk is
full nothing of the batch is kept; after a failed sync nothing of the batch that is in that file is kept, and nothing more is
appended to it (datafile.py). Whatever a job fails with is reported to it, and the others go on. Files that hold little that is
wanted any more are compacted: what lives in them is written again elsewhere.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar
from zlib import crc32

from roq.errors import FrameError, RoqError, StorageFailed, StorageFull
from roq.log.store.journal import FILE_BYTES as JOURNAL_FILE_BYTES
from roq.runtime.files import DISK, storage_error
from roq.runtime.observe import Counters, logger
from roq.shuffle.node.datafile import DataFile, encode
from roq.shuffle.node.splitter import splitter
from roq.shuffle.node.stored import FILE_BYTES, BlockEntry, RunKey, StoredShuffle
from roq.wire.shuffle import Block

log = logger(__name__)
T = TypeVar("T")
FREE_BYTES_MIN = 2 * JOURNAL_FILE_BYTES  # left to the logs of work queues, which share the disk
DEAD_MOST = 0.5  # of a file's bytes; then what lives in it is written again and the file deleted
BATCH_BYTES = 32 * 1024 * 1024  # written with one sync
Written = list[tuple[RunKey, BlockEntry]]


class WantedBlock(NamedTuple):
    """A block, of which the rows begin … end-1 shall be stored."""

    key: RunKey
    block: Block
    begin: int
    end: int


class Job(NamedTuple):
    """Blocks that are answered together. done: whether all of them were added to the index."""

    stored: StoredShuffle
    wanted: list[WantedBlock]
    size: int
    done: asyncio.Future[bool]


class Committer:
    """Needs the running loop. free_bytes_min: of the disk, below which it is full."""

    def __init__(self, directory: Path, counters: Counters, free_bytes_min: int = FREE_BYTES_MIN) -> None:
        self._directory, self._counters = directory, counters
        self._free_bytes_min = free_bytes_min
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Job] = []
        self._writing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "shuffle-disk")

    async def commit(self, stored: StoredShuffle, wanted: list[WantedBlock]) -> bool:
        """Store and index these; on stable storage when it returns. False: somebody else stored some rows of one meanwhile, so
        that one was left out, and others of its rows may be missing. Raises StorageFull, StorageFailed, FrameError."""
        job = Job(stored, wanted, sum(len(one.block.data) for one in wanted), self._loop.create_future())
        self._waiting.append(job)
        if self._writing is None or self._writing.done():
            self._writing = self._loop.create_task(self._write_all(), name="shuffle commits")
        return await job.done

    async def call(self, function: Callable[[], T]) -> T:
        """Run it in the writing thread, so nothing is appended meanwhile."""
        return await self._loop.run_in_executor(self._thread, function)

    async def _write_all(self) -> None:
        while self._waiting:
            batch, size = list[Job](), 0
            while self._waiting and (not batch or size + self._waiting[0].size <= BATCH_BYTES):
                batch.append(self._waiting.pop(0))
                size += batch[-1].size
            results: Sequence[Written | RoqError]
            lacking = _lacking(batch)
            try:
                results = await self.call(lambda: self._write(lacking))  # noqa: B023
            except Exception as error:  # a defect: those who wait are told, those behind them go on
                fields = {"shuffles": sorted({job.stored.name for job in batch}), "bytes": size}
                log.exception("batch could not be written", extra={"fields": fields})
                results = [_told(error, job.stored) for job in batch]
            except BaseException:
                for job in [*batch, *self._waiting]:
                    _fail(job, StorageFailed("the follower is stopping"))
                raise
            self._counters["syncs"] += 1
            for job, result in zip(batch, results, strict=True):
                self._answer(job, result)

    def _answer(self, job: Job, result: Written | RoqError) -> None:
        if isinstance(result, RoqError):
            self._counters[f"refused_{type(result).__name__}"] += 1
            _fail(job, result)
            return
        whole = len(result) == len(job.wanted)
        for key, entry in result:
            if job.stored.add(key, entry):
                self._counters["blocks"] += 1
                self._counters["bytes"] += entry.size
        if not job.done.done():
            job.done.set_result(whole)

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _write(self, batch: list[Job]) -> list[Written | RoqError]:
        results: list[Written | RoqError] = []
        touched: dict[DataFile, tuple[StoredShuffle, list[int]]] = {}
        for number, job in enumerate(batch):
            try:
                blocks = [(one.key, self._checked(job.stored, one)) for one in job.wanted]
                written = self._append(job.stored, blocks)
            except Exception as error:  # noqa: BLE001
                results.append(_told(error, job.stored))
                continue
            results.append(written)
            for file in dict.fromkeys(entry.file for _, entry in written):
                touched.setdefault(file, (job.stored, []))[1].append(number)
        for file, (stored, numbers) in touched.items():
            try:
                file.sync()
            except OSError as error:
                for number in numbers:
                    results[number] = storage_error(error, f"shuffle {stored.id}")
        return results

    def _checked(self, stored: StoredShuffle, wanted: WantedBlock) -> Block:
        block = wanted.block
        if crc32(block.data) != block.crc:
            raise FrameError(f"a block of shuffle {stored.id} was damaged on its way")
        if (wanted.begin, wanted.end) == (block.first, block.first + block.rows):
            return block
        return splitter().part(stored.spec, block, wanted.begin, wanted.end)

    def _append(self, stored: StoredShuffle, blocks: list[tuple[RunKey, Block]]) -> Written:
        """Raises OSError, StorageFull: nothing was written that counts."""
        if not blocks:
            return []
        size = sum(len(block.data) for _, block in blocks)
        if DISK.free(self._directory) < size + self._free_bytes_min:
            raise StorageFull(f"no space for shuffle {stored.id}")
        file = stored.current
        if file is None or file.broken is not None or (file.size and file.size + size > FILE_BYTES):
            stored.current = None
            if file is not None and file.broken is None:
                file.sync()
            file = stored.new_file()
        parts: list[bytes] = []
        places: list[tuple[RunKey, Block, int]] = []
        at = 0
        for (partition, attempt, run), block in blocks:
            head, data = encode(partition, attempt, run, block)
            parts += (head, data)
            places.append(((partition, attempt, run), block, at + len(head)))
            at += len(head) + len(data)
        begin = file.append(parts)
        return [(key, place_block(block, file, begin + offset)) for key, block, offset in places]

    def rewrite(self, stored: StoredShuffle, file: DataFile, entries: Written) -> list[tuple[RunKey, BlockEntry, BlockEntry]]:
        """Write a file's blocks again, durably: (run, old, new). One that is damaged is left out. In the thread (`call`)."""
        moved = []
        for key, entry in entries:
            data = file.intact(entry.offset, entry.size, entry.crc)
            if data is not None:
                block = Block(entry.first, entry.rows, entry.first_key, entry.last_key, entry.crc, data)
                moved.append((key, entry, self._append(stored, [(key, block)])[0][1]))
        for touched in dict.fromkeys(new.file for _, _, new in moved):
            touched.sync()
        return moved

    async def close(self) -> None:
        """Wait for what is being written."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        self._thread.shutdown(wait=False)


def _lacking(batch: list[Job]) -> list[Job]:
    """The same without blocks of which some rows have come since they were asked for: no row is written that is here. So a
    block that overlaps one before it was written when that one had been forgotten (Stored.load counts on it)."""
    coming: dict[tuple[str, RunKey], list[tuple[int, int]]] = {}
    found = []
    for job in batch:
        wanted = []
        for one in job.wanted:
            rows, run = coming.setdefault((job.stored.id, one.key), []), job.stored.runs.get(one.key)
            at = bisect_left(rows, (one.end, 0))
            twice = at > 0 and rows[at - 1][1] > one.begin
            if not twice and (run is None or run.missing(one.begin, one.end) == [(one.begin, one.end)]):
                rows.insert(at, (one.begin, one.end))
                wanted.append(one)
        found.append(job._replace(wanted=wanted))
    return found


def _told(error: Exception, stored: StoredShuffle) -> RoqError:
    """What a job is answered with."""
    if isinstance(error, RoqError):
        return error
    if isinstance(error, OSError):
        return storage_error(error, f"shuffle {stored.id}")
    log.error("blocks could not be stored", exc_info=error, extra={"fields": {"shuffle": stored.id}})
    return RoqError(f"{type(error).__name__}: {error}")


def _fail(job: Job, error: RoqError) -> None:
    if not job.done.done():
        job.done.set_exception(error)


def place_block(block: Block, file: DataFile, offset: int) -> BlockEntry:
    """The block's place in the index."""
    return BlockEntry(block.first, block.rows, block.first_key, block.last_key, block.crc, file, offset, len(block.data))


async def compact(stored: StoredShuffle, committer: Committer, counters: Counters) -> None:
    """The space of files that hold little that is wanted is given back, one after the other; one shuffle at a time."""

    def closed() -> list[DataFile]:
        if stored.current is not None and not stored.current.live:
            stored.current = None
        return [file for file in stored.files.values() if file is not stored.current]

    # Asked of the thread that writes: what was written to these files before is in the index when this returns, and nothing is
    # written to them any more. Asked on the loop, a file could be closed the moment after with blocks not in the index yet.
    for file in await committer.call(closed):
        if file.live > (1 - DEAD_MOST) * file.size:
            continue
        living = [(key, entry) for key, run in stored.runs.items() for entry in run.entries if entry.file is file]
        try:
            moved = await committer.call(lambda: committer.rewrite(stored, file, living))  # noqa: B023
            for key, old, new in moved:
                stored.replace(key, old, new)
            for key, entry in living:
                if stored.remove(key, entry):  # still there: it was damaged
                    stored.damaged = True
            if file.live:
                log.error("file is in use and could not be freed", extra={"fields": {"file": str(file.path)}})
                continue
            stored.files.pop(file.number, None)
            await committer.call(file.remove)
        except (OSError, RoqError) as error:
            log.warning("space could not be freed", extra={"fields": {"shuffle": stored.id, "reason": str(error)}})
            return
        counters["files_given_back"] += 1
