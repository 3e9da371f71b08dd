"""What is here of which attempts, between which borders: answered page by page, however many attempts there are; and forgotten.

A page ends when it is as long as a message may be, or has taken long enough; others get their turns meanwhile (Pager). Borders
mostly lie between blocks, as writers' buffers split blocks at them; where one lies within a block, its keys have to be read.

Only a leader may have things forgotten, and a command that came late is refused: of a former leader, or of an older table than
others, as the follower may have fetched meanwhile what it would take away again. A command that becomes late while it is obeyed
ends. Not covered: how a block is read, the leader's epoch (storage.py); fetching (repair.py).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from random import Random
from typing import NamedTuple

from roq.errors import StaleEpoch, TemporaryError
from roq.shuffle.committed import CommittedAttempts
from roq.shuffle.node.storage import RangeStorage
from roq.shuffle.node.stored import BlockEntry, RunIndex, RunKey, StoredShuffle
from roq.shuffle.ranges import rows_before
from roq.shuffle.sampling import key_count, message_bytes, reduced
from roq.wire.shuffle import BEGIN, Counts, Cursor, Interval, Position, RunSample, RunSlice, Samples, Slices

PAGE_SECONDS = 2.0  # of one page; a few are answered at a time, and each has many times as long
TURN_SECONDS = 0.005
SLICES_MAX = 20_000  # in one page: 1 MiB with usual names
SAMPLE_BLOCKS_MAX = 1024  # looked into for one page of samples; of more, as many are drawn
FEW_BLOCKS = 16  # of a stretch; with more, their first keys are sample enough
KEYS_OF_BLOCK = 8  # at least of a block that is looked into: one alone would say that all of it lies at its begin
PAGE_BLOCKS = 8 * SAMPLE_BLOCKS_MAX  # are one page of samples
PAGE_KEYS = 512  # are left of such a page if others follow: what all of them say is as good
SAMPLE_BYTES_MAX = 4 * 1024 * 1024  # of one page
TABLES_MAX = 10_000  # shuffles whose table is remembered; who is forgotten is not being moved


class Pager:
    """A page, from `begin` on; `next`: where the one after it begins. size: of what is in it so far, over with `most`."""

    def __init__(self, begin: Cursor = BEGIN, most: int = sys.maxsize) -> None:
        self.begin, self.size, self._most = begin, 0, most
        self.next: Cursor | None = None
        now = time.monotonic()
        self._end, self._pause = now + PAGE_SECONDS, now + TURN_SECONDS

    @property
    def over(self) -> bool:
        """It is long enough, or has taken long enough."""
        return self.size >= self._most or time.monotonic() >= self._end

    async def pause(self) -> None:
        """Let others work if it is time to."""
        if time.monotonic() >= self._pause:
            await asyncio.sleep(0)
            self._pause = time.monotonic() + TURN_SECONDS


class Stretch(NamedTuple):
    """Rows of a run that are here without a gap: first … end-1. number: of their interval. size: their bytes, about. weight:
    bytes they stand for, their own and those of stretches that were not drawn."""

    key: RunKey
    number: int
    entries: list[BlockEntry]
    first: int
    end: int
    size: int
    weight: int


def drawn(stretches: Sequence[Stretch], most: int) -> list[Stretch]:
    """As many of them as have about so many blocks, at random (the same each time), but some of each interval. Long ones, of
    which few keys are read, all stay."""
    found: list[Stretch] = []
    short: dict[int, list[Stretch]] = {}
    for stretch in stretches:
        if len(stretch.entries) > FEW_BLOCKS:
            found.append(stretch)
        else:
            short.setdefault(stretch.number, []).append(stretch)
    blocks = sum(len(stretch.entries) for each in short.values() for stretch in each)
    chance = Random(0)
    for each in short.values():
        some = chance.sample(each, min(len(each), -(-len(each) * most // max(1, blocks))))
        total, part = sum(stretch.weight for stretch in each), sum(stretch.weight for stretch in some)
        found += [stretch._replace(weight=stretch.weight * total // max(1, part)) for stretch in some]
    return found


class RangeQueries:
    """On the follower's loop."""

    def __init__(self, storage: RangeStorage) -> None:
        self._storage = storage

    async def row(self, stored: StoredShuffle, key: RunKey, run: RunIndex, border: Position) -> int:
        """The first row of the run that is not before the border. Raises DataLost, Overloaded, StorageFailed."""
        while isinstance(found := run.row_of(border), BlockEntry):
            entry = found
            keys = await self._storage.keys_of(stored, key, entry)
            run.learn(border, entry, entry.first + rows_before(keys, entry.first, run.place, border))
        return found

    async def rows(self, stored: StoredShuffle, key: RunKey, run: RunIndex, interval: Interval) -> tuple[int, int]:
        """Rows first … end-1 of the run lie in the interval. Raises as `row`."""
        lower, upper = interval.lower, interval.upper
        first = run.begin if lower is None else run.row_of(lower)
        if lower is not None and isinstance(first, BlockEntry):
            first = await self.row(stored, key, run, lower)
        end = run.end if upper is None else run.row_of(upper)
        if upper is not None and isinstance(end, BlockEntry):
            end = await self.row(stored, key, run, upper)
        assert isinstance(first, int)
        assert isinstance(end, int)
        return first, end

    async def _walk(
        self, stored: StoredShuffle | None, committed: CommittedAttempts | None, intervals: Sequence[Interval], pager: Pager
    ) -> AsyncIterator[tuple[RunKey, RunIndex, int, int, int]]:
        """(key, run, number of an interval, first, end): rows first … end-1 of the run lie in it; of the committed attempts
        (None: of all), as far as the page goes. Raises as `row`."""
        for key, run in stored.runs_of(committed, pager.begin) if stored is not None else ():
            if key > pager.begin and pager.over:
                pager.next = key
                return
            assert stored is not None
            for number, interval in enumerate(intervals):
                first, end = await self.rows(stored, key, run, interval)
                yield key, run, number, first, end
                await pager.pause()

    async def slices(
        self, shuffle: str, interval: Interval, committed: CommittedAttempts | None, begin: Cursor = BEGIN
    ) -> Slices:
        """What lies in the interval, and the bytes of each, about; a run with a gap is several. Nothing if the shuffle isn't
        known. Raises as `row`."""
        stored, pager = self._storage.shuffles.get(shuffle), Pager(begin, SLICES_MAX)
        slices: list[RunSlice] = []
        sizes: list[int] = []
        async for key, run, _, first, end in self._walk(stored, committed, [interval], pager):
            for start, stop, size in run.stretches(first, end):
                slices.append(RunSlice(*key, start, stop - start))
                sizes.append(size)
            pager.size = len(slices)
        return Slices(slices, sizes, pager.next)

    async def count(
        self, shuffle: str, intervals: Sequence[Interval], committed: CommittedAttempts, begin: Cursor = BEGIN
    ) -> Counts:
        """Rows and bytes per interval. Raises as `row`."""
        stored, pager = self._storage.shuffles.get(shuffle), Pager(begin)
        rows, sizes = [0] * len(intervals), [0] * len(intervals)
        async for _, run, at, first, end in self._walk(stored, committed, intervals, pager):
            here, size = run.tally(first, end)
            rows[at] += here
            sizes[at] += size
        return Counts(rows, sizes, pager.next)

    async def samples(
        self, shuffle: str, intervals: Sequence[Interval], committed: CommittedAttempts, keys: int, begin: Cursor = BEGIN
    ) -> Samples:
        """A sample per stretch of a run that is here and lies in an interval, or fewer that stand for all of a page. keys:
        wanted, 0: see TellSamples. Raises as `row`."""
        stored = self._storage.shuffles.get(shuffle)
        if stored is None:
            return Samples([])
        if keys <= 0:
            return await self._rows_per_attempt(stored, intervals, committed, begin)
        stretches, following = await self._stretches(stored, intervals, committed, begin)
        few = SAMPLE_BLOCKS_MAX  # of a stretch, if every one is looked into
        if sum(len(stretch.entries) for stretch in stretches) > SAMPLE_BLOCKS_MAX:
            few, stretches = FEW_BLOCKS, await asyncio.to_thread(drawn, stretches, SAMPLE_BLOCKS_MAX)
        short = sum(len(stretch.entries) for stretch in stretches if len(stretch.entries) <= few)
        each = max(KEYS_OF_BLOCK, keys // max(1, short))
        pager = Pager()
        samples: list[RunSample] = []
        for stretch in stretches:
            samples.append(await self._sample(stored, stretch, each if len(stretch.entries) <= few else 1))
            await pager.pause()
        most = keys if following is None and begin == BEGIN else min(keys, PAGE_KEYS)
        if key_count(samples) > 2 * most or sum(map(message_bytes, samples)) > SAMPLE_BYTES_MAX:
            samples = await asyncio.to_thread(reduced, samples, most, SAMPLE_BYTES_MAX, committed.by)
        return Samples(samples, following)

    async def _stretches(
        self, stored: StoredShuffle, intervals: Sequence[Interval], committed: CommittedAttempts, begin: Cursor
    ) -> tuple[list[Stretch], Cursor | None]:
        """Those of one page, and where the next one begins."""
        pager = Pager(begin, PAGE_BLOCKS)
        found: list[Stretch] = []
        async for key, run, number, first, end in self._walk(stored, committed, intervals, pager):
            for start, stop, size in run.stretches(first, end):
                found.append(Stretch(key, number, run.between(start, stop), start, stop, size, size))
                pager.size += len(found[-1].entries)
        return found, pager.next

    async def _sample(self, stored: StoredShuffle, stretch: Stretch, each: int) -> RunSample:
        """each: keys to take of a block."""
        keys: list[bytes] = []
        rows: list[int] = []
        weights: list[int] = []
        for entry in stretch.entries:
            begin, stop = max(stretch.first, entry.first), min(stretch.end, entry.end)
            step = max(1, -(-(stop - begin) // each))
            at = list(range(begin, stop, step))
            if at == [entry.first]:
                keys.append(entry.first_key)
            else:
                there = await self._storage.keys_of(stored, stretch.key, entry)
                keys += [there[row - entry.first] for row in at]
            rows += at
            weights += [entry.size * (min(row + step, stop) - row) // entry.rows for row in at]
        if stretch.weight != stretch.size:
            weights = [weight * stretch.weight // max(1, stretch.size) for weight in weights]
        return RunSample(*stretch.key, stretch.end - stretch.first, sum(weights), tuple(keys), tuple(rows), tuple(weights))

    async def _rows_per_attempt(
        self, stored: StoredShuffle, intervals: Sequence[Interval], committed: CommittedAttempts, begin: Cursor
    ) -> Samples:
        pager = Pager(begin, SLICES_MAX)
        found: dict[tuple[int, str], tuple[int, int]] = {}
        async for key, run, _, first, end in self._walk(stored, committed, intervals, pager):
            counts, here = found.get(key[:2], (0, 0)), run.tally(first, end)
            found[key[:2]] = counts[0] + here[0], counts[1] + here[1]
            pager.size = len(found)
        return Samples([RunSample(*place, 0, *counts, (), (), ()) for place, counts in found.items()], pager.next)


class FencedCommands:
    """On the follower's loop."""

    def __init__(self, storage: RangeStorage, queries: RangeQueries) -> None:
        self._storage, self._queries = storage, queries
        self._tables: OrderedDict[str, int] = OrderedDict()

    def note(self, shuffle: str, table_epoch: int) -> None:
        """A command by this table came."""
        self._tables[shuffle] = max(table_epoch, self._tables.get(shuffle, 0))
        self._tables.move_to_end(shuffle)
        while len(self._tables) > TABLES_MAX:
            self._tables.popitem(last=False)

    async def keep(
        self, epoch: int, shuffle: str, table_epoch: int, intervals: Sequence[Interval], committed: CommittedAttempts | None
    ) -> None:
        """Forget blocks outside of the intervals, and what isn't committed (None: all attempts may be). What comes meanwhile
        stays. Raises StaleEpoch, TemporaryError when this command has become an old one; and as RangeQueries.row."""
        self._check(epoch, shuffle, table_epoch)
        self.note(shuffle, table_epoch)
        stored = self._storage.shuffles.get(shuffle)
        if stored is None:
            return
        pager = Pager()
        for key in list(stored.runs):
            await self._keep_run(stored, key, intervals, committed, lambda: self._check(epoch, shuffle, table_epoch))
            await pager.pause()
        await self._storage.compact(stored)

    def _check(self, epoch: int, shuffle: str, table_epoch: int) -> None:
        if epoch < self._storage.epoch:
            raise StaleEpoch(f"epoch {epoch} is over: {self._storage.epoch} leads")
        if table_epoch < self._tables.get(shuffle, 0):
            raise TemporaryError(f"table {table_epoch} of shuffle {shuffle} is not the last one: {self._tables[shuffle]} is")

    async def _keep_run(
        self,
        stored: StoredShuffle,
        key: RunKey,
        intervals: Iterable[Interval],
        committed: CommittedAttempts | None,
        check: Callable[[], None],
    ) -> None:
        run = stored.runs.get(key)
        if run is None:
            return
        before = list(run.entries)
        wanted: set[int] = set()
        if committed is None or committed.by.get(key[0]) == key[1]:
            for interval in intervals:
                first, end = await self._queries.rows(stored, key, run, interval)
                wanted.update(entry.first for entry in run.between(first, end))
        check()  # nothing is awaited from here on
        for entry in before:
            if entry.first not in wanted:
                stored.remove(key, entry)
