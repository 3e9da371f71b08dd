"""What a storage follower lacks of a sealed shuffle is fetched again from the other holders, without anybody's order: what it
found damaged, and, once it has started, shuffles that it should hold by their table and knows nothing of, for its disk is
another one or their folder was put aside.

Not covered: shuffles that are still filled or sealed; the leader counts those, and has fetched what is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from roq.errors import RoqError, ShuffleNotFound, ShuffleSealed
from roq.runtime.observe import logger
from roq.shuffle.node.fetching import Fetcher
from roq.shuffle.node.storage import RangeStorage
from roq.shuffle.winners import Winners
from roq.wire.gcm import ReportRuns, ShuffleList, TableInfo
from roq.wire.shuffle import FetchInterval, ShuffleState

log = logger(__name__)
MEND_SECONDS = 2.0  # between two looks
Report = Callable[[ReportRuns], Awaitable[TableInfo]]
List = Callable[[], Awaitable[ShuffleList]]


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
        hurt = [one.id for one in self._storage.shuffles.values() if one.hurt]
        return tuple(sorted({*hurt, *self._missing, *self._fetching}))

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(MEND_SECONDS)
            if not self._compared:
                await self._compare()
            for id, name in tuple(self._missing.items()):
                if await self._try(id, name):
                    del self._missing[id]
            for stored in [one for one in self._storage.shuffles.values() if one.hurt and one.id not in self._missing]:
                self._fetching.add(stored.id)
                stored.hurt = False  # what is found from now on counts again
                if not await self._try(stored.id, stored.name):
                    stored.hurt = True
                self._fetching.discard(stored.id)

    async def _compare(self) -> None:
        """What is sealed and not known here may have been lost with a disk: its table says whether it was here."""
        if self._list is None:
            return
        try:
            shuffles = (await self._list()).shuffles
        except RoqError as error:
            log.info("comparing postponed", extra={"fields": {"reason": str(error)}})
            return
        known = self._storage.shuffles
        self._missing = {one.id: one.name for one in shuffles if one.state is ShuffleState.SEALED and one.id not in known}
        self._compared = True

    async def _try(self, id: str, name: str) -> bool:
        """Is it complete now, or none of ours?"""
        try:
            if await self._mend(id, name):
                self._storage.counters["repaired"] += 1
                log.info("shuffle repaired", extra={"fields": {"shuffle": name}})
        except (ShuffleNotFound, ShuffleSealed):  # it was removed, or nothing has won
            return True
        except RoqError as error:
            log.info("shuffle repair postponed", extra={"fields": {"shuffle": name, "reason": str(error)}})
            return False
        return True

    async def _mend(self, id: str, name: str) -> bool:
        """Fetch what is missing; False if nothing of it belongs here."""
        info = await self._report(ReportRuns(name, id, self._host, [], [], False))
        winners, ours = Winners(info.winners), [one for one in info.ranges if self._host in one.holders]
        for one in ours if info.winners else ():
            sources = [info.followers[other] for other in one.holders if other != self._host and other in info.followers]
            if sources:
                order = FetchInterval(self._storage.epoch, id, one.interval, {}, sources, info.epoch)
                await self._fetcher.fetch(order, winners)
        return bool(ours and info.winners)
