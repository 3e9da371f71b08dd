"""The background check: every entry and every blob is read again now and then; what is damaged is put aside.

A thread reads, a slice at a time, and the loop goes on. What was put aside is missing in the inventory and answered UNKNOWN;
the log's owner has it copied again from another store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from roq.log.store.blobs import BlobFolder
from roq.log.store.storage import SegmentStorage
from roq.runtime.observe import Counters, logger

log = logger(__name__)
FIRST_SECONDS = 60.0  # after the start
PAUSE_SECONDS = 3600.0  # between two rounds
BYTES_PER_SECOND = 8 * 1024 * 1024
ENTRIES_AT_ONCE = 200  # looked up at once
SLICE_BYTES = 1024 * 1024  # read at once, unless a single entry is larger


async def scrub(storage: SegmentStorage, blobs: BlobFolder, counters: Counters, kick: Callable[[], None]) -> None:
    """For ever."""
    await asyncio.sleep(FIRST_SECONDS)
    while True:
        await scrub_entries(storage, counters, BYTES_PER_SECOND)
        kick()
        for blob in await asyncio.to_thread(blobs.names):
            size = blobs.size(blob)
            if not await asyncio.to_thread(blobs.check, blob):
                counters["scrub_bad_blobs"] += 1
                log.error("damaged blob quarantined", extra={"fields": {"blob": blob}})
            await asyncio.sleep(size / BYTES_PER_SECOND)
        await asyncio.sleep(PAUSE_SECONDS)


async def scrub_entries(storage: SegmentStorage, counters: Counters, bytes_per_second: float) -> None:
    """One round over all entries."""
    for name in list(storage.shelf.segments):
        segment = storage.shelf.segments.get(name)
        if segment is None:
            continue
        first, last = segment.base, segment.end - 1
        while first <= last:
            until = min(first + ENTRIES_AT_ONCE - 1, last)
            held = storage.held(name, first, until)
            while held:
                count, size, bad = await asyncio.to_thread(storage.verify, name, held, SLICE_BYTES)
                for position, place in bad:
                    if storage.still_damaged(name, position, place):
                        storage.put_aside(name, position)
                        counters["scrub_bad_entries"] += 1
                        log.error("damaged entry quarantined", extra={"fields": {"segment": name, "position": position}})
                held = held[count:]
                await asyncio.sleep(size / bytes_per_second)
            first = until + 1
            await asyncio.sleep(0)
