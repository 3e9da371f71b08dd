"""The state of a work queue, kept up with its log: what a standby does all the time, and a new master once.

A take-over is hot because of this: the standby has applied all that was acknowledged but for the last moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from roq.errors import LogTrimmed, TemporaryError, UnknownFormat
from roq.log.replicated.reader import LogReader
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.workqueue.fold import Fold
from roq.workqueue.master.recent import Recent
from roq.workqueue.records import decode
from roq.workqueue.state import State

log = logger(__name__)
APPLY_AT_ONCE = 50  # entries applied before other work of the loop gets a turn


class LogFollower:
    """position: of the last entry applied."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self.fold, self.recent, self.position = Fold(), Recent(), 0

    async def load(self) -> None:
        """Begin with the newest snapshot, if it is ahead of us. Raises what the log does."""
        newest = (await self._reader.refresh()).snapshot
        if newest is None or newest.position <= self.position:
            return
        found = await self._reader.load_snapshot()
        if found is not None:
            self.position, data = found
            self.fold, self.recent = State.load(data).fold, Recent()

    async def follow(self) -> None:
        """Apply what is confirmed, until cancelled."""
        pauses = delays(0.1, 1.0)
        while True:
            try:
                await self.load()
                async for entries in self._reader.follow(self.position):
                    await self._apply(entries)
                    pauses = delays(0.1, 1.0)
            except LogTrimmed:
                continue  # the snapshot is ahead
            except UnknownFormat:
                raise
            except TemporaryError as error:
                log.info("log could not be read", extra={"fields": {"reason": str(error)}})
            await asyncio.sleep(next(pauses))

    async def catch_up(self, last: int) -> None:
        """Apply everything up to `last`, which is in the log for good."""
        pauses = delays(0.02, 0.5)
        while self.position < last:
            try:
                await (self._reader.refresh() if self.position else self.load())
                while self.position < last and (entries := await self._reader.read(self.position)):
                    await self._apply(entries)
            except LogTrimmed:
                await self.load()
            except TemporaryError as error:
                log.warning("waiting for the log", extra={"fields": {"position": self.position, "reason": str(error)}})
            if self.position < last:
                await asyncio.sleep(next(pauses))

    async def _apply(self, entries: Iterable[tuple[int, bytes]]) -> None:
        for position, entry in entries:
            if position <= self.position:
                continue
            if position != self.position + 1:
                raise AssertionError(f"entry {position} follows {self.position}")
            fold, recent = self.fold, self.recent
            for record in decode(entry):
                recent.note(record, fold.apply(record))
            self.position = position
            if position % APPLY_AT_ONCE == 0:
                await asyncio.sleep(0)
