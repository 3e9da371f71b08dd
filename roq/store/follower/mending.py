"""What a storage follower found damaged of a sealed shuffle is fetched again from the other holders, without anybody's order.

Not covered: shuffles that are still filled or sealed; the leader counts those, and has fetched what is missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from roq.errors import RoqError
from roq.shuffle.winners import Winners
from roq.store.follower.fetching import Fetcher
from roq.store.follower.storage import Storage
from roq.store.follower.stored import Stored
from roq.wire.gcm import ReportRuns, TableInfo
from roq.wire.shuffle import FetchInterval

log = logging.getLogger(__name__)
MEND_SECONDS = 2.0  # between two looks
Report = Callable[[ReportRuns], Awaitable[TableInfo]]


async def mend(host: str, storage: Storage, fetcher: Fetcher, report: Report) -> None:
    """For ever."""
    while True:
        await asyncio.sleep(MEND_SECONDS)
        for stored in [one for one in storage.shuffles.values() if one.hurt]:
            try:
                await _mend(host, stored, storage, fetcher, report)
            except RoqError as error:
                log.info("not mended yet", extra={"fields": {"shuffle": stored.name, "reason": str(error)}})


async def _mend(host: str, stored: Stored, storage: Storage, fetcher: Fetcher, report: Report) -> None:
    info = await report(ReportRuns(stored.name, stored.id, host, [], [], False))
    if not info.winners:
        return
    winners = Winners(info.winners)
    stored.hurt = False  # what is found from now on counts again
    try:
        for one in info.ranges:
            sources = [info.followers[other] for other in one.holders if other != host and other in info.followers]
            if host in one.holders and sources:
                await fetcher.fetch(FetchInterval(storage.epoch, stored.id, one.interval, {}, sources, info.epoch), winners)
    except RoqError:
        stored.hurt = True
        raise
    storage.counters["mended"] += 1
    log.info("mended", extra={"fields": {"shuffle": stored.name}})
