"""What a storage follower lacks of an interval is fetched from others: split exactly at the bounds, only rows not here.

What has come is stored as it comes, so a fetch that was broken off goes on where it was. One that is asked for again while
it is under way is joined; another command waits for it, and looks again for what is missing. Its size counts what was sent for
it also before it failed.

The leader says who fetches what. Of sealed shuffles a follower also fetches by itself: what it found damaged, and, once it has
started, shuffles that it should hold by their table and knows nothing of, for its disk is another one or their folder was put
aside. Shuffles that are still filled or sealed are the leader's: it counts them, and has what is missing fetched.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice

import msgspec

from roq.errors import (
    DataLost,
    Overloaded,
    RoqError,
    ShuffleNotFound,
    ShuffleSealed,
    StorageFailed,
    StorageFull,
    TemporaryError,
    WinnersUnknown,
)
from roq.log.replicated.repair import Holding, plan
from roq.log.replicated.repairer import from_sources
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.runtime.rpc import RpcPool
from roq.shuffle.committed import CommittedAttempts, parts
from roq.shuffle.node.memory import Budget
from roq.shuffle.node.queries import FencedCommands
from roq.shuffle.node.storage import RangeStorage
from roq.wire import shuffle as wire
from roq.wire.gcm import ReportRuns, ShuffleList, TableInfo
from roq.wire.shuffle import FetchInterval, Interval, Piece, RunSlice, ShuffleState

log = logger(__name__)
ROUNDS = 8  # tries at all sources before a fetch fails; the leader asks again
AT_ONCE = 8  # requests of one follower's fetches under way at a time
OVERLOADED_MAX = 40  # times in a row that a source has no room to read for us: some 20 s
SIZES_MAX = 10_000  # fetches whose size is remembered
Command = tuple[int, int, tuple[str, ...]]  # epoch, table epoch, sources
Fetch = tuple[str, Interval, str]  # shuffle, interval, digest of the committed: empty for every attempt
REPAIR_SECONDS = 2.0  # between two looks
Report = Callable[[ReportRuns], Awaitable[TableInfo]]
List = Callable[[], Awaitable[ShuffleList]]


class _OwnDisk(Exception):
    """Another source would not help."""

    def __init__(self, error: RoqError) -> None:
        super().__init__(str(error))
        self.error = error


class Fetcher:
    """All fetches of one follower."""

    def __init__(self, storage: RangeStorage, peers: RpcPool, budget: Budget, commands: FencedCommands) -> None:
        self._storage, self._peers, self._budget, self._commands = storage, peers, budget, commands
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._under_way: dict[Fetch, tuple[asyncio.Task[int], Command]] = {}
        self._sizes: OrderedDict[Fetch, int] = OrderedDict()  # of those that aren't whole yet

    async def fetch(self, request: wire.FetchInterval, committed: CommittedAttempts | None) -> int:
        """Returns when the interval is complete here; bytes of blocks that were sent for it. committed: those of the request,
        None: every attempt. Raises Unavailable, DataLost, StorageFull, ShuffleNotFound."""
        self._commands.note(request.shuffle, request.table_epoch)
        what = (request.shuffle, request.interval, committed.digest if committed is not None else "")
        command = (request.epoch, request.table_epoch, tuple(request.sources))
        size = 0
        task, its_command = self._under_way.get(what, (None, command))
        if task is not None and its_command != command:  # one it does not know of may have taken rows away since it looked
            await asyncio.wait({task})
            size = 0 if task.cancelled() or task.exception() is not None else task.result()
            task, _ = self._under_way.get(what, (None, command))  # of another one that waited
        if task is None:
            task = asyncio.get_running_loop().create_task(self._fetch(what, request.sources, committed), name="fetch")
            self._under_way[what] = task, command
            task.add_done_callback(lambda done: self._ended(what, done))
        return size + await asyncio.shield(task)

    def _ended(self, what: Fetch, task: asyncio.Task[int]) -> None:
        self._under_way.pop(what, None)
        if not task.cancelled():
            task.exception()  # whoever waits is told; nobody may

    async def _fetch(self, what: Fetch, sources: Sequence[str], committed: CommittedAttempts | None) -> int:
        self._sizes.setdefault(what, 0)
        while len(self._sizes) > SIZES_MAX:
            self._sizes.popitem(last=False)
        name = f"an interval of shuffle {what[0]}"
        retry_on, pauses = (TemporaryError, DataLost), delays(0.05, 1.0)
        try:
            await from_sources(name, sources, lambda source: self._from(source, what, committed), retry_on, ROUNDS, pauses)
        except _OwnDisk as own:
            raise own.error from own
        return self._sizes.pop(what, 0)

    async def _from(self, source: str, what: Fetch, committed: CommittedAttempts | None) -> None:
        query: wire.ListSlices | None = wire.ListSlices(*what[:2], {}, committed is None, what[2])
        named: wire.SpecTold | None = None
        while query is not None:
            try:
                page = await self._peers.request(source, query, wire.Slices)
            except WinnersUnknown:
                named = named or await self._named(source, what[0])
                for part in parts(what[0], named.name, named.spec, committed or CommittedAttempts({})):
                    await self._peers.request(source, part, wire.FollowerDone)
                page = await self._peers.request(source, query, wire.Slices)
            if page.slices:
                named = named or await self._named(source, what[0])
                await self._all(source, what, named, page.slices)
            query = None if page.next is None else msgspec.structs.replace(query, begin=page.next)

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
                    begin = await self._some(source, what, named, request)
                    pauses = islice(delays(0.02, 0.5), OVERLOADED_MAX)
                except Overloaded:  # it gives to others just now; what has come is not asked for again
                    if (pause := next(pauses, None)) is None:
                        raise
                    await asyncio.sleep(pause)

    async def _some(self, source: str, what: Fetch, named: wire.SpecTold, request: wire.CutBlocks) -> int:
        """Fetch and store what fits one message, in turn; where to go on."""
        async with self._at_once:
            await self._budget.borrow(wire.BLOCKS_BYTES_MAX)
            try:
                blocks = (await self._peers.request(source, request, wire.Blocks)).blocks
                if not blocks:
                    raise DataLost(f"{source} does not have row {request.first} of run {request.run} any more")
                size = sum(len(block.data) for block in blocks)
                self._sizes[what] = self._sizes.get(what, 0) + size
                self._storage.counters["bytes_fetched"] += size
                await self._store(what[0], named, Piece(request.partition, request.attempt, request.run, blocks))
                return blocks[-1].first + blocks[-1].rows
            finally:
                self._budget.give_back(wire.BLOCKS_BYTES_MAX)

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


class RangeRepair:
    """Of one follower. list: of all shuffles, by the leader; None: there is nobody to ask."""

    def __init__(self, host: str, storage: RangeStorage, fetcher: Fetcher, report: Report, list: List | None) -> None:
        self._host, self._storage, self._fetcher, self._report, self._list = host, storage, fetcher, report, list
        self._compared = list is None
        self._missing: dict[str, str] = {}  # id -> name of shuffles of which nothing is here
        self._fetching: set[str] = set()

    @property
    def lacking(self) -> tuple[str, ...] | None:
        """Ids of sealed shuffles that are not complete here, as far as is known; None until the leader said what there is."""
        if not self._compared:
            return None
        damaged = [one.id for one in self._storage.shuffles.values() if one.damaged]
        return tuple(sorted({*damaged, *self._missing, *self._fetching}))

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(REPAIR_SECONDS)
            if not self._compared:
                await self._compare()
            for id, name in tuple(self._missing.items()):
                if await self._try(id, name):
                    del self._missing[id]
            for stored in [one for one in self._storage.shuffles.values() if one.damaged and one.id not in self._missing]:
                self._fetching.add(stored.id)
                stored.damaged = False  # what is found from now on counts again
                if not await self._try(stored.id, stored.name):
                    stored.damaged = True
                self._fetching.discard(stored.id)

    async def _compare(self) -> None:
        """What is sealed and not known here may have been lost with a disk: its table says whether it was here."""
        if self._list is None:
            return
        try:
            shuffles = (await self._list()).shuffles
        except RoqError as error:
            log.info("host %s can't ask which shuffles it should hold, asking again: %s", self._host, error)
            return
        known = self._storage.shuffles
        self._missing = {one.id: one.name for one in shuffles if one.state is ShuffleState.SEALED and one.id not in known}
        self._compared = True

    async def _try(self, id: str, name: str) -> bool:
        """Is it complete now, or none of ours?"""
        try:
            if await self._repair(id, name):
                self._storage.counters["repaired"] += 1
                log.info("shuffle %s is complete on host %s again", name, self._host)
        except (ShuffleNotFound, ShuffleSealed):  # it was removed, or nothing is committed
            return True
        except RoqError as error:
            log.info("shuffle %s is incomplete on host %s, repairing it again: %s", name, self._host, error)
            return False
        return True

    async def _repair(self, id: str, name: str) -> bool:
        """Fetch what is missing; False if nothing of it belongs here."""
        info = await self._report(ReportRuns(name, id, self._host, [], [], False))
        committed, ours = CommittedAttempts(info.committed), [one for one in info.ranges if self._host in one.holders]
        for one in ours if info.committed else ():
            what = Holding(id, one.holders)
            for copy in plan([what], len(one.holders), {*info.followers, self._host}, lacking=[(what, self._host)]):
                sources = [info.followers[source] for source in copy.sources]
                command = FetchInterval(self._storage.epoch, id, one.interval, {}, sources, info.epoch)
                await self._fetcher.fetch(command, committed)
        return bool(ours and info.committed)
