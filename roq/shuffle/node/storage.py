"""Storage role: pieces of runs on this host's disk, and what can be asked about them. On the follower's loop.

The index (stored.py) is changed on the loop only; blocks are read in threads. A block found damaged is dropped from index and
file: what it held is missing here from then on, is reported so, and can be fetched again (repair.py). Not covered: the wire
(server.py).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from roq.errors import DataLost, Overloaded, ShuffleNotFound, StaleEpoch, StorageFailed
from roq.runtime.files import storage_error
from roq.runtime.observe import Counters, logger
from roq.shuffle.node.committer import FREE_BYTES_MIN, Committer, WantedBlock, compact
from roq.shuffle.node.datafile import Descriptors
from roq.shuffle.node.memory import Budget
from roq.shuffle.node.splitter import splitter
from roq.shuffle.node.stored import BlockEntry, EpochFile, RunKey, StoredShuffle, check_id, load_all, remove_folder
from roq.shuffle.ranges import KeyList
from roq.wire import shuffle as wire
from roq.wire.shuffle import Block, Piece, RunSlice, Spec

log = logger(__name__)
T = TypeVar("T")
READ_THREADS = 3
READS_WAITING_MAX = 64  # then readers are sent to another replica
FORGOTTEN_MAX = 10_000  # ids of shuffles that late pieces must not bring back
STORE_ROUNDS = 8  # each leaves fewer rows to be stored
COMPACT_SECONDS = 20.0  # a command to forget waits so long for the space


class RangeStorage:
    """Everything below `directory`. Make it with `open`."""

    def __init__(self, directory: Path, budget: Budget, counters: Counters, free_bytes_min: int) -> None:
        self._directory, self._budget, self.counters = directory, budget, counters
        self._loop = asyncio.get_running_loop()
        self._committer = Committer(directory, counters, free_bytes_min)
        self._threads = ThreadPoolExecutor(READ_THREADS, "shuffle-read")
        self._reading = 0
        self.shuffles: dict[str, StoredShuffle] = {}
        self._forgotten: OrderedDict[str, None] = OrderedDict()
        self._creating, self._compacting, self._obeying = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        self._compactions: dict[str, asyncio.Task[None]] = {}  # by shuffle: not begun yet
        self._beside: set[asyncio.Task[None]] = set()
        self._descriptors = Descriptors()
        self._epochs = EpochFile(directory / "epoch")
        self.epoch = 0  # highest of a leader

    @classmethod
    async def open(
        cls, directory: Path, budget: Budget, counters: Counters, free_bytes_min: int = FREE_BYTES_MIN
    ) -> RangeStorage:
        """Read what is there. Raises StorageFailed."""
        try:
            await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
            storage = cls(directory, budget, counters, free_bytes_min)
            await storage._thread(storage._load)
        except OSError as error:
            raise StorageFailed(f"can't open {directory}: {error}") from error
        return storage

    def _load(self) -> None:
        self.epoch = self._epochs.read()
        self.shuffles, damaged = load_all(self._directory, self._descriptors)
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

    def _stored(self, shuffle: str) -> StoredShuffle:
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
            stored = await self.opened(shuffle, name, spec)
            for _ in range(STORE_ROUNDS):  # another one may store some of these rows at the same time, cut otherwise
                wanted = [
                    WantedBlock(key, block, begin, end)
                    for piece in pieces
                    for key in [(piece.partition, piece.attempt, piece.run)]
                    for block in piece.blocks
                    for begin, end in self._missing(stored, key, block.first, block.first + block.rows)
                ]
                if not wanted or await self._committer.commit(stored, wanted):
                    return
            raise Overloaded("others store the same rows")
        finally:
            self._budget.pending -= size

    @staticmethod
    def _missing(stored: StoredShuffle, key: RunKey, first: int, end: int) -> list[tuple[int, int]]:
        run = stored.runs.get(key)
        return [(first, end)] if run is None else run.missing(first, end)

    def missing(self, shuffle: str, piece: RunSlice) -> list[tuple[int, int]]:
        """Rows of the slice that are not here."""
        stored, key = self.shuffles.get(shuffle), (piece.partition, piece.attempt, piece.run)
        end = piece.first + piece.rows
        return [(piece.first, end)] if stored is None else self._missing(stored, key, piece.first, end)

    async def opened(self, shuffle: str, name: str, spec: Spec) -> StoredShuffle:
        """The shuffle's folder, made if there is none. Raises ShuffleNotFound (forgotten), StorageFull, StorageFailed."""
        check_id(shuffle)
        async with self._creating:
            if shuffle in self._forgotten:
                raise ShuffleNotFound(f"shuffle {shuffle} was removed")
            if shuffle not in self.shuffles:
                await self._thread(splitter)
                try:
                    path = self._directory / shuffle
                    made = await self._committer.call(lambda: StoredShuffle.create(path, name, spec, self._descriptors))
                    self.shuffles[shuffle] = made
                except OSError as error:
                    failed = storage_error(error, f"shuffle {shuffle}")
                    self.counters[f"refused_{type(failed).__name__}"] += 1
                    raise failed from error
            return self.shuffles[shuffle]

    # --- read ---------------------------------------------------------------------------------------------------------

    async def read(self, request: wire.ReadBlocks | wire.CutBlocks) -> list[Block]:
        """Whole blocks, or blocks split exactly. Raises DataLost, Overloaded, ShuffleNotFound."""
        stored, key = self._stored(request.shuffle), (request.partition, request.attempt, request.run)
        most = (
            min(max(request.size, 0), wire.BLOCKS_BYTES_MAX) if isinstance(request, wire.ReadBlocks) else wire.BLOCKS_BYTES_MAX
        )
        found = self._following(stored, key, request.first, request.last, most)
        size = sum(entry.size for entry in found)
        if not self._budget.room_to_read(size):
            self.counters["refused_reads"] += 1
            raise Overloaded("too much is being read: ask another replica")
        self._budget.reading += size
        try:
            blocks = await self._blocks(stored, key, found)
            for at in {0, len(blocks) - 1} if blocks and isinstance(request, wire.CutBlocks) else ():
                block = blocks[at]
                begin, end = max(block.first, request.first), min(block.first + block.rows, request.last + 1)
                if (begin, end) != (block.first, block.first + block.rows):
                    blocks[at] = await self._read(lambda: splitter().part(stored.spec, block, begin, end))  # noqa: B023
            return blocks
        finally:
            self._budget.reading -= size

    @staticmethod
    def _following(stored: StoredShuffle, key: RunKey, first: int, last: int, size: int) -> list[BlockEntry]:
        """Blocks from the one with row `first` on, up to the first gap, of so many bytes unless a single one is larger."""
        run, found = stored.runs.get(key), list[BlockEntry]()
        for entry in run.between(first, last + 1) if run is not None else ():
            size -= entry.size
            if entry.first > first or (found and size < 0):
                break
            found.append(entry)
            first = entry.end
        return found

    async def _blocks(self, stored: StoredShuffle, key: RunKey, entries: list[BlockEntry]) -> list[Block]:
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

    def _damaged(self, stored: StoredShuffle, key: RunKey, entry: BlockEntry) -> None:
        if stored.remove(key, entry):
            self.counters["damaged"] += 1
            stored.damaged = True
            fields = {"shuffle": stored.id, "run": key, "first": entry.first, "rows": entry.rows, "file": str(entry.file.path)}
            log.error("damaged block dropped", extra={"fields": fields})
            self._beside.add(task := self._loop.create_task(self._void(entry)))
            task.add_done_callback(self._beside.discard)

    async def _void(self, entry: BlockEntry) -> None:
        """Nobody waits for it: at worst it is found damaged once more after a new start."""
        try:
            await self._committer.call(lambda: entry.file.void(entry.offset))
        except OSError as error:
            log.warning(
                "damaged block could not be marked", extra={"fields": {"file": str(entry.file.path), "reason": str(error)}}
            )

    async def keys_of(self, stored: StoredShuffle, key: RunKey, entry: BlockEntry) -> KeyList:
        """The keys of a block. Raises DataLost, Overloaded, StorageFailed."""
        (block,) = await self._blocks(stored, key, [entry])
        return await self._read(lambda: splitter().keys_of(stored.spec, block))

    # --- the leader's commands ------------------------------------------------------------------------------------------

    async def obey(self, epoch: int) -> None:
        """Remember the leader's epoch. Raises StaleEpoch if a later one leads."""
        async with self._obeying:
            if epoch < self.epoch:
                raise StaleEpoch(f"epoch {epoch} is over: {self.epoch} leads")
            if epoch > self.epoch:
                try:
                    await self._committer.call(lambda: self._epochs.write(epoch))
                except OSError as error:
                    raise storage_error(error, "the leader's epoch") from error
                self.epoch = epoch

    async def compact(self, stored: StoredShuffle) -> None:
        """The space of what was forgotten; when that takes long it goes on beside."""
        task = self._compactions.get(stored.id)
        if task is None:
            task = self._compactions[stored.id] = self._loop.create_task(self._compact(stored), name="space")
            self._beside.add(task)
            task.add_done_callback(self._beside.discard)
        await asyncio.wait({task}, timeout=COMPACT_SECONDS)

    async def _compact(self, stored: StoredShuffle) -> None:
        async with self._compacting:
            self._compactions.pop(stored.id, None)  # what is forgotten from now on may be too late for this time
            await compact(stored, self._committer, self.counters)

    async def forget(self, shuffle: str) -> None:
        """Delete everything of it, for good."""
        check_id(shuffle)
        async with self._creating:
            self._forgotten[shuffle] = None
            while len(self._forgotten) > FORGOTTEN_MAX:
                self._forgotten.popitem(last=False)
            self.shuffles.pop(shuffle, None)
        try:
            await self._committer.call(lambda: remove_folder(self._directory / shuffle))
        except OSError as error:
            raise storage_error(error, f"removing shuffle {shuffle}") from error

    async def close(self) -> None:
        """Finish what is being written."""
        await asyncio.gather(*self._beside, return_exceptions=True)
        await self._committer.close()
        self._threads.shutdown(wait=False)


def _load_blocks(entries: list[BlockEntry]) -> list[Block]:
    """Up to the first damaged one."""
    blocks = []
    for entry in entries:
        data = entry.file.intact(entry.offset, entry.size, entry.crc)
        if data is None:
            break
        blocks.append(Block(entry.first, entry.rows, entry.first_key, entry.last_key, entry.crc, data))
    return blocks
