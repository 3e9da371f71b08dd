"""What a storage follower lacks of an interval is fetched from others: cut exactly at the bounds, only rows not here.

What has come is stored as it comes, so a fetch that was broken off goes on where it was. One that is asked for again while
it is under way is joined; another order waits for it, and looks again for what is missing. Its size counts what was sent for it
also before it failed. Not covered: who fetches what (gcm).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice
from typing import TypeVar

import msgspec

from roq.errors import DataLost, Overloaded, RoqError, StorageFailed, StorageFull, TemporaryError, Unavailable, WinnersUnknown
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.shuffle.node.memory import Budget
from roq.shuffle.node.orders import Orders
from roq.shuffle.node.peers import Peers
from roq.shuffle.node.storage import RangeStorage
from roq.shuffle.winners import Winners, parts
from roq.wire import shuffle as wire
from roq.wire.shuffle import Interval, Piece, RunSlice

log = logger(__name__)
T = TypeVar("T", bound=msgspec.Struct)
ROUNDS = 8  # tries at all sources before a fetch fails; the leader asks again
AT_ONCE = 8  # requests of one follower's fetches under way at a time
OVERLOADED_MAX = 40  # times in a row that a source has no room to read for us: some 20 s
SIZES_MAX = 10_000  # fetches whose size is remembered
Order = tuple[int, int, tuple[str, ...]]  # epoch, table epoch, sources
Fetch = tuple[str, Interval, str]  # shuffle, interval, digest of the winners: empty for every attempt


class _OwnDisk(Exception):
    """Another source would not help."""

    def __init__(self, error: RoqError) -> None:
        super().__init__(str(error))
        self.error = error


class Fetcher:
    """All fetches of one follower."""

    def __init__(self, storage: RangeStorage, peers: Peers, budget: Budget, orders: Orders) -> None:
        self._storage, self._peers, self._budget, self._orders = storage, peers, budget, orders
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._under_way: dict[Fetch, tuple[asyncio.Task[int], Order]] = {}
        self._sizes: OrderedDict[Fetch, int] = OrderedDict()  # of those that aren't whole yet

    async def fetch(self, request: wire.FetchInterval, winners: Winners | None) -> int:
        """Returns when the interval is whole here; bytes of blocks that were sent for it. winners: those of the request, None:
        every attempt. Raises Unavailable, DataLost, StorageFull, ShuffleNotFound."""
        self._orders.note(request.shuffle, request.table_epoch)
        what = (request.shuffle, request.interval, winners.digest if winners is not None else "")
        order = (request.epoch, request.table_epoch, tuple(request.sources))
        size = 0
        task, its_order = self._under_way.get(what, (None, order))
        if task is not None and its_order != order:  # since it looked, an order it does not know of may have taken rows away
            await asyncio.wait({task})
            size = 0 if task.cancelled() or task.exception() is not None else task.result()
            task, _ = self._under_way.get(what, (None, order))  # of another one that waited
        if task is None:
            task = asyncio.get_running_loop().create_task(self._fetch(what, request.sources, winners), name="fetch")
            self._under_way[what] = task, order
            task.add_done_callback(lambda done: self._ended(what, done))
        return size + await asyncio.shield(task)

    def _ended(self, what: Fetch, task: asyncio.Task[int]) -> None:
        self._under_way.pop(what, None)
        if not task.cancelled():
            task.exception()  # whoever waits is told; nobody may

    async def _fetch(self, what: Fetch, sources: Sequence[str], winners: Winners | None) -> int:
        failure: RoqError = Unavailable("there is no source to fetch from")
        pauses = delays(0.05, 1.0)
        self._sizes.setdefault(what, 0)
        while len(self._sizes) > SIZES_MAX:
            self._sizes.popitem(last=False)
        for number in range(ROUNDS * len(sources)):
            source = sources[number % len(sources)]
            try:
                await self._from(source, what, winners)
                return self._sizes.pop(what, 0)
            except _OwnDisk as own:
                raise own.error from own
            except (TemporaryError, DataLost) as error:
                failure = error
                log.info("fetch from a source was incomplete", extra={"fields": {"source": source, "reason": str(error)}})
            if (number + 1) % len(sources) == 0:
                await asyncio.sleep(next(pauses))
        raise failure

    async def _from(self, source: str, what: Fetch, winners: Winners | None) -> None:
        question: wire.ListSlices | None = wire.ListSlices(*what[:2], {}, winners is None, what[2])
        named: wire.SpecTold | None = None
        while question is not None:
            try:
                page = await self._peers.request(source, question, wire.Slices)
            except WinnersUnknown:
                named = named or await self._named(source, what[0])
                for part in parts(what[0], named.name, named.spec, winners or Winners({})):
                    await self._peers.request(source, part, wire.FollowerDone)
                page = await self._peers.request(source, question, wire.Slices)
            if page.slices:
                named = named or await self._named(source, what[0])
                await self._all(source, what, named, page.slices)
            question = None if page.next is None else msgspec.structs.replace(question, begin=page.next)

    async def _named(self, source: str, shuffle: str) -> wire.SpecTold:
        known = self._storage.shuffles.get(shuffle)
        if known is not None:
            return wire.SpecTold(known.name, known.spec)
        return await self._peers.request(source, wire.TellSpec(shuffle), wire.SpecTold)

    async def _all(self, source: str, what: Fetch, named: wire.SpecTold, slices: Sequence[RunSlice]) -> None:
        waiting = deque(slices)

        async def some() -> None:
            while waiting:
                await self._slice(source, what, named, waiting.popleft())

        results = await asyncio.gather(*(some() for _ in range(min(AT_ONCE, len(slices)))), return_exceptions=True)
        errors = sorted((one for one in results if one is not None), key=lambda one: not isinstance(one, _OwnDisk))
        if errors:
            raise errors[0]

    async def _slice(self, source: str, what: Fetch, named: wire.SpecTold, piece: RunSlice) -> None:
        pauses = islice(delays(0.02, 0.5), OVERLOADED_MAX)
        for begin, end in self._storage.missing(what[0], piece):
            while begin < end:
                request = wire.CutBlocks(what[0], piece.partition, piece.attempt, piece.run, begin, end - 1)
                try:
                    begin = await self._in_turn(source, what, named, request)
                    pauses = islice(delays(0.02, 0.5), OVERLOADED_MAX)
                except Overloaded:  # it gives to others just now; what has come is not asked for again
                    if (pause := next(pauses, None)) is None:
                        raise
                    await asyncio.sleep(pause)

    async def _in_turn(self, source: str, what: Fetch, named: wire.SpecTold, request: wire.CutBlocks) -> int:
        async with self._at_once:
            await self._budget.borrow(wire.BLOCKS_BYTES_MAX)
            try:
                return await self._some(source, what, named, request)
            finally:
                self._budget.give_back(wire.BLOCKS_BYTES_MAX)

    async def _some(self, source: str, what: Fetch, named: wire.SpecTold, request: wire.CutBlocks) -> int:
        """Fetch and store what fits one message; where to go on."""
        blocks = (await self._peers.request(source, request, wire.Blocks)).blocks
        if not blocks:
            raise DataLost(f"{source} does not have row {request.first} of run {request.run} any more")
        size = sum(len(block.data) for block in blocks)
        self._sizes[what] = self._sizes.get(what, 0) + size
        self._storage.counters["bytes_fetched"] += size
        await self._store(what[0], named, Piece(request.partition, request.attempt, request.run, blocks))
        return blocks[-1].first + blocks[-1].rows

    async def _store(self, shuffle: str, named: wire.SpecTold, piece: Piece) -> None:
        pauses = delays(0.02, 0.5)
        while True:
            try:
                await self._storage.store(shuffle, named.name, named.spec, [piece])
                return
            except (StorageFull, StorageFailed) as error:
                raise _OwnDisk(error) from error
            except TemporaryError:  # no room in memory just now
                await asyncio.sleep(next(pauses))

    async def close(self) -> None:
        """Break off what is under way."""
        tasks = [task for task, _ in self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
