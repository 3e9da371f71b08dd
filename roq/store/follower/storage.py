"""Storage role: pieces of runs on this host's disk, and what can be asked about them. On the follower's loop.

The index (stored.py) is changed on the loop only; blocks are read in threads. A block found damaged is dropped from index and
file: what it held is missing here from then on, is told so, and can be fetched again (fetching.py). Not covered: the wire
(server.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from zlib import crc32

import msgspec

from roq.errors import DataLost, Overloaded, RoqError, ShuffleNotFound, StaleEpoch, StorageFailed
from roq.runtime.observe import Counters
from roq.store.follower.committer import FREE_BYTES_MIN, Committer, Wanted
from roq.store.follower.cutter import Cutter
from roq.store.follower.datafile import storage_error
from roq.store.follower.memory import Budget
from roq.store.follower.runindex import Entry, RunIndex, split_keys
from roq.store.follower.stored import EpochFile, RunKey, Stored, check_id, load_all, remove_folder
from roq.wire import shuffle as wire
from roq.wire.shuffle import Block, Interval, Piece, Position, RunSample, RunSlice, Spec

log = logging.getLogger(__name__)
T = TypeVar("T")
READ_THREADS = 3
READS_WAITING_MAX = 64  # then readers are sent to another replica
FORGOTTEN_MAX = 10_000  # ids of shuffles that late pieces must not bring back
SAMPLE_BLOCKS_MAX = 1024  # looked into for one answer to TellSamples; with more, their first keys are sample enough
SAMPLE_KEYS = 4096  # wanted in one answer
SAMPLE_BYTES_MAX = 4 * 1024 * 1024  # of one answer


class Storage:
    """Everything below `directory`. Make it with `open`."""

    def __init__(self, directory: Path, cutter: Cutter, budget: Budget, counters: Counters, free_bytes_min: int) -> None:
        self._directory, self._cutter, self._budget, self.counters = directory, cutter, budget, counters
        self._loop = asyncio.get_running_loop()
        self._committer = Committer(directory, cutter, counters, free_bytes_min)
        self._threads = ThreadPoolExecutor(READ_THREADS, "shuffle-read")
        self._reading = 0
        self._voiding: set[asyncio.Task[None]] = set()
        self.shuffles: dict[str, Stored] = {}
        self._forgotten: OrderedDict[str, None] = OrderedDict()
        self._creating, self._compacting = asyncio.Lock(), asyncio.Lock()
        self._epochs = EpochFile(directory / "epoch")
        self.epoch = 0  # highest of a leader

    @classmethod
    async def open(
        cls, directory: Path, cutter: Cutter, budget: Budget, counters: Counters, free_bytes_min: int = FREE_BYTES_MIN
    ) -> Storage:
        """Read what is there. Raises StorageFailed."""
        try:
            await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
            storage = cls(directory, cutter, budget, counters, free_bytes_min)
            await storage._thread(storage._load)
        except OSError as error:
            raise StorageFailed(f"can't open {directory}: {error}") from error
        return storage

    def _load(self) -> None:
        self.epoch = self._epochs.read()
        self.shuffles, damaged = load_all(self._directory)
        if damaged:
            self.counters["damaged_at_start"] += damaged

    async def _thread(self, function: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._threads, function)

    async def _read(self, function: Callable[[], T]) -> T:
        """In a thread, unless too many wait already. Raises Overloaded."""
        if self._reading >= READS_WAITING_MAX:
            self.counters["refused_reads"] += 1
            raise Overloaded("too many reads: ask another replica")
        self._reading += 1
        try:
            return await self._thread(function)
        finally:
            self._reading -= 1

    def _stored(self, shuffle: str) -> Stored:
        stored = self.shuffles.get(shuffle)
        if stored is None:
            raise ShuffleNotFound(f"nothing of shuffle {shuffle} is stored here")
        return stored

    def known_as(self, shuffle: str) -> tuple[str, Spec]:
        """Its name and spec. Raises ShuffleNotFound."""
        stored = self._stored(shuffle)
        return stored.name, stored.spec

    # --- store --------------------------------------------------------------------------------------------------------

    async def store(self, shuffle: str, name: str, spec: Spec, pieces: Sequence[Piece]) -> None:
        """Keep these; on stable storage when it returns. Raises Overloaded, StorageFull, StorageFailed, ShuffleNotFound."""
        size = sum(len(block.data) for piece in pieces for block in piece.blocks)
        if not self._budget.room_to_store(size):
            self.counters["refused_pieces"] += 1
            raise Overloaded("too much waits for the disk")
        self._budget.pending += size
        try:
            stored = await self._opened(shuffle, name, spec)
            wanted = [
                Wanted(key, block, begin, end)
                for piece in pieces
                for key in [(piece.partition, piece.attempt, piece.run)]
                for block in piece.blocks
                for begin, end in self._missing(stored, key, block.first, block.first + block.rows)
            ]
            if wanted:
                await self._committer.commit(stored, wanted)
        finally:
            self._budget.pending -= size

    @staticmethod
    def _missing(stored: Stored, key: RunKey, first: int, end: int) -> list[tuple[int, int]]:
        run = stored.run(key)
        return [(first, end)] if run is None else run.missing(first, end)

    def missing(self, shuffle: str, piece: RunSlice) -> list[tuple[int, int]]:
        """Rows of the slice that are not here."""
        stored, key = self.shuffles.get(shuffle), (piece.partition, piece.attempt, piece.run)
        end = piece.first + piece.rows
        return [(piece.first, end)] if stored is None else self._missing(stored, key, piece.first, end)

    async def _opened(self, shuffle: str, name: str, spec: Spec) -> Stored:
        """The shuffle's folder, made if there is none. Raises ShuffleNotFound (forgotten), StorageFull, StorageFailed."""
        check_id(shuffle)
        async with self._creating:
            if shuffle in self._forgotten:
                raise ShuffleNotFound(f"shuffle {shuffle} was removed")
            if shuffle not in self.shuffles:
                await self._thread(self._cutter.check)
                try:
                    path = self._directory / shuffle
                    self.shuffles[shuffle] = await self._committer.call(lambda: Stored.create(path, name, spec))
                except OSError as error:
                    failed = storage_error(error, f"shuffle {shuffle}")
                    self.counters[f"refused_{type(failed).__name__}"] += 1
                    raise failed from error
            return self.shuffles[shuffle]

    # --- read ---------------------------------------------------------------------------------------------------------

    async def read(self, request: wire.ReadBlocks) -> list[Block]:
        """Whole blocks. Raises DataLost, Overloaded, ShuffleNotFound."""
        stored, key = self._stored(request.shuffle), (request.partition, request.attempt, request.run)
        found = self._following(stored, key, request.first, request.last, request.size)
        size = sum(entry.size for entry in found)
        self._budget.reading += size
        try:
            return await self._blocks(stored, key, found)
        finally:
            self._budget.reading -= size

    async def cut(self, request: wire.CutBlocks) -> list[Block]:
        """Blocks cut exactly. Raises as read."""
        stored, key = self._stored(request.shuffle), (request.partition, request.attempt, request.run)
        found = self._following(stored, key, request.first, request.last, wire.BLOCKS_BYTES_MAX)
        blocks = await self._blocks(stored, key, found)
        for at in {0, len(blocks) - 1} if blocks else ():
            block = blocks[at]
            begin, end = max(block.first, request.first), min(block.first + block.rows, request.last + 1)
            if (begin, end) != (block.first, block.first + block.rows):
                blocks[at] = await self._read(lambda: self._cutter.part(stored.spec, block, begin, end))  # noqa: B023
        return blocks

    @staticmethod
    def _following(stored: Stored, key: RunKey, first: int, last: int, size: int) -> list[Entry]:
        """Blocks from the one with row `first` on, up to the first gap."""
        run, found = stored.run(key), list[Entry]()
        for entry in run.between(first, last + 1) if run is not None else ():
            size -= entry.size
            if entry.first > first or (found and size < 0):
                break
            found.append(entry)
            first = entry.end
        return found

    async def _blocks(self, stored: Stored, key: RunKey, entries: list[Entry]) -> list[Block]:
        """As many as can be read. Raises DataLost if the first one can't."""
        if not entries:
            return []
        try:
            blocks = await self._read(lambda: _load_blocks(entries))
        except OSError as error:
            raise StorageFailed(f"shuffle {stored.id}: {error}") from error
        if len(blocks) < len(entries):
            self._damaged(stored, key, entries[len(blocks)])
        self.counters["blocks_read"] += len(blocks)
        if not blocks:
            raise DataLost(f"rows from {entries[0].first} on of run {key} of shuffle {stored.id} are damaged here")
        return blocks

    def _damaged(self, stored: Stored, key: RunKey, entry: Entry) -> None:
        if stored.remove(key, entry):
            self.counters["damaged"] += 1
            stored.hurt = True
            fields = {"shuffle": stored.id, "run": key, "first": entry.first, "rows": entry.rows, "file": str(entry.file.path)}
            log.error("a damaged block was dropped", extra={"fields": fields})
            self._voiding.add(task := self._loop.create_task(self._void(entry)))
            task.add_done_callback(self._voiding.discard)

    async def _void(self, entry: Entry) -> None:
        """Nobody waits for it: at worst it is found damaged once more after a new start."""
        try:
            await self._committer.call(lambda: entry.file.void(entry.offset))
        except OSError as error:
            log.warning("can't mark a damaged block", extra={"fields": {"file": str(entry.file.path), "reason": str(error)}})

    # --- questions ----------------------------------------------------------------------------------------------------

    async def _row(self, stored: Stored, key: RunKey, run: RunIndex, border: Position) -> int:
        """The first row of the run that is not before the border."""
        while isinstance(found := run.row_of(border), Entry):
            entry = found
            (block,) = await self._blocks(stored, key, [entry])
            row = await self._thread(lambda: self._rank(stored.spec, block, run.place, border))  # noqa: B023
            run.learn(border, entry, row)
        return found

    def _rank(self, spec: Spec, block: Block, place: tuple[int, int], border: Position) -> int:
        return block.first + split_keys(self._cutter.keys(spec, block), block.first, place, border)

    async def _rows(
        self, stored: Stored, interval: Interval, winners: dict[int, str], *, every: bool = False
    ) -> AsyncIterator[tuple[RunKey, RunIndex, int, int]]:
        """Per run: its rows first … end-1 lie in the interval."""
        lower, upper = interval.lower, interval.upper
        for key, run in list(stored.runs_of(winners, every=every)):
            first = run.begin if lower is None else await self._row(stored, key, run, lower)
            end = run.end if upper is None else await self._row(stored, key, run, upper)
            if first < end:
                yield key, run, first, end

    async def slices(
        self, shuffle: str, interval: Interval, winners: dict[int, str], *, every: bool = False
    ) -> tuple[list[RunSlice], list[int]]:
        """What lies in the interval, and the bytes of each, about; a run with a gap is several. Nothing if it isn't known."""
        slices: list[RunSlice] = []
        sizes: list[int] = []
        if shuffle in self.shuffles:
            async for key, run, first, end in self._rows(self.shuffles[shuffle], interval, winners, every=every):
                for begin, stop, size in run.stretches(first, end):
                    slices.append(RunSlice(*key, begin, stop - begin))
                    sizes.append(size)
        return slices, sizes

    async def count(self, shuffle: str, intervals: Sequence[Interval], winners: dict[int, str]) -> tuple[list[int], list[int]]:
        """Rows and bytes per interval."""
        rows, sizes = [0] * len(intervals), [0] * len(intervals)
        for at, interval in enumerate(intervals):
            slices, bytes_each = await self.slices(shuffle, interval, winners)
            rows[at], sizes[at] = sum(each.rows for each in slices), sum(bytes_each)
            await asyncio.sleep(0)  # others get a turn
        return rows, sizes

    async def samples(self, shuffle: str, intervals: Sequence[Interval], winners: dict[int, str]) -> list[RunSample]:
        """A sample per stretch of a run that is here and lies in an interval."""
        stored = self.shuffles.get(shuffle)
        if stored is None:
            return []
        stretches: list[tuple[RunKey, list[Entry], int, int]] = []
        for interval in intervals:
            async for key, run, first, end in self._rows(stored, interval, winners):
                for begin, stop, _ in run.stretches(first, end):
                    stretches.append((key, run.between(begin, stop), begin, stop))
        blocks = sum(len(entries) for _, entries, _, _ in stretches)
        each = max(1, SAMPLE_KEYS // blocks) if 0 < blocks <= SAMPLE_BLOCKS_MAX else 1
        samples = [await self._sample(stored, *stretch, each) for stretch in stretches]
        while sum(map(message_bytes, samples)) > SAMPLE_BYTES_MAX and any(len(sample.keys) > 1 for sample in samples):
            samples = [thinned(sample) for sample in samples]
        return samples

    async def _sample(self, stored: Stored, key: RunKey, entries: list[Entry], first: int, end: int, each: int) -> RunSample:
        """each: keys to take of a block."""
        keys: list[bytes] = []
        rows: list[int] = []
        weights: list[int] = []
        for entry in entries:
            begin, stop = max(first, entry.first), min(end, entry.end)
            step = max(1, -(-(stop - begin) // each))
            at = list(range(begin, stop, step))
            if at == [entry.first]:
                keys.append(entry.first_key)
            else:
                (block,) = await self._blocks(stored, key, [entry])
                keys += await self._read(lambda: _pick(self._cutter.keys(stored.spec, block), block.first, at))  # noqa: B023
            rows += at
            weights += [entry.size * (min(row + step, stop) - row) // entry.rows for row in at]
        return RunSample(*key, end - first, sum(weights), tuple(keys), tuple(rows), tuple(weights))

    # --- the leader's orders ------------------------------------------------------------------------------------------

    async def obey(self, epoch: int) -> None:
        """Remember the leader's epoch. Raises StaleEpoch if a later one gave orders here."""
        if epoch < self.epoch:
            raise StaleEpoch(f"epoch {epoch} is over: {self.epoch} leads")
        if epoch > self.epoch:
            try:
                await self._committer.call(lambda: self._epochs.write(epoch))
            except OSError as error:
                raise storage_error(error, "the leader's epoch") from error
            self.epoch = max(self.epoch, epoch)

    async def keep(self, shuffle: str, intervals: Sequence[Interval], winners: dict[int, str], *, sealed: bool) -> None:
        """Forget blocks outside of the intervals, and what isn't the winners' if the shuffle is sealed."""
        stored = self.shuffles.get(shuffle)
        if stored is None:
            return
        before = list(stored.entries())  # what comes meanwhile stays
        wanted: set[tuple[RunKey, int]] = set()
        for interval in intervals:
            async for key, run, first, end in self._rows(stored, interval, winners, every=not sealed):
                wanted.update((key, entry.first) for entry in run.between(first, end))
        for key, entry in before:
            if (key, entry.first) not in wanted:
                stored.remove(key, entry)
        async with self._compacting:
            await self._compact(stored)

    async def _compact(self, stored: Stored) -> None:
        """Give back the space of files that hold little that is wanted."""
        if stored.current is not None and not stored.current.live:
            await self._committer.call(stored.close_current)  # what was written to it before is in the index when this returns
        for file in stored.mostly_dead():
            living = [(key, entry) for key, entry in stored.entries() if entry.file is file]
            try:
                moved = await self._committer.call(lambda: self._committer.rewrite(stored, file, living))  # noqa: B023
            except (OSError, RoqError) as error:
                log.warning("space is not given back", extra={"fields": {"shuffle": stored.id, "reason": str(error)}})
                return
            for key, old, new in moved:
                stored.replace(key, old, new)
            for key, entry in living:
                stored.remove(key, entry)  # still there: it was damaged
            stored.files.pop(file.number, None)
            self.counters["files_given_back"] += 1
            await self._committer.call(file.remove)

    async def forget(self, shuffle: str) -> None:
        """Delete everything of it, for good."""
        check_id(shuffle)
        async with self._creating:
            self._forgotten[shuffle] = None
            while len(self._forgotten) > FORGOTTEN_MAX:
                self._forgotten.popitem(last=False)
            stored = self.shuffles.pop(shuffle, None)
        if stored is not None:
            try:
                await self._committer.call(lambda: remove_folder(stored.directory))
            except OSError as error:
                raise storage_error(error, f"removing shuffle {shuffle}") from error

    async def close(self) -> None:
        """Finish what is being written."""
        await asyncio.gather(*self._voiding, return_exceptions=True)
        await self._committer.close()
        self._threads.shutdown(wait=False)


def message_bytes(sample: RunSample) -> int:
    """What it adds to a message, about."""
    return sum(map(len, sample.keys)) + 20 * len(sample.keys) + 100


def thinned(sample: RunSample) -> RunSample:
    """The same with every other key only."""
    weights = sample.weights
    pairs = tuple(sum(weights[at : at + 2]) for at in range(0, len(weights), 2))
    return msgspec.structs.replace(sample, keys=sample.keys[::2], rows_at=sample.rows_at[::2], weights=pairs)


def _load_blocks(entries: list[Entry]) -> list[Block]:
    """Up to the first damaged one."""
    blocks = []
    for entry in entries:
        data = entry.file.read(entry.offset, entry.size)
        if len(data) < entry.size or crc32(data) != entry.crc:
            break
        blocks.append(Block(entry.first, entry.rows, entry.first_key, entry.last_key, entry.crc, data))
    return blocks


def _pick(keys: Sequence[bytes], first: int, rows: list[int]) -> list[bytes]:
    return [keys[row - first] for row in rows]
