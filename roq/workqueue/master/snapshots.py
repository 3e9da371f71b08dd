"""When a master's state is written beside its log, so that the log before may go and a take-over has little to read."""

from __future__ import annotations

import asyncio

from roq.errors import LogFenced, TemporaryError
from roq.log.replicated.writer import LogWriter
from roq.runtime.backoff import delays
from roq.runtime.observe import Counters, logger
from roq.workqueue.master.reign import MasterReign

SNAPSHOT_BYTES_MIN = 32 * 1024 * 1024  # of the log since the last snapshot
SNAPSHOT_RATIO = 3  # … and this many times the last snapshot's size, so that making them stays a small part of the work
SNAPSHOT_SEGMENTS = 100  # of the log are too many, however small: one without a snapshot ends at SEGMENTS_MAX
SNAPSHOT_LOOK_SECONDS = 2.0

log = logger(__name__)


async def snapshots(reign: MasterReign, writer: LogWriter, counters: Counters, lost: asyncio.Event) -> None:
    """Every so often, until the reign ends; and when stores have lost what only the state in memory can replace."""
    written = size = 0
    pauses = delays(SNAPSHOT_LOOK_SECONDS, 60.0)
    while True:
        await asyncio.sleep(SNAPSHOT_LOOK_SECONDS)
        small = reign.bytes_written - written < max(SNAPSHOT_BYTES_MIN, SNAPSHOT_RATIO * size)
        if small and len(writer.meta.segments) <= SNAPSHOT_SEGMENTS and not lost.is_set():
            continue
        lost.clear()  # what is lost still is found again in the next round of repairs
        position, dump = await reign.snapshot()
        try:
            data = await dump.data()
            await writer.snapshot(position, data)
        except LogFenced:
            return  # the reign ends by itself
        except TemporaryError as error:
            log.warning("snapshot could not be written", extra={"fields": {"reason": str(error)}})
            await asyncio.sleep(next(pauses))
            continue
        written, size = reign.bytes_written, len(data)
        del data  # it is as large as the queue
        counters["snapshots"] += 1
        lost.clear()  # what was missed while this one was made
        pauses = delays(SNAPSHOT_LOOK_SECONDS, 60.0)
