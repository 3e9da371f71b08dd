"""What a storage follower lacks of an interval is fetched from others: cut exactly at the bounds, only rows not here.

What has come is stored as it comes, so a fetch that was broken off goes on where it was. One that is asked for again while
it is under way is joined; its size counts what was sent for it also before it failed. Not covered: who fetches what (gcm).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from roq.errors import DataLost, RoqError, StorageFailed, StorageFull, TemporaryError, Unavailable
from roq.runtime.backoff import delays
from roq.store.follower.memory import Budget
from roq.store.follower.peers import Peers
from roq.store.follower.storage import Storage
from roq.wire import shuffle as wire
from roq.wire.shuffle import Interval, Piece, RunSlice

log = logging.getLogger(__name__)
T = TypeVar("T", bound=msgspec.Struct)
ROUNDS = 8  # tries at all sources before a fetch fails; the leader asks again
AT_ONCE = 8  # requests of one follower's fetches under way at a time
SIZES_MAX = 10_000  # fetches whose size is remembered
Fetch = tuple[str, Interval]


class _OwnDisk(Exception):
    """Another source would not help."""

    def __init__(self, error: RoqError) -> None:
        super().__init__(str(error))
        self.error = error


class Fetcher:
    """All fetches of one follower."""

    def __init__(self, storage: Storage, peers: Peers, budget: Budget) -> None:
        self._storage, self._peers, self._budget = storage, peers, budget
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._under_way: dict[Fetch, asyncio.Task[int]] = {}
        self._sizes: OrderedDict[Fetch, int] = OrderedDict()  # of those that aren't whole yet

    async def fetch(self, request: wire.FetchInterval) -> int:
        """Returns when the interval is whole here; bytes of blocks that were sent for it. Raises Unavailable, DataLost,
        StorageFull, ShuffleNotFound."""
        what = (request.shuffle, request.interval)
        task = self._under_way.get(what)
        if task is None:
            task = self._under_way[what] = asyncio.get_running_loop().create_task(self._fetch(what, request), name="fetch")
            task.add_done_callback(lambda done: self._ended(what, done))
        return await asyncio.shield(task)

    def _ended(self, what: Fetch, task: asyncio.Task[int]) -> None:
        self._under_way.pop(what, None)
        if not task.cancelled():
            task.exception()  # whoever waits is told; nobody may

    async def _fetch(self, what: Fetch, request: wire.FetchInterval) -> int:
        failure: RoqError = Unavailable("there is no source to fetch from")
        pauses = delays(0.05, 1.0)
        self._sizes.setdefault(what, 0)
        while len(self._sizes) > SIZES_MAX:
            self._sizes.popitem(last=False)
        for number in range(ROUNDS * len(request.sources)):
            source = request.sources[number % len(request.sources)]
            try:
                await self._from(source, what, request)
                return self._sizes.pop(what, 0)
            except _OwnDisk as own:
                raise own.error from own
            except (TemporaryError, DataLost) as error:
                failure = error
                log.info("a source did not give all", extra={"fields": {"source": source, "reason": str(error)}})
            if (number + 1) % len(request.sources) == 0:
                await asyncio.sleep(next(pauses))
        raise failure

    async def _from(self, source: str, what: Fetch, request: wire.FetchInterval) -> None:
        shuffle = request.shuffle
        question = wire.ListSlices(shuffle, request.interval, request.winners, not request.winners)
        slices = (await self._peers.request(source, question, wire.Slices)).slices
        if not slices:
            return
        known = self._storage.shuffles.get(shuffle)
        if known is not None:
            named = wire.SpecTold(known.name, known.spec)
        else:
            named = await self._peers.request(source, wire.TellSpec(shuffle), wire.SpecTold)
        waiting = deque(slices)

        async def some() -> None:
            while waiting:
                await self._slice(source, what, named, waiting.popleft())

        results = await asyncio.gather(*(some() for _ in range(min(AT_ONCE, len(slices)))), return_exceptions=True)
        errors = sorted((one for one in results if one is not None), key=lambda one: not isinstance(one, _OwnDisk))
        if errors:
            raise errors[0]

    async def _slice(self, source: str, what: Fetch, named: wire.SpecTold, piece: RunSlice) -> None:
        for begin, end in self._storage.missing(what[0], piece):
            while begin < end:
                request = wire.CutBlocks(what[0], piece.partition, piece.attempt, piece.run, begin, end - 1)
                async with self._at_once:
                    await self._budget.borrow(wire.BLOCKS_BYTES_MAX)
                    try:
                        begin = await self._some(source, what, named, request)
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
        tasks: Sequence[asyncio.Task[int]] = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
